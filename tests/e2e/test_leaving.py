"""However a run ends in the middle of training, nothing of it is left."""

from __future__ import annotations

import signal
import time

import pytest

from tests.e2e.command import BOUND_S, Command, Start

pytestmark = pytest.mark.e2e


def in_training(start: Start) -> Command:
    """A run that has made its second step and would go on for a long time."""
    command = start("--config-name", "grpo_monarch", "+smoke=tiny", "trainer.total_training_steps=100000")
    command.wait_for("step 2/")
    assert len(command.processes()) > 4, "the mark is where the traces are looked for"
    assert any(one.startswith("shared memory") for one in command.left())
    return command


@pytest.mark.parametrize(
    ("signum", "code", "said"),
    [
        (signal.SIGINT, 130, "interrupted; everything of the run is closed\n"),
        (signal.SIGTERM, 143, "ended by SIGTERM; everything of the run is closed\n"),
        (signal.SIGHUP, 129, "ended by SIGHUP; everything of the run is closed\n"),
    ],
)
def test_a_signal_ends_the_run_with_one_line(
    start: Start, signum: signal.Signals, code: int, said: str
) -> None:
    command = in_training(start)
    done = command.signal(signum)
    assert command.left() == []
    assert (done.code, done.errors) == (code, said)
    assert done.seconds < BOUND_S
    assert len(done.steps) >= 2
    assert "Traceback" not in done.out


@pytest.mark.core
def test_a_killed_controller_leaves_nothing(start: Start) -> None:
    command = in_training(start)
    killed = time.monotonic()
    done = command.signal(signal.SIGKILL)
    assert command.left_after(BOUND_S) == []
    assert time.monotonic() - killed < BOUND_S + 1
    assert (done.code, done.errors) == (-signal.SIGKILL, "")
    assert len(done.steps) >= 2


def test_a_signal_during_the_start_ends_it_too(start: Start) -> None:
    command = start("--config-name", "grpo_monarch", "+smoke=tiny")
    command.wait_for("starting workers")
    time.sleep(0.3)  # a start takes a second or two
    command.look()
    done = command.signal(signal.SIGINT)
    # Groups were starting, whose processes may come late: for some seconds a guardian waits for them.
    assert all("guardian.py" in one for one in command.left())
    assert command.left_after(BOUND_S) == []
    assert (done.code, done.errors) == (130, "interrupted; everything of the run is closed\n")
    assert done.seconds < BOUND_S
