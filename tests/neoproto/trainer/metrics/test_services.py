"""The services' own packages, without a network: wandb offline, MLflow in files."""

from __future__ import annotations

import json
import math
import re
import struct
import time
from importlib import util
from pathlib import Path
from typing import Any

import pytest

from neoproto.errors import ConfigError
from neoproto.trainer.metrics import services
from neoproto.trainer.metrics.service_runs import RunStart, ServiceRuns
from neoproto.trainer.metrics.services import (
    MlflowTracker,
    RunLabels,
    WandbTracker,
    check_installed,
    finite,
    flattened,
    mlflow_name,
)

CONFIG = {"trainer": {"logger": ["wandb"], "seed": 0, "note": "x" * 900}, "data": {}}


def labels(folder: Path, config: dict[str, Any] = CONFIG) -> RunLabels:
    runs = ServiceRuns(folder)
    return RunLabels(project="letters", experiment="first", config=config, folder=folder, runs=runs)


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither service asks a network or a variable of the machine."""
    for name in ("MLFLOW_TRACKING_URI", "MLFLOW_ALLOW_FILE_STORE", "WANDB_RUN_ID", "WANDB_RESUME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    monkeypatch.setenv("WANDB_MODE", "offline")


def starts_of_a_run(
    tracker: WandbTracker | MlflowTracker, runs: ServiceRuns, *starts: tuple[int, int]
) -> None:
    """Each start resumes from a step and logs until another; `x` is 100 times its number, plus the step."""
    for step, last in starts:
        runs.begin(step)
        tracker.begin(runs.starts)
        with (runs.path.parent / "metrics.jsonl").open("a") as file:
            for number in range(step + 1 if step else 0, last + 1):
                tracker.log({"x": 100.0 * runs.starts[-1].start + number}, number)
                file.write(json.dumps({"step": number}) + "\n")


def wandb_rows(path: Path) -> list[tuple[int, dict[str, float]]]:
    """W&B's own step and the values of each row of a `.wandb` file.

    LevelDB's log of protobuf records: blocks of 32 KiB, before each part its checksum, length and kind.
    """
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, record, rows = path.read_bytes(), 7, b"", []
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        _, length, kind = struct.unpack("<IHB", data[at : at + 7])
        record, at = record + data[at + 7 : at + 7 + length], at + 7 + length
        if kind in (1, 4):  # a whole record, or the last part of one
            message = Record.FromString(record)
            record = b""
            if message.WhichOneof("record_type") == "history":
                items = message.history.item
                values = {one.key or one.nested_key[0]: json.loads(one.value_json) for one in items}
                named = {name: value for name, value in values.items() if not name.startswith("_")}
                rows.append((values["_step"], named))
    return rows


@pytest.mark.skipif(util.find_spec("wandb") is None, reason="wandb is not installed")
def test_wandb_offline_writes_below_the_runs_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    tracker = WandbTracker(labels(tmp_path))
    tracker.log({"actor/lr": 0.25, "nothing": math.nan}, 0)
    tracker.log({"val-core/x/acc/mean@1": 0.5}, 0)
    tracker.log({"actor/lr": 0.125}, 1)
    tracker.close(failed=False)
    import wandb

    wandb.teardown()  # as at the end of a process: its service has written everything then
    (written,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    content = written.read_bytes()
    for text in (b"letters", b"first", b"actor/lr", b"0.125", b"val-core/x/acc/mean@1"):
        assert text in content, text
    assert b"nothing" not in content
    assert tracker.place == f"{written.parent} (wandb sync uploads it)"


@pytest.mark.skipif(util.find_spec("wandb") is None, reason="wandb is not installed")
@pytest.mark.usefixtures("offline")
def test_wandb_has_one_run_for_a_folder_and_every_value_of_its_starts(tmp_path: Path) -> None:
    first = labels(tmp_path)
    tracker = WandbTracker(first)
    starts_of_a_run(tracker, first.runs, (0, 4), (2, 5))  # a restart from step 2, in the same process
    tracker.close(failed=True)
    time.sleep(1.1)  # wandb names a folder by the second
    again = labels(tmp_path)  # a resume, in another
    tracker = WandbTracker(again)
    starts_of_a_run(tracker, again.runs, (5, 6), (0, 0))  # and a start from the beginning
    tracker.close(failed=False)
    import wandb

    wandb.teardown()
    written = sorted(tmp_path.glob("wandb/offline-run-*/run-*.wandb"))
    assert len(written) == 2
    assert {path.name for path in written} == {f"run-{first.runs.of('wandb')['id']}.wandb"}
    rows = [row for path in written for row in wandb_rows(path)]
    # A row whose step is not above the last would be dropped by wandb.
    assert [own for own, _ in rows] == list(range(len(rows)))
    assert [
        (int(row["training/global_step"]), row["x"], int(row.get("training/start", 1))) for _, row in rows
    ] == [
        *((step, 100.0 + step, 1) for step in (0, 1, 2, 3, 4)),
        *((step, 200.0 + step, 2) for step in (3, 4, 5)),
        (6, 306.0, 3),
        (0, 400.0, 4),
    ]
    assert (
        b'"first":3,"last":4}' in written[0].read_bytes()
    )  # which steps are taken again, in its configuration
    assert b'"first":0,"last":6}' in written[1].read_bytes()


@pytest.mark.skipif(util.find_spec("mlflow") is None, reason="mlflow is not installed")
@pytest.mark.filterwarnings("default")  # the package's own
@pytest.mark.usefixtures("offline")
def test_mlflow_has_one_run_for_a_folder_and_says_what_is_superseded(tmp_path: Path) -> None:
    first = labels(tmp_path)
    tracker = MlflowTracker(first)
    starts_of_a_run(tracker, first.runs, (0, 4), (2, 3))
    tracker.close(failed=True)
    longer = {**CONFIG, "trainer": {"logger": ["wandb"], "seed": 1, "added": 2}}
    again = labels(tmp_path, longer)
    tracker = MlflowTracker(again)
    starts_of_a_run(tracker, again.runs, (3, 5))
    tracker.close(failed=False)
    from mlflow.tracking import MlflowClient

    client = MlflowClient(tracking_uri=tracker.place)
    experiment = client.get_experiment_by_name("letters")
    assert experiment is not None
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.status == "FINISHED"
    history = client.get_metric_history(run.info.run_id, "x")
    assert {(one.step, one.value) for one in history} == {
        *((step, 100.0 + step) for step in (0, 1, 2, 3, 4)),
        (3, 203.0),
        *((step, 300.0 + step) for step in (4, 5)),
    }
    began = client.get_metric_history(run.info.run_id, "training/start")
    assert {(one.step, one.value) for one in began} == {(3, 2.0), (4, 3.0), (5, 3.0)}
    assert (run.data.params["trainer.seed"], run.data.params["trainer.added"]) == ("0", "2")
    assert run.data.tags["changed.trainer.seed"] == "1"
    moment = r"as logged before \d{4}-\d\d-\d\d \d\d:\d\d:\d\d UTC"
    assert re.fullmatch(
        rf"steps 3 to 4 {moment}: taken again by start 2; steps 4 to 4 {moment}: taken again by start 3",
        run.data.tags["superseded"],
    )
    assert [one["step"] for one in json.loads(run.data.tags["starts"])] == [0, 2, 3]
    tracker.begin([RunStart(start=number, step=0, time=0.0, first=0, last=9) for number in range(1, 301)])
    tags = client.get_run(run.info.run_id).data.tags
    assert max(map(len, tags.values())) <= 5000
    assert json.loads(tags["starts"])[-1]["start"] == 300
    assert tags["superseded"].endswith("by start 300")


@pytest.mark.skipif(util.find_spec("mlflow") is None, reason="mlflow is not installed")
@pytest.mark.filterwarnings("default")  # the package's own
@pytest.mark.usefixtures("offline")
def test_mlflow_begins_a_run_again_if_its_own_was_deleted_or_is_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = []
    for uri in (None, None, (tmp_path / "elsewhere").as_uri()):
        if uri is not None:
            monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
        tracker = MlflowTracker(labels(tmp_path))
        ids.append(ServiceRuns(tmp_path).of("mlflow")["id"])
        tracker._client.delete_run(ids[-1])
    assert len(set(ids)) == 3


@pytest.mark.skipif(util.find_spec("mlflow") is None, reason="mlflow is not installed")
@pytest.mark.filterwarnings("default")  # the package's own
def test_mlflow_writes_files_below_the_runs_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MLFLOW_TRACKING_URI", "MLFLOW_ALLOW_FILE_STORE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    for failed in (False, True):  # the second run, of another folder, finds the experiment
        (tmp_path / "services.json").unlink(missing_ok=True)
        tracker = MlflowTracker(labels(tmp_path))
        tracker.log({"actor/lr": 0.25, "nothing": math.nan}, 0)
        tracker.log({"val-core/x/acc/mean@1": 0.5, "actor/lr": 0.125}, 1)
        tracker.close(failed)
    from mlflow.tracking import MlflowClient

    client = MlflowClient(tracking_uri=tracker.place)
    experiment = client.get_experiment_by_name("letters")
    assert experiment is not None
    runs = client.search_runs([experiment.experiment_id])
    assert sorted(run.info.status for run in runs) == ["FAILED", "FINISHED"]
    assert {run.info.run_name for run in runs} == {"first"}
    assert runs[0].data.metrics == {"actor/lr": 0.125, "val-core/x/acc/mean_at_1": 0.5}
    assert runs[0].data.params["trainer.seed"] == "0"
    assert [one.value for one in client.get_metric_history(runs[0].info.run_id, "actor/lr")] == [0.25, 0.125]
    assert (tmp_path / "mlruns").is_dir()


def test_what_is_chosen_but_missing_is_named_with_its_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(services, "find_spec", lambda name: None)
    check_installed(("console", "jsonl", "tensorboard"))
    with pytest.raises(ConfigError) as caught:
        check_installed(("console", "wandb", "mlflow"))
    assert caught.value.problems == (
        "trainer.logger: 'wandb' is chosen but not installed; pip install wandb",
        "trainer.logger: 'mlflow' is chosen but not installed; pip install mlflow-skinny",
    )


def test_names_are_those_that_mlflow_takes() -> None:
    for name in ("val-core/a/acc/mean@1", "a b.c:d", "é(x)"):
        assert re.fullmatch(r"[\w\-. /:]+", mlflow_name(name), re.ASCII)
    assert mlflow_name("val-core/a/acc/mean@1") == "val-core/a/acc/mean_at_1"


def test_only_finite_figures_are_sent() -> None:
    assert finite({"a": 1, "b": math.nan, "c": math.inf}) == {"a": 1.0}


def test_flattening_tells_absent_null_and_empty_apart() -> None:
    assert dict(flattened({"a": {"b": None, "c": {}, "d": [1, "x"]}, "e": "null"})) == {
        "a.b": "null",
        "a.c": "{}",
        "a.d": '[1, "x"]',
        "e": "null",
    }
