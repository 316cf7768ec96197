"""A run of two steps whose second is watched: window 1 is the step, 2 a put and a get, 3 a weight version."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np

from neoproto.run.process import run_command
from neoproto.runtime import get, put
from neoproto.trainer.metrics.record import TrainingParts, TrainingResult
from neoproto.trainer.sync import SyncSteps
from neoproto.trainer.tasks import owned_tasks

STEP, PUT, LOAD = 1, 2, 3


def open_window(number: int) -> None:
    path = Path(os.environ["NEOPROTO_WALKS"], "window")
    with path.open("r+b") as file:
        file.write(bytes([number]))


class Watched:
    """The flow of weights, each of whose versions is window 3."""

    def __init__(self, flow: Any) -> None:
        self._flow = flow
        self._ticket: Any = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._flow, name)

    def publish(self) -> Watched:
        open_window(LOAD)
        self._ticket = self._flow.publish()
        return self

    async def committed(self, clock: Any) -> None:
        await self._ticket.committed(clock)
        open_window(STEP)


async def loop(parts: TrainingParts) -> TrainingResult:
    async with owned_tasks() as tasks:
        steps = SyncSteps(parts, tasks)
        await steps.begin()
        await steps.take(1)
        steps._flow = Watched(steps._flow)  # type: ignore[assignment]
        open_window(STEP)
        await steps.take(2)
        open_window(PUT)
        assert get(put({"a": np.arange(10**6)}))["a"][-1] == 10**6 - 1
        open_window(0)
        await steps.finished()
    return parts.recorder.result()


if __name__ == "__main__":
    run_command(loop)
