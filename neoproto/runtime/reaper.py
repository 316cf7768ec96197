"""Releases groups that are not referenced any more.

finalizer (any thread, any moment) ──enqueue──> reaper's own thread ──> release

A finalizer may run in the middle of anything, with any lock held; so it only puts a name into a queue that
was made for that.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable

logger = logging.getLogger(__name__)


class Reaper:
    """One daemon thread, owned by the owner of the groups."""

    def __init__(self, release: Callable[[str], None]) -> None:
        """Start nothing yet.

        Args:
            release: gives a group's processes up, by its key; runs on the reaper's thread.
        """
        self._release = release
        self._queue: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the thread, once: not in `enqueue`, since a finalizer must not start one."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="neoproto-reaper", daemon=True)
            self._thread.start()

    def enqueue(self, key: str) -> None:
        """Have a group released. Takes no lock, never waits."""
        self._queue.put(key)

    def close(self, timeout_s: float) -> None:
        """End the thread once it has released what is in the queue."""
        self._queue.put(None)
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout_s)

    def _run(self) -> None:
        while (key := self._queue.get()) is not None:
            try:
                self._release(key)
            except Exception:
                logger.warning("releasing worker group %s failed", key, exc_info=True)
