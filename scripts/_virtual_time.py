"""An event loop whose clock jumps to the next timer instead of waiting for it, and who used the processor.

asyncio's own loop, tasks and timeouts run unchanged; only the selector and the clock are replaced. Everything
must happen on the loop: a thread that somebody waits for would be left behind by the clock.
"""

from __future__ import annotations

import asyncio
import selectors
import time
from collections import defaultdict
from collections.abc import Coroutine, Generator
from contextvars import ContextVar, copy_context
from typing import Any

SIDE: ContextVar[str] = ContextVar("SIDE", default="controller")
"""On whose account the tasks made here run."""


class _Jump(selectors.DefaultSelector):
    """Moves the clock on where another selector would sleep."""

    loop: VirtualLoop

    def select(self, timeout: float | None = None) -> Any:
        if timeout is None:
            raise RuntimeError("everybody waits, and for nothing that will ever happen")
        self.loop.now += max(0.0, timeout)
        return super().select(0)


class VirtualLoop(asyncio.SelectorEventLoop):
    """See the module.

    Attributes:
        now: seconds since its start.
        cpu: seconds that tasks computed, by `SIDE`.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self.cpu: defaultdict[str, float] = defaultdict(float)
        jump = _Jump()
        jump.loop = self
        super().__init__(jump)
        self.set_task_factory(self._measured)  # type: ignore[arg-type]

    def time(self) -> float:
        return self.now

    def on(self, side: str, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """A task on another account, as work on another machine would be."""
        context = copy_context()
        context.run(SIDE.set, side)
        return self.create_task(work, context=context)

    @staticmethod
    def _measured(loop: VirtualLoop, work: Any, context: Any = None) -> asyncio.Task[Any]:
        side = (context or copy_context()).get(SIDE, "controller")
        return asyncio.Task(_Measured(work, side, loop.cpu), loop=loop, context=context)


class _Measured(Coroutine[Any, Any, Any]):
    """A coroutine that books the processor time of each of its steps."""

    __slots__ = ("_cpu", "_side", "_work")

    def __init__(self, work: Coroutine[Any, Any, Any], side: str, cpu: dict[str, float]) -> None:
        self._work, self._side, self._cpu = work, side, cpu

    def send(self, value: Any) -> Any:
        start = time.thread_time()
        try:
            return self._work.send(value)
        finally:
            self._cpu[self._side] += time.thread_time() - start

    def throw(self, *error: Any) -> Any:
        start = time.thread_time()
        try:
            return self._work.throw(*error)
        finally:
            self._cpu[self._side] += time.thread_time() - start

    def close(self) -> None:
        self._work.close()

    def __await__(self) -> Generator[Any, Any, Any]:
        raise TypeError("a task is awaited, not what it runs")
