"""The synchronous loop on fake groups and an in-memory store."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from neoproto.config import load_config
from neoproto.errors import NonFiniteLoss
from neoproto.store import MemoryStore
from neoproto.trainer.metrics.record import TrainingResult, training_parts
from neoproto.trainer.metrics.samples import SampleLog
from neoproto.trainer.sync import SyncTrainer
from neoproto.weights import WeightVersion
from tests.neoproto.trainer.fakes import PROMPTS, FakePrompts, World
from tests.neoproto.trainer.recording import Recorder

SYNC = ["publish_weights", "update_weights"]
STEP = [
    "generate_sequences", "compute_score", "compute_log_prob", "compute_values",
    "update_actor", "update_critic",
]  # fmt: skip
VALIDATION = ["generate_sequences", "compute_score"]


def train(
    tmp_path: Path,
    world: World,
    prompts: FakePrompts,
    *,
    steps: int = 3,
    log: SampleLog | None = None,
    **trainer: Any,
) -> tuple[TrainingResult, Recorder]:
    config = load_config(
        {
            "trainer": {"timeouts": {"weights": 7.0, "validation": 8.0}} | trainer,
            "algorithm": {"truncated": "mask"},
        }
    )
    recorder = Recorder()
    parts = training_parts(
        config,
        world.workers(),
        prompts,
        tracker=recorder,
        run_dir=tmp_path,
        total_steps=steps,
        show=recorder,
        sample_log=log,
    )
    return asyncio.run(SyncTrainer(parts).run()), recorder


def test_every_object_of_a_run_is_released(tmp_path: Path, store: MemoryStore) -> None:
    """Prompts, batches (a replaced mask among them), validation batches and answers, weights."""
    world = World(lengths=(2, 2), truncated=(True, False))
    _, recorder = train(tmp_path, world, FakePrompts(validation=2), test_freq=1)
    assert store.bytes_in > 0
    assert store.keys() == []
    moved = [row["store/bytes_in"] for _, row in recorder.steps_logged()]
    assert moved == sorted(set(moved))
    assert {row["store/objects"] for _, row in recorder.steps_logged()} == {0.0}


@pytest.mark.usefixtures("store")
def test_versions_count_from_zero_and_each_is_served_before_the_next_step(tmp_path: Path) -> None:
    world = World()
    train(tmp_path, world, FakePrompts(), steps=3)
    versions = [WeightVersion(epoch=0, n=n) for n in range(4)]
    assert world.served == versions
    assert [call.args[0] for call in world.called("publish_weights")] == versions
    assert [method for method in world.order() if method in SYNC] == SYNC * 4
    assert {call.timeout for call in world.called(*SYNC)} == {7.0}


@pytest.mark.usefixtures("store")
def test_weights_go_out_before_anything_is_generated_and_after_every_update(tmp_path: Path) -> None:
    world = World()
    train(tmp_path, world, FakePrompts(), steps=2)
    assert world.order() == SYNC + STEP + SYNC + STEP + SYNC


@pytest.mark.usefixtures("store")
def test_validation_uses_the_weights_of_its_step(tmp_path: Path) -> None:
    """Sampled and greedy at the start, then on the new version, at the end of the last step."""
    world = World()
    train(tmp_path, world, FakePrompts(validation=1), steps=1)
    assert world.order() == SYNC + 2 * VALIDATION + STEP + SYNC + 2 * VALIDATION


@pytest.mark.usefixtures("store")
@pytest.mark.parametrize(
    ("trainer", "steps", "at"),
    [
        ({}, 3, [0, 3]),
        ({"val_before_train": False}, 3, [3]),
        ({"test_freq": 2}, 5, [0, 2, 4, 5]),
        ({"test_freq": 2}, 4, [0, 2, 4]),
        ({"test_freq": 0}, 3, [0, 3]),
        ({"test_freq": 1, "val_before_train": False}, 2, [1, 2]),
    ],
)
def test_validation_comes_when_it_is_due(
    tmp_path: Path, trainer: dict[str, Any], steps: int, at: list[int]
) -> None:
    _, recorder = train(tmp_path, World(), FakePrompts(validation=1), steps=steps, **trainer)
    assert [step for step, _ in recorder.validations] == at
    assert sorted(int(path.stem.removeprefix("step_")) for path in (tmp_path / "validation").iterdir()) == at


@pytest.mark.usefixtures("store")
def test_without_held_out_prompts_there_is_no_validation(tmp_path: Path) -> None:
    result, recorder = train(tmp_path, World(), FakePrompts(), test_freq=1)
    assert recorder.validations == []
    assert (result.first_validation, result.last_validation) == ({}, {})
    assert not (tmp_path / "validation").exists()


@pytest.mark.usefixtures("store")
def test_samples_are_written_where_they_are_wanted(tmp_path: Path) -> None:
    """With the text, which rollout is only then asked to keep; and nothing of it stays in the store."""
    world = World()
    train(tmp_path, world, FakePrompts(), steps=2, log=SampleLog(tmp_path / "samples"))
    assert {call.meta["keep_text"] for call in world.called("compute_score")} == {True}
    rows = [json.loads(line) for line in (tmp_path / "samples" / "step_2.jsonl").read_text().splitlines()]
    assert [row["uid"] for row in rows] == ["u20", "u21"]
    assert [row["response_ids"] for row in rows] == [[7, 7], [7]]
    assert [row["answer"] for row in rows] == ["sampled é 0", "sampled é 1"]

    train(tmp_path / "without", other := World(), FakePrompts(), steps=1)
    assert {call.meta["keep_text"] for call in other.called("compute_score")} == {False}
    assert not (tmp_path / "without" / "samples").exists()


@pytest.mark.usefixtures("store")
def test_first_and_last_validation_are_kept(tmp_path: Path) -> None:
    world = World()
    scores = iter([(0.0, 0.0)] * 2 + [(1.0, 0.0)] + [(1.0, 1.0)] * 2)

    def score(batch: Any) -> Any:
        world.scores = next(scores)
        return World.score(world, batch)

    world.score = score  # type: ignore[method-assign]
    result, _ = train(tmp_path, world, FakePrompts(validation=1), steps=1)
    assert result.first_validation == {
        f"val-core/{source}/acc/{way}": 0.0 for source in ("letters", "words") for way in ("mean@1", "greedy")
    }
    assert set(result.last_validation.values()) == {1.0}


@pytest.mark.usefixtures("store")
def test_each_step_is_reported_with_the_time_that_is_left(tmp_path: Path) -> None:
    _, recorder = train(tmp_path, World(), FakePrompts(), steps=3)
    assert [(report.step, report.total_steps) for report in recorder.reports] == [(1, 3), (2, 3), (3, 3)]
    assert recorder.reports[-1].seconds_left == 0
    seconds = [report.metrics["perf/time_per_step"] for report in recorder.reports]
    assert recorder.reports[0].seconds_left == pytest.approx(2 * seconds[0])
    assert recorder.reports[1].seconds_left == pytest.approx((seconds[0] + seconds[1]) / 2)


@pytest.mark.usefixtures("store")
def test_metrics_of_a_step(tmp_path: Path) -> None:
    world = World(lengths=(2, 1), devices=(2, 3))
    result, recorder = train(tmp_path, world, FakePrompts(steps_per_epoch=2), steps=5)
    rows = [row for _, row in recorder.steps_logged()]
    assert [step for step, _ in recorder.steps_logged()] == [1, 2, 3, 4, 5]
    assert [row["training/global_step"] for row in rows] == [1, 2, 3, 4, 5]
    assert [row["training/epoch"] for row in rows] == [0, 0, 1, 1, 2]
    for row in rows:
        tokens, seconds = row["perf/total_num_tokens"], row["perf/time_per_step"]
        assert tokens == 2 * 3 + 2 + 1
        assert row["timing_s/step"] == seconds
        # The largest group's devices: groups are colocated.
        assert row["perf/throughput"] == pytest.approx(tokens / (seconds * 3))
        assert {
            "timing_s/gen",
            "timing_s/update_actor",
            "timing_s/update_weights",
            "actor/pg_loss",
        } <= row.keys()
    assert (result.steps, result.samples, result.tokens) == (5, 5 * PROMPTS, 5 * 9)


@pytest.mark.usefixtures("store")
def test_seconds_are_summed_by_phase(tmp_path: Path) -> None:
    result, recorder = train(tmp_path, World(), FakePrompts(validation=1), steps=2)
    for name in ("timing_s/gen", "timing_s/testing", "timing_s/step"):
        booked = [row[name] for _, row in recorder.logged if name in row]
        assert len(booked) == 2
        assert result.seconds[name] == pytest.approx(sum(booked))
    assert result.training_seconds >= result.seconds["timing_s/step"] + result.seconds["timing_s/testing"]
    assert not any(not name.startswith("timing_s/") for name in result.seconds)


@pytest.mark.usefixtures("store")
def test_training_batches_say_which_step_they_are_of(tmp_path: Path) -> None:
    world = World()
    train(tmp_path, world, FakePrompts(validation=1), steps=2)
    meta = [dict(call.meta) for call in world.called("generate_sequences")]
    training = [one for one in meta if not one["validate"]]
    assert [one["step"] for one in training] == [1, 2]
    assert [one["step"] for one in meta if one["validate"]] == [0, 0, 2, 2]
    assert not any(one.get("keep_text") for one in training)


@pytest.mark.usefixtures("store")
def test_validation_calls_have_their_own_deadline(tmp_path: Path) -> None:
    world = World()
    train(tmp_path, world, FakePrompts(validation=1), steps=1)
    calls = world.called("generate_sequences", "compute_score")
    assert {call.timeout for call in calls if call.meta["validate"]} == {8.0}
    assert {call.timeout for call in calls if not call.meta["validate"]} == {300.0, 120.0}


@pytest.mark.usefixtures("store")
def test_a_failing_step_ends_the_run_with_its_own_error(tmp_path: Path) -> None:
    world = World(scores=(float("nan"), 0.0))
    with pytest.raises(NonFiniteLoss):
        train(tmp_path, world, FakePrompts())
    assert [method for method in world.order() if method in SYNC] == SYNC
    assert "update_actor" not in world.order()


@pytest.mark.usefixtures("store")
def test_samples_of_each_validation_are_on_disk(tmp_path: Path) -> None:
    train(tmp_path, World(), FakePrompts(validation=2), steps=1)
    lines = (tmp_path / "validation" / "step_1.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    assert [row["step"] for row in rows] == [1] * len(rows)
    assert len(rows) == 2 * 2 * PROMPTS  # batches x ways of drawing x prompts
