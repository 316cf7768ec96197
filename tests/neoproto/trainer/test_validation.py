"""Validation on fake groups: which answers are drawn, what is reported, what is written."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from neoproto.config import ValKwargsConfig
from neoproto.data import DataProto
from neoproto.store import MemoryStore
from neoproto.trainer.metrics.phases import PhaseClock
from neoproto.trainer.validation import (
    ValidationPass,
    ValidationSample,
    accuracy_metrics,
    validate,
    validation_passes,
    write_samples,
)
from tests.neoproto.trainer.fakes import World, prompt_batch

GREEDY = ValidationPass(label="greedy", greedy=True, samples=1)
pytestmark = pytest.mark.usefixtures("store")


def sampled(n: int) -> ValidationPass:
    return ValidationPass(label=f"mean@{n}", greedy=False, samples=n)


@pytest.mark.parametrize(
    ("options", "passes"),
    [
        ({}, [sampled(1), GREEDY]),
        ({"n": 8}, [sampled(8), GREEDY]),
        ({"n": 8, "also_greedy": False}, [sampled(8)]),
        ({"do_sample": False}, [GREEDY]),
        ({"do_sample": False, "also_greedy": False}, [GREEDY]),
    ],
)
def test_passes_follow_the_options(options: dict[str, Any], passes: list[ValidationPass]) -> None:
    assert validation_passes(ValKwargsConfig(**options)) == passes


def run(
    world: World, *passes: ValidationPass, batches: int = 1
) -> tuple[dict[str, float], list[ValidationSample]]:
    given = (prompt_batch(10 * number) for number in range(batches))
    return asyncio.run(validate(world.workers(), given, passes, step=7, timeout=9.0, clock=PhaseClock()))


def test_accuracy_is_reported_by_data_source_and_pass() -> None:
    metrics, samples = run(World(scores=(1.0, 0.0)), sampled(1), GREEDY)
    assert metrics == {
        "val-core/letters/acc/greedy": 1.0,
        "val-core/letters/acc/mean@1": 1.0,
        "val-core/words/acc/greedy": 0.0,
        "val-core/words/acc/mean@1": 0.0,
    }
    assert len(samples) == 4


def test_all_samples_and_batches_count() -> None:
    """Two samples a prompt, scored 0, 1, 0, 1: half of each source, over three batches."""
    metrics, samples = run(World(), sampled(2), batches=3)
    assert metrics == {"val-core/letters/acc/mean@2": 0.5, "val-core/words/acc/mean@2": 0.5}
    assert len(samples) == 3 * 2 * 2
    assert [sample.uid for sample in samples[:4]] == ["u0", "u0", "u1", "u1"]
    assert {sample.uid for sample in samples} == {"u0", "u1", "u10", "u11", "u20", "u21"}


def test_rollout_is_told_how_to_draw_and_to_keep_the_text() -> None:
    world = World()
    run(world, sampled(3), GREEDY)
    drawn = [dict(call.meta) for call in world.called("generate_sequences")]
    common = {"validate": True, "step": 7, "keep_text": True}
    assert drawn == [common | {"greedy": False, "n": 3}, common | {"greedy": True, "n": 1}]
    assert {call.timeout for call in world.calls} == {9.0}


def test_a_sample_says_what_was_asked_and_what_came_back() -> None:
    _, samples = run(World(scores=(1.0, 0.5)), GREEDY)
    assert samples[1] == ValidationSample(
        step=7,
        label="greedy",
        uid="u1",
        data_source="words",
        prompt="ask u1",
        answer="greedy é 1",
        ground_truth="u1",
        score=0.5,
        accuracy=0.5,
    )


def test_a_sample_has_the_vote_that_its_judge_told() -> None:
    class Telling(World):
        def score(self, batch: DataProto) -> DataProto:
            told = DataProto.from_dict(non_tensors={"vote": ["7", None]})
            return super().score(batch).union(told)

    assert [sample.vote for sample in run(Telling(), GREEDY)[1]] == ["7", None]
    assert [sample.vote for sample in run(World(), GREEDY)[1]] == [None, None]


def test_answers_without_a_score_are_counted_and_named() -> None:
    """They score 0 like wrong ones, so that the accuracy alone does not tell."""

    class Failing(World):
        def score(self, batch: DataProto) -> DataProto:
            failed = torch.tensor([row % 3 for row in range(len(batch))], dtype=torch.int8)
            scores = super().score(batch)
            return scores.select(["token_level_scores"]).union(
                DataProto.from_dict(tensors={"reward_failed": failed})
            )

    metrics, samples = run(Failing(scores=(0.0,) * 6), sampled(3))
    assert {name: metrics.pop(name) for name in ("val-aux/reward/timeouts", "val-aux/reward/errors")} == {
        "val-aux/reward/timeouts": 2.0,
        "val-aux/reward/errors": 2.0,
    }
    assert set(metrics) == {"val-core/letters/acc/mean@3", "val-core/words/acc/mean@3"}
    assert [sample.failure for sample in samples] == ["", "timeout", "error"] * 2


def test_nothing_stays_in_the_store(store: MemoryStore) -> None:
    run(World(), sampled(2), GREEDY, batches=2)
    assert store.keys() == []


def test_no_samples_no_metrics() -> None:
    assert accuracy_metrics([]) == {}


def test_samples_are_written_one_json_object_a_line(tmp_path: Path) -> None:
    _, samples = run(World(), sampled(1), GREEDY)
    path = write_samples(tmp_path / "not" / "there", 7, samples)
    assert path == tmp_path / "not" / "there" / "step_7.jsonl"
    text = path.read_text(encoding="utf-8")
    assert "é" in text
    rows = [json.loads(line) for line in text.splitlines()]
    assert [ValidationSample(**row) for row in rows] == samples
