"""`python -m neoproto.eval` as a person runs it."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from pathlib import Path

import pytest

from tests.e2e.command import BOUND_S, Start

pytestmark = pytest.mark.e2e

PROGRAM = ("-m", "neoproto.eval")
NOTICED_S = 10.0
"""From the death of a process until the evaluation has ended with its cause."""


@pytest.mark.core
def test_a_model_is_measured(start: Start, built_in_model: Path) -> None:
    command = start(f"model={built_in_model}", "n=2", "data.task.val_size=16", program=PROGRAM)
    done = command.wait()
    assert (done.code, done.errors) == (0, ""), done.out
    metrics = json.loads((done.folder / "eval.json").read_text())
    source = "reasoning_gym/spell_backward"
    ways = ("greedy/mean@1", "sampled/mean@2", "sampled/pass@1", "sampled/pass@2", "sampled/maj@2")
    assert set(metrics) == {f"{source}/{way}" for way in ways}
    rows = done.validation(0)
    assert len(rows) == 16 * 3
    greedy = [row["accuracy"] for row in rows if row["label"] == "greedy"]
    assert metrics[f"{source}/greedy/mean@1"] == pytest.approx(sum(greedy) / 16)
    assert command.left_after(BOUND_S) == []


@pytest.mark.parametrize("group", [pytest.param("reward", marks=pytest.mark.core), "rollout"])
def test_a_process_that_dies_ends_the_evaluation(start: Start, built_in_model: Path, group: str) -> None:
    """Also one that nothing is asked of at the time: the reward worker, while answers are generated."""
    long = ("n=200", "data.task.val_size=600")
    command = start(f"model={built_in_model}", *long, program=PROGRAM)
    command.wait_for("answering and scoring")
    os.kill(command.worker(group), signal.SIGKILL)
    killed = time.monotonic()
    done = command.wait()
    assert time.monotonic() - killed < NOTICED_S + BOUND_S
    assert done.code == 1, done.out
    died = rf"worker {group}\[0\] on \S+ died: signal 9 \(SIGKILL\)"
    log = re.escape(f"{done.folder}/run.log")
    assert re.fullmatch(rf"error: .*{died}.* \(details: {log}\)\n", done.errors), done.errors
    assert command.left_after(BOUND_S) == []
