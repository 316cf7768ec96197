"""The services' own packages, without a network: wandb offline, MLflow in files."""

from __future__ import annotations

import math
import re
from importlib import util
from pathlib import Path

import pytest

from neoproto.errors import ConfigError
from neoproto.trainer import services
from neoproto.trainer.services import (
    MlflowTracker,
    RunLabels,
    WandbTracker,
    check_installed,
    finite,
    flattened,
    mlflow_name,
)

CONFIG = {"trainer": {"logger": ["wandb"], "seed": 0, "note": "x" * 900}, "data": {}}


def labels(folder: Path) -> RunLabels:
    return RunLabels(project="letters", experiment="first", config=CONFIG, folder=folder)


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


@pytest.mark.skipif(util.find_spec("mlflow") is None, reason="mlflow is not installed")
@pytest.mark.filterwarnings("default")  # the package's own
def test_mlflow_writes_files_below_the_runs_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MLFLOW_TRACKING_URI", "MLFLOW_ALLOW_FILE_STORE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    for failed in (False, True):  # the second run finds the experiment
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
