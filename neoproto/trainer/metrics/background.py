"""A service that keeps metrics, fed from a thread of its own.

    Recorder ─> Trackers ─> BackgroundTracker ─queue─> thread ─> a service (`services.py`)

A slow or failed network is reported once and does not affect the run.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from neoproto.text import one_line
from neoproto.trainer.metrics.service_runs import RunStart

OPEN_TIMEOUT_S = 60.0
CLOSE_TIMEOUT_S = 30.0
MOST_WAITING = 10_000
"""Rows that may wait for a service; more are dropped, so that memory is bounded."""

log = logging.getLogger("neoproto.tracking")


class Service(Protocol):
    """What a `BackgroundTracker` feeds. Every method is called in its thread."""

    def begin(self, starts: Sequence[RunStart]) -> None:
        """A start of the run begins, the last of these; rows that follow are its."""
        ...

    def log(self, metrics: Mapping[str, float], step: int) -> None: ...

    def close(self, failed: bool) -> None:
        """The run is over; `failed`: it did not reach its end."""
        ...


class BackgroundTracker:
    """Feeds a tracker from a thread of its own: neither slowness nor failures of it reach the run.

    The first failure is printed, and at the end the number of lost rows; later rows are still tried, for a
    network may come back.

    Args:
        name: of the service, for messages.
        make: opens it; called in the thread.
        print_line: shows a person a line.

    Raises:
        NotOpened: it could not be opened, or not within `open_timeout` seconds.
    """

    def __init__(
        self,
        name: str,
        make: Callable[[], Service],
        print_line: Callable[[str], None],
        *,
        open_timeout: float = OPEN_TIMEOUT_S,
        close_timeout: float = CLOSE_TIMEOUT_S,
        most_waiting: int = MOST_WAITING,
    ) -> None:
        self._name, self._make, self._print_line, self._close_timeout = name, make, print_line, close_timeout
        self._rows: queue.Queue[tuple[dict[str, float], int, tuple[RunStart, ...]]] = queue.Queue(
            most_waiting
        )
        self._starts: tuple[RunStart, ...] = ()
        self._opened, self._closing = threading.Event(), threading.Event()
        self._not_opened: Exception | None = None
        self._failed = False
        self._lost, self._warned = 0, False
        # A daemon: what hangs in a service must not keep the process.
        self._thread = threading.Thread(target=self._run, name=f"tracker-{name}", daemon=True)
        self._thread.start()
        if not self._opened.wait(open_timeout):
            raise NotOpened(f"did not open within {open_timeout:g} s")
        if self._not_opened is not None:
            raise NotOpened(_named(self._not_opened)) from self._not_opened

    def begin(self, starts: Sequence[RunStart]) -> None:
        """A start of the run begins, the last of `starts`: the service gets it before the next row."""
        self._starts = tuple(starts)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        try:
            self._rows.put_nowait((dict(metrics), step, self._starts))
        except queue.Full:
            self._lost += 1
            self._warn("it is too slow")

    def close(self, failed: bool = False) -> None:
        """Wait for what is still to be sent, for `close_timeout` seconds at most."""
        self._failed = failed
        self._closing.set()
        self._thread.join(self._close_timeout)
        if self._thread.is_alive():
            self._print_line(
                f"warning: {self._name} did not finish within {self._close_timeout:g} s and is left behind"
            )
        if self._lost:
            self._print_line(f"warning: {self._lost} rows of metrics did not reach {self._name}")

    def _run(self) -> None:
        """Consumes: rows. Waits for: a row or the end. Unblocked by: either, in a fraction of a second."""
        try:
            tracker = self._make()
        except Exception as error:  # raised where it is opened
            log.info("%s could not be opened", self._name, exc_info=error)
            self._not_opened = error
            return
        finally:
            self._opened.set()
        begun: tuple[RunStart, ...] = ()
        while True:
            try:
                metrics, step, starts = self._rows.get(timeout=0.1)
            except queue.Empty:
                if self._closing.is_set():
                    break
                continue
            # With every row, until the service has taken it: a network may come back.
            if starts != begun and self._attempt(tracker.begin, starts):
                begun = starts
            if not self._attempt(tracker.log, metrics, step):
                self._lost += 1
        self._attempt(tracker.close, self._failed)

    def _attempt(self, call: Callable[..., None], *args: Any) -> bool:
        try:
            call(*args)
        except Exception as error:  # printed: a service must not end a run of days
            log.info("%s failed", self._name, exc_info=error)
            self._warn(_named(error))
            return False
        return True

    def _warn(self, why: str) -> None:
        if not self._warned:
            self._warned = True
            self._print_line(f"warning: {self._name} failed, the run continues without it: {why}")


class NotOpened(Exception):
    """A service could not be opened; the message is one line."""


def _named(error: Exception) -> str:
    name, text = type(error).__name__, one_line(error)
    return name if text == name else f"{name}: {text}"
