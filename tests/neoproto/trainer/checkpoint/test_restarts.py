"""Which failures are answered by a restart, how often, and what is said of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from neoproto.config import load_config
from neoproto.errors import (
    CheckpointError,
    ConfigError,
    DeadlineExceeded,
    GroupBroken,
    KeyMissing,
    NeoProtoError,
    NonFiniteLoss,
    PromptFailed,
    RemoteError,
    RewardError,
    RolloutError,
    SamplesMissing,
    StoreError,
    StoreFull,
    TrainingGivenUp,
    WeightMismatch,
    WeightsNotServed,
    WorkerDied,
)
from neoproto.trainer.checkpoint.folder import Checkpoint
from neoproto.trainer.checkpoint.restarts import Restarts, of_a_process

DIED = WorkerDied("actor", 0, "host", "signal 9 (SIGKILL)", "last words")
LATE = DeadlineExceeded("update_actor", "actor", [0], 9.0, {0: "a stack"})


def caused(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    "error",
    [
        DIED,
        LATE,
        GroupBroken("x"),
        StoreError("the volume does not answer"),
        WeightsNotServed("x"),
        SamplesMissing("x"),
        caused(PromptFailed("p", 3, "died"), DIED),
        caused(NeoProtoError("workers did not start"), LATE),
    ],
    ids=lambda error: type(error).__name__,
)
def test_a_failure_of_a_process_is_restarted(error: Exception) -> None:
    assert of_a_process(error)


@pytest.mark.parametrize(
    "error",
    [
        ConfigError("x"),
        RewardError("x"),
        NonFiniteLoss("x"),
        WeightMismatch("x"),
        RolloutError("x"),
        StoreFull("x"),
        KeyMissing("x"),
        RemoteError("X", "x", ""),
        OSError(28, "No space left on device"),
        TimeoutError("x"),
        NeoProtoError("the dispatcher ended"),
        caused(CheckpointError("x"), OSError(28, "No space left on device")),
        caused(PromptFailed("p", 3, "wrong"), RolloutError("x")),
    ],
    ids=lambda error: type(error).__name__,
)
def test_a_failure_of_input_logic_or_disk_is_not(error: Exception) -> None:
    assert not of_a_process(error)


class Job:
    """Starts that end as `ends` says: an error, or the step of a checkpoint that was made before it."""

    def __init__(self, ends: Sequence[tuple[int | None, BaseException | None]], **trainer: object) -> None:
        self.ends, self.said, self.starts = list(ends), list[str](), 0
        self.checkpoint: Checkpoint | None = None
        self.restarts = Restarts(load_config({"trainer": trainer}), lambda: self.checkpoint, self.said.append)

    def train(self, begin: Callable[[], None]) -> str:
        self.starts += 1
        begin()
        step, error = self.ends.pop(0)
        if step is not None:
            self.checkpoint = Checkpoint(step=step, path=Path(f"global_step_{step}"))
        if error is not None:
            raise error
        return "done"

    def run(self) -> str:
        return self.restarts.run(self.train)


def test_it_goes_on_until_it_is_done_and_says_why_and_where() -> None:
    job = Job([(None, DIED), (4, LATE), (None, None)], on_failure="restart")
    assert job.run() == "done"
    assert job.said == [
        "restart 1 of 3: worker actor[0] on host died: signal 9 (SIGKILL); starting from the beginning",
        "restart 1 of 3: actor.update_actor did not answer within 9.0 s; no answer from rank(s) 0; "
        "resuming from the checkpoint of step 4",
    ]


def test_it_gives_up_after_so_many_in_a_row_and_lists_the_causes() -> None:
    job = Job([(2, DIED), (None, LATE), (None, DIED)], on_failure="restart", max_restarts=2)
    with pytest.raises(TrainingGivenUp) as caught:
        job.run()
    assert job.starts == 3
    assert caught.value.__cause__ is DIED
    assert str(caught.value) == (
        "given up after 3 failures without a checkpoint in between: (1) worker actor[0] on host died: "
        "signal 9 (SIGKILL); (2) actor.update_actor did not answer within 9.0 s; no answer from rank(s) 0; "
        "(3) worker actor[0] on host died: signal 9 (SIGKILL)"
    )


def test_a_new_checkpoint_in_between_starts_the_count_anew() -> None:
    ends = [(step, DIED) for step in range(1, 9)]
    job = Job([*ends, (None, None)], on_failure="restart", max_restarts=1)
    assert job.run() == "done"
    assert job.starts == 9


@pytest.mark.parametrize("trainer", [{}, {"on_failure": "restart", "max_restarts": 0}])
def test_without_restarts_the_failure_ends_the_run(trainer: dict[str, object]) -> None:
    job = Job([(None, DIED)], **trainer)
    with pytest.raises((WorkerDied, TrainingGivenUp)):
        job.run()
    assert (job.starts, job.said) == (1, [])


@pytest.mark.parametrize("error", [NonFiniteLoss("x"), KeyboardInterrupt(), SystemExit(143)])
def test_other_failures_and_signals_end_the_run_as_themselves(error: BaseException) -> None:
    job = Job([(2, error)], on_failure="restart")
    with pytest.raises(type(error)):
        job.run()
    assert job.starts == 1


def test_what_fails_before_training_ever_began_is_not_tried_again() -> None:
    job = Job([], on_failure="restart")

    def train(begin: Callable[[], None]) -> str:
        job.starts += 1
        raise DIED

    with pytest.raises(WorkerDied):
        job.restarts.run(train)
    assert job.starts == 1
