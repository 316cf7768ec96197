"""Who is told when a process of the run is lost, also where nobody waits for a call to it."""

from __future__ import annotations

import threading
from collections.abc import Collection
from concurrent.futures import Future

Loss = Future[None]
"""Fails with the death of a process; has no other end."""


class Losses:
    """Deaths by group, and of the object store, for those who watch."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lost: dict[str | None, Exception] = {}
        self._watched: list[tuple[frozenset[str | None], Loss]] = []

    def watch(self, groups: Collection[str]) -> Loss:
        """Watch some groups, by name, and the object store; what died before counts too."""
        loss = Loss()
        wanted = frozenset[str | None]((*groups, None))
        with self._lock:
            self._watched.append((wanted, loss))
            for group, error in self._lost.items():
                if group in wanted and not loss.done():
                    loss.set_exception(error)
        return loss

    def report(self, group: str | None, error: Exception) -> None:
        """A process of a group has died; None is the object store. The first death of each counts."""
        with self._lock:
            if group in self._lost:
                return
            self._lost[group] = error
            told = [loss for wanted, loss in self._watched if group in wanted and not loss.done()]
            for loss in told:
                loss.set_exception(error)
