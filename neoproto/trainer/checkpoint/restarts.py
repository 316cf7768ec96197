"""`trainer.on_failure=restart`: a lost process restarts everything from the last checkpoint.

start ─> train ─┬─> done
  ▲             └─> failed ── everything is closed ── of a process, and not too often? ──┐
  └──────────────────────────────────────────────────────────────────────────────────────┘
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeVar

from neoproto.config import RunConfig
from neoproto.errors import (
    DeadlineExceeded,
    GroupBroken,
    KeyMissing,
    LeaseExpired,
    NeoProtoError,
    PromptFailed,
    ReplicaFailed,
    ReplicaLost,
    RuntimeClosed,
    SamplesMissing,
    StoreError,
    StoreFull,
    TornRead,
    TrainingGivenUp,
    WeightsInUse,
    WeightsNotServed,
    WorkerDied,
)
from neoproto.text import first_line
from neoproto.trainer.checkpoint.folder import Checkpoint

T = TypeVar("T")

OF_PROCESSES = (
    WorkerDied,
    GroupBroken,
    DeadlineExceeded,
    ReplicaFailed,
    ReplicaLost,
    RuntimeClosed,
    StoreError,
    LeaseExpired,
    TornRead,
    WeightsInUse,
    WeightsNotServed,
    SamplesMissing,
)
"""What the loss or the silence of a process looks like."""
OF_LOGIC = (StoreFull, KeyMissing)
"""Kinds of those that would come again."""

log = logging.getLogger("neoproto.run")


def of_a_process(error: BaseException) -> bool:
    """Whether a failure is that of a process, and not of the input, the arithmetic or the disk."""
    if isinstance(error, OF_LOGIC):
        return False
    if isinstance(error, OF_PROCESSES):
        return True
    # What others only report: a prompt that no replica answered, workers that did not start.
    reports = type(error) is NeoProtoError or isinstance(error, PromptFailed)
    return reports and error.__cause__ is not None and of_a_process(error.__cause__)


class Restarts:
    """Trains, again and again if need be.

    Args:
        newest: the checkpoint that a start would resume from.
        print_line: shows a person a line.
    """

    def __init__(
        self, config: RunConfig, newest: Callable[[], Checkpoint | None], print_line: Callable[[str], None]
    ) -> None:
        self._on = config.trainer.on_failure == "restart"
        self._most, self._newest, self._print_line = config.trainer.max_restarts, newest, print_line
        self._causes: list[str] = []

    def run(self, train: Callable[[Callable[[], None]], T]) -> T:
        """Call `train` until it returns.

        Args:
            train: one start of the run; it closes everything before it raises, and calls its argument when
                training begins. What fails before that at the first start is not tried again: it would fail
                for ever.

        Raises:
            TrainingGivenUp: too many failures without a new checkpoint; lists them.
            Whatever `train` raises, if restarts are off or it is no failure of a process.
        """
        began = False

        def begin() -> None:
            nonlocal began
            began = True

        while True:
            before = self._newest()
            try:
                return train(begin)
            except Exception as error:
                if not (self._on and began and of_a_process(error)):
                    raise
                log.error("a process of the run failed", exc_info=error)
                self._count(error, before)

    def _count(self, error: Exception, before: Checkpoint | None) -> None:
        newest = self._newest()
        if newest != before:
            self._causes.clear()
        self._causes.append(first_line(error))
        if len(self._causes) > self._most:
            raise TrainingGivenUp(self._causes) from error
        where = (
            "starting from the beginning"
            if newest is None
            else f"resuming from the checkpoint of step {newest.step}"
        )
        self._print_line(f"restart {len(self._causes)} of {self._most}: {self._causes[-1]}; {where}")
