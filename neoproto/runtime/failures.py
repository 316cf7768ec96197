"""Deaths of processes, as futures, for code that waits for something else than a call to them."""

from __future__ import annotations

import threading
from collections.abc import Collection
from concurrent.futures import Future

ProcessFailure = Future[None]
"""Fails with the death of a process; has no other end."""


class ProcessFailures:
    """Deaths by group, and of the object store, for those who watch."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lost: dict[str | None, Exception] = {}
        self._watched: list[tuple[frozenset[str | None], ProcessFailure]] = []

    def watch(self, groups: Collection[str]) -> ProcessFailure:
        """Watch some groups, by name, and the object store; what died before counts too."""
        failure = ProcessFailure()
        wanted = frozenset[str | None]((*groups, None))
        with self._lock:
            self._watched.append((wanted, failure))
            for group, error in self._lost.items():
                if group in wanted and not failure.done():
                    failure.set_exception(error)
        return failure

    def report(self, group: str | None, error: Exception) -> None:
        """A process of a group has died; None is the object store. The first death of each counts."""
        with self._lock:
            if group in self._lost:
                return
            self._lost[group] = error
            waiting = [failure for wanted, failure in self._watched if group in wanted and not failure.done()]
            for failure in waiting:
                failure.set_exception(error)
