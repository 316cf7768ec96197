"""Blocking work beside an event loop."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar, cast

T = TypeVar("T")


async def in_thread(function: Callable[[], T]) -> T:
    """Run in a thread of its own, with this context's variables; cancelling stops the wait, not the thread.

    The thread is a daemon: a function that never returns does not keep the process from ending.
    """
    # The error travels as a value: futures replace some exceptions by others, without their traceback.
    outcome: Future[tuple[T | None, BaseException | None]] = Future()
    outcome.set_running_or_notify_cancel()
    context = contextvars.copy_context()

    def run() -> None:
        try:
            outcome.set_result((context.run(function), None))
        except BaseException as error:  # noqa: BLE001 — handed to the caller, whole
            outcome.set_result((None, error))

    threading.Thread(target=run, name="in-thread", daemon=True).start()
    value, error = await asyncio.wrap_future(outcome)
    if error is not None:
        raise error
    return cast("T", value)
