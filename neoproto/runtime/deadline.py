"""Deadlines: absolute on this process's monotonic clock, a budget in seconds on the way to another process.

The clocks of two processes differ, so a deadline never travels: `budget` is how much of it is left, and
`deadline_of` makes a deadline of that again where it arrives. All margins around the deadlines of calls are
here, too, and the thread that watches for deadlines that pass.
"""

from __future__ import annotations

import heapq
import itertools
import math
import threading
import time
from collections.abc import Callable
from contextvars import ContextVar

FAILURE_HOLD_S = 0.25
"""How long a rank's exception is held back while others are silent: a death among them may be its cause, and
is noticed a moment later than the collective that it broke."""
STATUS_TIMEOUT_S = 1.0
"""How long silent ranks are asked what they do, before a passed deadline is reported without it."""
RELAY_GRACE_S = 5.0
"""A worker's own end of a call that the root has not answered, so long after its deadline: as a rule the root
reports the deadline, and knows which ranks are silent."""
LATE_S = 1.0
"""A sync call that begins after its deadline may run as long as its whole budget, and at least this long."""
MESHES_TIMEOUT_S = 30.0
"""How long workers are asked which device meshes they have registered."""

_PRUNE_FROM = 1024
"""From so many entries on a watch looks for those that are not wanted any more."""

_running_deadline: ContextVar[float] = ContextVar("neoproto_running_deadline", default=math.inf)
"""The deadline of the call this code runs for; infinite outside one."""


def remaining() -> float:
    """Seconds left of the call that runs this code (negative once over); `inf` if it has no deadline."""
    return _running_deadline.get() - time.monotonic()


def deadline_after(timeout: float | None) -> float:
    """The absolute deadline of a new call: the smaller of `timeout` seconds ahead and the one it runs under.

    Raises:
        ValueError: `timeout` is negative or not a number.
    """
    inherited = _running_deadline.get()
    if timeout is None:
        return inherited
    if not timeout >= 0:
        raise ValueError(f"timeout must be a number of seconds ≥ 0, got {timeout!r}")
    return min(inherited, time.monotonic() + timeout)


def budget(deadline: float) -> float | None:
    """Seconds left until a deadline, to send; None without one."""
    return None if deadline == math.inf else deadline - time.monotonic()


def deadline_of(budget_s: float | None) -> float:
    """The deadline of a budget that has just arrived."""
    return math.inf if budget_s is None else time.monotonic() + budget_s


def set_deadline(deadline: float) -> None:
    """Make `deadline`, on this process's clock, the one that the rest of this context runs under."""
    _running_deadline.set(deadline)


class DeadlineWatch:
    """One daemon thread that runs callbacks at their time. Started with the first, ended by `close`."""

    def __init__(self, wanted: Callable[[int], bool]) -> None:
        """Watch for nothing yet.

        Args:
            wanted: whether a number that was given to `add` is still to be watched. Most calls end long
                before their deadline; their entries are dropped from time to time. It must take no lock.
        """
        self._wanted = wanted
        self._changed = threading.Condition()
        self._heap: list[tuple[float, int, Callable[[int], None], int]] = []
        self._count = itertools.count()
        self._prune_at = _PRUNE_FROM
        self._wake_at = math.inf
        self._thread: threading.Thread | None = None
        self._closed = False

    def add(self, deadline: float, on_expiry: Callable[[int], None], number: int) -> None:
        """Run `on_expiry(number)` on the watch's thread once `deadline` (monotonic seconds) has passed.

        An entry knows its call by number, so that it does not keep the results of an ended call alive.
        """
        if deadline == math.inf:
            return
        with self._changed:
            if self._closed:
                return
            heapq.heappush(self._heap, (deadline, next(self._count), on_expiry, number))
            if len(self._heap) > self._prune_at:
                self._heap = [entry for entry in self._heap if self._wanted(entry[3])]
                heapq.heapify(self._heap)
                self._prune_at = 2 * len(self._heap) + _PRUNE_FROM
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="neoproto-deadlines", daemon=True)
                self._thread.start()
            # The thread sleeps until the earliest deadline it knows; only an earlier one has to wake it.
            if deadline < self._wake_at:
                self._changed.notify()

    def close(self) -> None:
        """End the thread; what was not yet due never runs."""
        with self._changed:
            self._closed = True
            self._heap.clear()
            self._changed.notify()
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout=5.0)

    def _run(self) -> None:
        while True:
            with self._changed:
                if self._closed:
                    return
                now = time.monotonic()
                due: list[tuple[Callable[[int], None], int]] = []
                while self._heap and self._heap[0][0] <= now:
                    due.append(heapq.heappop(self._heap)[2:])
                if not due:
                    self._wake_at = self._heap[0][0] if self._heap else math.inf
                    self._changed.wait(None if self._wake_at == math.inf else self._wake_at - now)
                    continue
            for on_expiry, number in due:  # without the lock: it may add another
                on_expiry(number)
