"""A process of a run dies, or is stopped.

Rollout's are replaced and the run completes; anything else ends it with the cause, soon. Nothing is left.
"""

from __future__ import annotations

import os
import re
import signal
import time

import pytest

from tests.e2e.command import BOUND_S, Command, Finished, Start

pytestmark = pytest.mark.e2e

NOTICED_S = 10.0
"""From the death until the loop has ended with its cause."""
DECOUPLED = "trainer.mode=decoupled_async"


def send(command: Command, group: str, signum: signal.Signals) -> float:
    """Signal the process of a group that trains; when that was."""
    command.wait_for("step 2/")
    os.kill(command.worker(group), signum)
    return time.time()


def check_replaced(command: Command, replica: str, cause: str) -> Finished:
    """The run completes, on a successor that serves what is current; who died, and why, has been said."""
    done = command.wait()
    assert (done.code, done.errors) == (0, ""), done.out
    died = rf"worker {replica}\[0\] on \S+ died: {cause}"
    failed = rf"^replica {replica} failed \({died}\); restarting it, 1 of 3$"
    assert re.search(failed, done.out, re.MULTILINE), done.out
    up = re.search(rf"^replica {replica} is up again on weights 0\.(\d+), after", done.out, re.MULTILINE)
    assert up, done.out
    assert [row["training/global_step"] for row in done.steps] == list(range(1, len(done.steps) + 1))
    assert {row["training/replica_restarts"] for row in done.steps} == {0.0, 1.0}
    assert done.steps[-1]["training/replica_restarts"] == 1.0
    assert (done.folder / "logs" / f"{replica}-2" / "rank0.log").is_file()
    current = [row for row in done.steps if row.get("training/off_policy/trajectory_staleness/max", 0) == 0]
    assert all(row["training/rollout_log_probs_diff_max"] <= 1e-4 for row in current)
    assert command.left_after(BOUND_S) == []
    return done


@pytest.mark.core
def test_a_registry_that_dies_ends_the_run_with_its_cause(start: Start) -> None:
    command = start("+smoke=tiny", DECOUPLED, "trainer.total_training_steps=100000")
    killed = send(command, "registry", signal.SIGKILL)
    check_ended(command, killed, r"worker registry\[0\] on \S+ died: signal 9 \(SIGKILL\)")


def test_a_replica_that_may_not_be_restarted_ends_the_run_with_its_history(start: Start) -> None:
    more = ["trainer.max_replica_restarts=0", "trainer.total_training_steps=100000"]
    command = start("--config-name", "grpo_monarch", "+smoke=tiny", "trainer.mode=separate_async", *more)
    killed = send(command, "rollout-0", signal.SIGKILL)
    history = r"1\. worker rollout-0\[0\] on \S+ died: signal 9 \(SIGKILL\)"
    check_ended(command, killed, rf"replica rollout-0 is lost after 0 restart\(s\): {history}")


def check_ended(command: Command, killed: float, said: str) -> None:
    done = command.wait()
    assert done.code == 1, done.out
    log = re.escape(f"{done.folder}/run.log")
    assert re.fullmatch(rf"error: {said}.* \(details: {log}\)\n", done.errors), done.errors
    ended = (done.folder / "run.log").stat().st_mtime
    assert ended - killed < NOTICED_S + BOUND_S
    assert command.left_after(BOUND_S) == []


@pytest.mark.core
def test_training_goes_on_while_one_of_two_replicas_is_replaced(start: Start) -> None:
    """Steps go on on the other; the successor takes its share afterwards."""
    two = "actor_rollout_ref.rollout.n_gpus_per_node=2"
    command = start("+smoke=tiny", DECOUPLED, two, "trainer.total_training_steps=120")
    send(command, "rollout-1", signal.SIGKILL)
    done = check_replaced(command, "rollout-1", r"signal 9 \(SIGKILL\)")
    assert [row for row in done.steps if row["rollout/replicas_up"] == 1.0]
    assert done.steps[-1]["rollout/replicas_up"] == 2.0
    behind = [row["training/off_policy/trajectory_staleness/max"] for row in done.steps]
    assert max(behind) <= 2


def test_the_only_replica_is_waited_for(start: Start) -> None:
    command = start("--config-name", "grpo_monarch", "+smoke=tiny", "trainer.total_training_steps=5")
    send(command, "rollout-0", signal.SIGKILL)
    check_replaced(command, "rollout-0", r"signal 9 \(SIGKILL\)")


def test_a_replica_that_is_stopped_is_found_and_replaced(start: Start) -> None:
    more = ["runtime.stopped_timeout=3", "trainer.total_training_steps=5"]
    command = start("--config-name", "grpo_monarch", "+smoke=tiny", *more)
    send(command, "rollout-0", signal.SIGSTOP)
    check_replaced(command, "rollout-0", r"stopped by a signal for [34]\.\d s, then killed")
