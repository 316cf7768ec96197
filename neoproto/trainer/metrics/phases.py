"""Where the seconds of a step go: by phase, and how many of them the controller kept for itself."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from neoproto import trace

T = TypeVar("T")


class PhaseClock:
    """Times one step. Phases may overlap: `timing_s/*` are wall times of each, their sum may exceed the step.

    The controller's own share is the wall time in which no worker call was in flight.
    """

    def __init__(self) -> None:
        self._start = time.perf_counter()
        self._seconds: dict[str, float] = {}
        self._in_flight = 0
        self._waiting_since = 0.0
        self._waited = 0.0

    @property
    def started(self) -> float:
        """When, on `time.perf_counter`."""
        return self._start

    @contextmanager
    def phase(self, name: str, kind: str = "phase") -> Iterator[None]:
        """Book the block under `name`; in the trace it is of this `kind`."""
        start = time.perf_counter()
        try:
            with trace.span(name, kind):
                yield
        finally:
            self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - start

    async def call(self, phase: str, workers: Any, method: str, *args: Any, timeout: float) -> Any:
        """`wait` for a method of `workers.within(timeout)` by its name: kept for one release."""
        return await self.wait(phase, getattr(workers.within(timeout), method)(*args))

    async def wait(self, phase: str, awaitable: Awaitable[T]) -> T:
        """Wait for work that others do, a call of workers say, and book the wait under `phase`.

        Raises:
            What the work raises: of a call DeadlineExceeded, WorkerDied or the worker's own exception.
        """
        with self.phase(phase, "wait"):
            if self._in_flight == 0:
                self._waiting_since = time.perf_counter()
            self._in_flight += 1
            try:
                return await awaitable
            finally:
                self._in_flight -= 1
                if self._in_flight == 0:
                    self._waited += time.perf_counter() - self._waiting_since

    def metrics(self) -> dict[str, float]:
        """`timing_s/{phase}` in seconds, `timing_s/step`, and `perf/controller_share` in 0..1."""
        total = time.perf_counter() - self._start
        metrics = {f"timing_s/{name}": seconds for name, seconds in self._seconds.items()}
        metrics["timing_s/step"] = total
        metrics["perf/controller_share"] = max(0.0, total - self._waited) / max(total, 1e-9)
        return metrics
