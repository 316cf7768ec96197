"""SIGTERM and SIGHUP end a run the way an exception does."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any

_TERMINATING = (signal.SIGTERM, signal.SIGHUP)


class Terminated(SystemExit):
    """Raised in the main thread by SIGTERM or SIGHUP while a runtime lives; exit code 128 + the signal.

    Also by the command where a write finds that its reader has gone, for SIGPIPE, which Python ignores.

    Attributes:
        signal_name: "SIGTERM", for example.
    """

    def __init__(self, signum: int) -> None:
        super().__init__(128 + signum)
        self.signal_name = signal.Signals(signum).name


def _raise_terminated(signum: int, _: FrameType | None) -> None:
    raise Terminated(signum)


class SignalHandlers:
    """Turns terminating signals into `Terminated` where nobody else handles them; on the main thread only."""

    def __init__(self) -> None:
        self._previous: dict[int, Any] = {}

    def install(self) -> None:
        """Handle the signals that still have their default action."""
        if threading.current_thread() is not threading.main_thread():
            return
        for signum in _TERMINATING:
            if signal.getsignal(signum) is signal.SIG_DFL:
                self._previous[signum] = signal.signal(signum, _raise_terminated)

    def restore(self) -> None:
        """Put back what was there, unless somebody has changed it since."""
        if threading.current_thread() is not threading.main_thread():
            return
        for signum, previous in self._previous.items():
            if signal.getsignal(signum) is _raise_terminated:
                signal.signal(signum, previous)
        self._previous.clear()


@contextlib.contextmanager
def deferred_signals() -> Iterator[None]:
    """Drop SIGINT, SIGTERM and SIGHUP within the block, so that nothing cuts a bounded cleanup short."""
    with _noted_signals():
        yield


@contextlib.contextmanager
def held_signals() -> Iterator[None]:
    """Hold SIGINT, SIGTERM and SIGHUP back until the block ends.

    An exception that a handler raises while native code calls back into Python is lost in there, and may
    leave the native side half made.
    """
    with _noted_signals() as noted:
        yield
    if noted:
        signal.raise_signal(noted[0])


@contextlib.contextmanager
def _noted_signals() -> Iterator[list[int]]:
    noted: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield noted
        return

    def note(signum: int, _: FrameType | None) -> None:
        noted.append(signum)

    previous = {signum: signal.signal(signum, note) for signum in (signal.SIGINT, *_TERMINATING)}
    try:
        yield noted
    finally:
        for signum, handler in previous.items():
            signal.signal(signum, handler if handler is not None else signal.SIG_DFL)
