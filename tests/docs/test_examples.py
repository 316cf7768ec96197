"""The examples of `docs/extending.md` and the quickstart, as they stand there."""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import cast

import pytest

from actors.reward.builtin import check_rows
from actors.reward.function import load_reward_function, to_score
from neoproto.config import load_config
from neoproto.data import DataProto
from neoproto.data.prompts import read_rows
from neoproto.run.compose import compose_run
from neoproto.store import MemoryStore, use_store
from neoproto.trainer.metrics.record import training_parts
from neoproto.trainer.metrics.tracking import JsonlTracker
from tests.docs.pages import ROOT, file_in
from tests.neoproto.trainer.fakes import FakeHandle, FakePrompts, World
from tests.neoproto.trainer.recording import Recorder

EXTENDING = (ROOT / "docs" / "extending.md").read_text(encoding="utf-8")
QUICKSTART = (ROOT / "docs" / "quickstart.md").read_text(encoding="utf-8")
REPORTS = (ROOT / "docs" / "reports.md").read_text(encoding="utf-8")
DATA = (ROOT / "docs" / "data.md").read_text(encoding="utf-8")
EXAMPLES = ROOT / "docs" / "examples"


def loaded(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("page", "name"), [(EXTENDING, "make_words.py"), (QUICKSTART, "questions.py")], ids=["words", "questions"]
)
def test_the_programs_that_make_data_make_good_data(tmp_path: Path, page: str, name: str) -> None:
    (tmp_path / name).write_text(file_in(page, name))
    subprocess.run([sys.executable, name], cwd=tmp_path, check=True, timeout=60)
    for file in ("train.jsonl", "val.jsonl"):
        rows = read_rows((str(tmp_path / file),), field="data.train_files")
        check_rows("auto", rows)
        assert len(rows) >= 3


def test_the_reward_function_scores(tmp_path: Path) -> None:
    path = tmp_path / "my_reward.py"
    path.write_text(file_in(EXTENDING, "my_reward.py"))
    judge = load_reward_function(path)

    def score(text: str) -> tuple[float, float]:
        found = to_score(judge("my/words", text, "nus", {"length": 3}))
        return found.score, found.acc

    assert score("nus") == (1.0, 1.0)
    assert score("sun") == (0.0, 0.0)
    assert score("sunn") == (-0.1, 0.0)


def test_the_reader_of_metrics_puts_the_lines_of_a_step_together(tmp_path: Path) -> None:
    """Lines of a validation and a checkpoint have the step's number, and less in them than the step's own."""
    tracker = JsonlTracker(tmp_path / "metrics.jsonl")
    for step in (1, 2):
        tracker.log({"critic/score/mean": step / 2, "training/global_step": step}, step)
        tracker.log({"val-core/words/acc/greedy": 0.5}, step)
        tracker.log({"timing_s/save_checkpoint": 0.25}, step)
    tracker.close()
    (tmp_path / "read.py").write_text(file_in(REPORTS, "read_metrics.py"))
    done = subprocess.run(
        [sys.executable, "read.py", "metrics.jsonl"],
        cwd=tmp_path,
        check=True,
        timeout=60,
        capture_output=True,
        text=True,
    )
    assert done.stdout == "1 0.5 0.25\n2 1.0 0.25\n"


def test_the_configuration_composes(tmp_path: Path) -> None:
    (tmp_path / "words.yaml").write_text(file_in(EXTENDING, "conf/words.yaml"))
    config = compose_run("words", [], tmp_path)
    assert (config.data.train_batch_size, config.trainer.total_training_steps) == (40, None)
    assert config.algorithm.adv_estimator == "grpo"


def test_the_estimator_on_the_page_is_the_file() -> None:
    """What it computes, and that a run takes it, is in tests/neoproto/trainer/test_advantages.py."""
    assert (EXAMPLES / "median_baseline.py").read_text() in EXTENDING


def test_the_files_that_the_pages_name_are_all_there_are() -> None:
    names = sorted(path.name for path in EXAMPLES.glob("*.py"))
    assert names == ["best_of_n.py", "median_baseline.py", "reward_model.py", "stock_client.py"]
    assert all(f"docs/examples/{name}" in EXTENDING + DATA for name in names)


def test_the_loop_trains_on_the_best_sample_of_each_prompt(tmp_path: Path) -> None:
    world, recorder, masks = World(n=2), Recorder(), []

    def update(batch: DataProto) -> dict[str, float]:
        columns = batch.materialize(["response_mask", "advantages", "old_log_probs"])
        assert columns["advantages"].tolist() == columns["response_mask"].float().tolist()
        masks.append(columns["response_mask"].sum(1).gt(0).tolist())
        return {"actor/pg_loss": -1.0}

    workers, store = world.workers(critic=False), MemoryStore()
    cast(FakeHandle, workers.actor).group.methods["update_actor"] = update
    with use_store(store):
        parts = training_parts(
            load_config({"actor_rollout_ref": {"rollout": {"n": 2}}}),
            workers,
            FakePrompts(validation=2),
            tracker=recorder,
            show=recorder,
            run_dir=tmp_path,
            total_steps=2,
        )
        asyncio.run(loaded("best_of_n").best_of_n(parts))
        assert store.keys() == [], "everything was released"
    order = [call.method for call in world.calls if not call.meta.get("validate")]
    sync = ["publish_weights", "update_weights"]
    step = ["generate_sequences", "compute_score", "compute_log_prob", "update_actor", *sync]
    assert order == [*sync, *step, *step]
    assert len(world.called("generate_sequences")) > 2, "it validated"
    # Two samples a prompt, of which the second is right.
    assert masks == [[False, True, False, True]] * 2
    logged = [row for _, row in recorder.steps_logged()]
    assert [(row["best_of_n/chosen"], row["critic/score/max"]) for row in logged] == [(1.0, 1.0)] * 2


def test_the_table_of_what_is_built_in_names_it_all() -> None:
    _, _, text = EXTENDING.partition("## Built in")
    rows = re.findall(r"^\| [a-z ]+ \| `[\w.]+` \| `neoproto/([\w/]+)` \| (.*) \|$", text, re.MULTILINE)
    named = {folder.replace("/", "."): re.findall(r"`(\w+)`", names) for folder, names in rows}
    there = {
        name: list(getattr(importlib.import_module(f"neoproto.{name}"), registry))
        for name, registry in {
            "algorithms.estimators": "ESTIMATORS",
            "algorithms.losses": "POLICY_LOSSES",
            "rewards.builtin": "REWARDS",
            "rollout.engines": "ENGINES",
            "weights.transports": "TRANSPORTS",
        }.items()
    }
    assert named == there
