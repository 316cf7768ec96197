"""Blocking work beside an event loop, on a thread that may be left behind."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar, cast

T = TypeVar("T")


async def on_thread(work: Callable[[], T], *, name: str, unwanted: Callable[[T], Any] | None = None) -> T:
    """Run something that blocks on a thread of its own, with this context's variables.

    Cancelling stops the wait, not the thread. The thread is a daemon: neither the end of the loop nor that of
    the process waits for it, as they do for the threads of `asyncio.to_thread`.

    Args:
        name: of the thread.
        unwanted: takes the result, on a thread, if this was cancelled before it could return it.
    """
    # The error travels as a value: futures replace some exceptions by others, without their traceback.
    outcome: Future[tuple[T | None, BaseException | None]] = Future()
    context = contextvars.copy_context()

    def run() -> None:
        result: T | None = None
        error: BaseException | None = None
        try:
            result = context.run(work)
        except BaseException as raised:  # noqa: BLE001 - handed to the waiting task, whole
            error = raised
        # False if the waiting task was cancelled.
        if outcome.set_running_or_notify_cancel():
            outcome.set_result((result, error))
        elif error is None and unwanted is not None:
            unwanted(cast("T", result))

    threading.Thread(target=run, name=name, daemon=True).start()
    try:
        result, error = await asyncio.wrap_future(outcome)
    except asyncio.CancelledError:
        # It may have come just before, so that the thread could still hand its result over, to nobody.
        if not outcome.cancelled() and unwanted is not None:
            _give_back(outcome, unwanted, name)
        raise
    if error is not None:
        raise error
    return cast("T", result)


def _give_back(
    outcome: Future[tuple[T | None, BaseException | None]], unwanted: Callable[[T], Any], name: str
) -> None:
    def take() -> None:
        result, error = outcome.result()
        if error is None:
            unwanted(cast("T", result))

    threading.Thread(target=take, name=name, daemon=True).start()
