"""Tests on a virtual clock: time jumps to the next timer as soon as nothing can run without it.

`await asyncio.sleep(60)` then lets everything happen that happens within a minute, in milliseconds, on a busy
machine too. So "nothing happened meanwhile" is a statement about the code, not about the machine.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from scripts._virtual_time import VirtualLoop

T = TypeVar("T")


class TestLoop(VirtualLoop):
    """A virtual loop that runs the work of threads at once: the clock would not wait for a thread."""

    __test__ = False

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:
        ended = self.create_future()
        try:
            ended.set_result(func(*args))
        except Exception as error:  # noqa: BLE001 - handed to the one who awaits it, whole
            ended.set_exception(error)
        return ended


def run(scenario: Callable[[], Coroutine[Any, Any, T]], limit: float = 3600.0) -> T:
    """Run a scenario that takes no more than `limit` virtual seconds.

    Raises:
        TimeoutError: it did not end by then.
        RuntimeError: everything waits for something that will not happen.
    """

    async def limited() -> T:
        async with asyncio.timeout(limit):
            return await scenario()

    with asyncio.Runner(loop_factory=TestLoop) as runner:
        return runner.run(limited())
