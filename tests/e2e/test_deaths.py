"""A process of an asynchronous run dies: the run ends with the cause, soon, and leaves nothing."""

from __future__ import annotations

import os
import re
import signal
import time

import pytest

from tests.e2e.command import BOUND_S, Start

pytestmark = pytest.mark.e2e

NOTICED_S = 10.0
"""From the death until the loop has ended with its cause."""


@pytest.mark.parametrize("group", ["rollout", "registry"])
def test_a_death_ends_the_run_with_its_cause(start: Start, group: str) -> None:
    command = start("+smoke=tiny", "trainer.mode=decoupled_async", "trainer.total_training_steps=100000")
    command.wait_for("step 2/")
    killed = time.time()
    os.kill(command.worker(group), signal.SIGKILL)
    done = command.wait()
    assert done.code == 1, done.out
    died = rf"worker {group}\[0\] on \S+ died: signal 9 \(SIGKILL\)"
    log = re.escape(f"{done.folder}/run.log")
    assert re.fullmatch(rf"error: .*{died}.* \(details: {log}\)\n", done.errors), done.errors
    ended = (done.folder / "run.log").stat().st_mtime
    assert ended - killed < NOTICED_S + BOUND_S
    assert command.left_after(BOUND_S) == []
