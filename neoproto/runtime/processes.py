"""`processes.json` in the run folder: which processes a run has now, for people and their tools."""

from __future__ import annotations

import json
import logging
import os
import socket
import threading
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path

from neoproto.files import replace_file
from neoproto.runtime.backend import ProcessInfo

logger = logging.getLogger(__name__)

PROCESSES_FILE = "processes.json"
CONTROLLER = "controller"
RESERVED_NAMES = (CONTROLLER, "store-volume", "store-index", "store", "hosts", "controller.log")
"""Not for worker groups: rows of the file that are the run's own, and what lies beside the groups' logs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessEntry:
    """One row of the file.

    Attributes:
        group: the worker group; "controller", "store-volume" or "store-index".
        rank: in its group.
        pid, host: where it is.
        started: when it was up, ISO 8601 with the zone: a pid alone may be another process's by now.
    """

    group: str
    rank: int
    pid: int
    host: str
    started: str


class ProcessFile:
    """Keeps the file up to date: whole at any moment, rewritten when a process comes or goes.

    A file that cannot be written is a warning in the log and no more: closing a run, or noting a death, must
    not fail by it.

    Args:
        folder: the run folder; there is no file until `open`.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / PROCESSES_FILE
        self._lock = threading.Lock()
        self._open = False
        self._entries: dict[tuple[str, int], ProcessEntry] = {}

    def open(self) -> None:
        """Begin, with the controller, this process."""
        self._open = True
        controller = ProcessInfo(rank=0, pid=os.getpid(), host=socket.gethostname(), rendezvous=None)
        self.add(CONTROLLER, [controller])

    def add(self, group: str, processes: Sequence[ProcessInfo]) -> None:
        """Note processes that are up."""
        now = datetime.now().astimezone().isoformat(timespec="seconds")
        with self._lock:
            for info in processes:
                self._entries[group, info.rank] = ProcessEntry(
                    group=group, rank=info.rank, pid=info.pid, host=info.host, started=now
                )
            self._write()

    def remove(self, group: str, rank: int | None = None) -> None:
        """Note that a process is gone, or all of a group."""
        with self._lock:
            gone = [key for key in self._entries if key[0] == group and rank in (None, key[1])]
            for key in gone:
                del self._entries[key]
            if gone:
                self._write()

    def clear(self) -> None:
        """The run is closed: an empty list."""
        with self._lock:
            self._entries.clear()
            self._write()

    def _write(self) -> None:
        if not self._open:
            return
        # A row a line, so that `grep` finds a whole process.
        rows = ",\n ".join(json.dumps(asdict(entry)) for entry in self._entries.values())
        try:
            replace_file(self._path, f"[{rows}]\n".encode())
        except OSError as error:
            logger.warning("%s was not written: %s", self._path, error.strerror or error)
