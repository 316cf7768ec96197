"""SIGTERM and SIGHUP end a run the way an exception does."""

from __future__ import annotations

import contextlib
import os
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


def _end_at_once(signum: int, _: FrameType | None) -> None:
    name = "interrupted" if signum == signal.SIGINT else f"ended by {signal.Signals(signum).name}"
    with contextlib.suppress(OSError):
        os.write(2, f"{name}; nothing was started\n".encode())
    os._exit(128 + signum)


def _end_silently(signum: int, _: FrameType | None) -> None:
    os._exit(128 + signum)


def end_at_once() -> None:
    """Until `raised_signals`, a signal ends this process with one line and its code.

    That is for imports: an exception that is raised while one runs may be lost in native code. Signals that
    the process was started with as ignored (`nohup`, `command &` of a script) stay so.
    """
    for signum in (signal.SIGINT, *_TERMINATING):
        if signal.getsignal(signum) is not signal.SIG_IGN:
            signal.signal(signum, _end_at_once)


def end_with(code: int) -> None:
    """From now on a signal ends this process with a code that is known already, without a line."""
    for signum in (signal.SIGINT, *_TERMINATING):
        if signal.getsignal(signum) is not signal.SIG_IGN:
            signal.signal(signum, lambda *_: os._exit(code))


@contextlib.contextmanager
def raised_signals() -> Iterator[None]:
    """Within the block SIGTERM and SIGHUP raise `Terminated`, SIGINT raises KeyboardInterrupt."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    wanted: dict[int, Any] = {
        signal.SIGINT: signal.default_int_handler,
        **dict.fromkeys(_TERMINATING, _raise_terminated),
    }
    previous = {
        signum: signal.signal(signum, handler)
        for signum, handler in wanted.items()
        if signal.getsignal(signum) in (_end_at_once, signal.SIG_DFL)
    }
    try:
        yield
    finally:
        for signum, handler in previous.items():
            # The code that leaves the block prints how it ended.
            signal.signal(signum, _end_silently if handler is _end_at_once else handler)


class SignalHandlers:
    """Turns terminating signals into `Terminated` where nothing else handles them; main thread only."""

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
        """Put back what was there, unless it was changed since."""
        if threading.current_thread() is not threading.main_thread():
            return
        for signum, previous in self._previous.items():
            if signal.getsignal(signum) is _raise_terminated:
                signal.signal(signum, previous)
        self._previous.clear()


@contextlib.contextmanager
def ignored_signals() -> Iterator[None]:
    """Drop SIGINT, SIGTERM and SIGHUP within the block, so that nothing cuts a bounded cleanup short."""
    with _recorded_signals():
        yield


@contextlib.contextmanager
def held_signals() -> Iterator[None]:
    """Hold SIGINT, SIGTERM and SIGHUP back until the block ends.

    An exception that a handler raises while native code calls back into Python is lost in there, and may
    leave the native side half made.
    """
    with _recorded_signals() as noted:
        yield
    if noted:
        signal.raise_signal(noted[0])


@contextlib.contextmanager
def _recorded_signals() -> Iterator[list[int]]:
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
