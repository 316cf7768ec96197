"""An event loop in a thread of its own, with the context of its starter.

    any thread, any loop ──submit──> queue ──> the loop's thread (Monarch's context) ──> StoreFuture

Monarch finds out who sends a message through a context variable, and starts a second root client where it is
unset. So every task here runs in a copy of the context in which the loop was made, from any thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from neoproto.errors import StoreClosed, StoreError
from neoproto.store.base import StoreFuture

T = TypeVar("T")


async def run_in_thread(work: Callable[[], T]) -> T:
    """Run something without holding up the loop. Returns when the thread is done, also when cancelled.

    So a cancelled caller may close what the thread used: it is not used any more.
    """
    running = asyncio.ensure_future(asyncio.to_thread(work))
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        # At every cancellation: a store that is lost is failed first, and closed then.
        while not running.done():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait({running})
        running.exception()  # looked at, so that asyncio does not warn of it
        raise


class LoopThread:
    """Runs coroutines for other threads until it is closed."""

    def __init__(self, name: str) -> None:
        self._context = contextvars.copy_context()
        self._loop = asyncio.new_event_loop()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._closed = False
        self._failed: str | None = None
        self._lock = threading.Lock()
        self._name = name
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, work: Coroutine[Any, Any, T]) -> StoreFuture[T]:
        """Run a coroutine on the loop; does not wait.

        Raises:
            StoreClosed: the loop is closed.
            StoreError: `fail` was called.
        """
        future: StoreFuture[T] = StoreFuture()
        with self._lock:
            if self._failed is not None and not self._closed:
                work.close()
                raise StoreError(self._failed)
            if self._closed:
                work.close()
                raise StoreClosed(f"{self._name} is closed")
            self._loop.call_soon_threadsafe(self._begin, work, future, context=self._context)
        return future

    @property
    def is_current(self) -> bool:
        """Whether the caller runs on the loop's own thread, where waiting for it would never end."""
        return threading.current_thread() is self._thread

    def fail(self, reason: str) -> None:
        """End what is under way and refuse what comes, both with `StoreError(reason)`. Does not wait."""
        with self._lock:
            if self._closed or self._failed is not None:
                return
            self._failed = reason
            self._loop.call_soon_threadsafe(self._cancel, context=self._context)

    def close(self, timeout_s: float = 5.0) -> None:
        """Cancel what is under way and end the thread. Closing twice is harmless."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._loop.call_soon_threadsafe(self._end, context=self._context)
        if not self.is_current:
            self._thread.join(timeout_s)

    def _begin(self, work: Coroutine[Any, Any, T], future: StoreFuture[T]) -> None:
        if not future.set_running_or_notify_cancel():
            work.close()
            return
        task = self._loop.create_task(work, context=self._context.copy())
        self._tasks.add(task)
        task.add_done_callback(lambda done: self._finish(done, future))

    def _finish(self, task: asyncio.Task[T], future: StoreFuture[T]) -> None:
        self._tasks.discard(task)
        if task.cancelled() and self._failed is not None:
            future.set_exception(StoreError(self._failed))
        elif task.cancelled():
            future.set_exception(StoreClosed(f"{self._name} was closed before the operation ended"))
        elif (error := task.exception()) is not None:
            future.set_exception(error)
        else:
            future.set_result(task.result())

    def _cancel(self) -> list[asyncio.Task[Any]]:
        pending = list(self._tasks)
        for task in pending:
            task.cancel()
        return pending

    def _end(self) -> None:
        self._loop.create_task(self._stop_after(self._cancel()))

    async def _stop_after(self, tasks: list[asyncio.Task[Any]]) -> None:
        await asyncio.gather(*tasks, return_exceptions=True)
        self._loop.call_soon(self._loop.stop)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._context.copy().run(self._loop.run_forever)
        finally:
            self._loop.close()
