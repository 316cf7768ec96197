"""Stacks of processes that do not answer: faulthandler writes them even where the interpreter's lock is held.

controller ──SIGUSR2──> process: faulthandler ──> its log ──> controller reads what was added
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path

from meshes.common import procs

STACKS_SIGNAL = signal.SIGUSR2
"""`meshes.common.bootstrap` has faulthandler answer it."""
_HEADING = "most recent call first"
_SETTLE_S = 0.05


def read_stacks(processes: Mapping[int, tuple[int, Path]], timeout_s: float = 1.0) -> dict[int, str]:
    """What processes of this machine write when asked for their stacks.

    Args:
        processes: rank → (pid, log).

    Returns:
        rank → stacks of all its threads, or a word on a process that is stopped; nothing of one that is gone.
    """
    asked = {}
    found = {}
    for rank, (pid, log) in processes.items():
        try:
            if procs.is_stopped(pid):
                found[rank] = f"process {pid} is stopped (SIGSTOP, or a debugger)"
                continue
            asked[rank] = log, log.stat().st_size
            os.kill(pid, STACKS_SIGNAL)
        except OSError:
            asked.pop(rank, None)
    until = time.monotonic() + timeout_s
    sizes: dict[int, int] = {}
    while asked and time.monotonic() < until:
        time.sleep(_SETTLE_S)
        for rank, (log, before) in list(asked.items()):
            text = _added(log, before)
            if _HEADING in text and sizes.get(rank) == len(text):
                found[rank] = text[text.index("Thread") if "Thread" in text else 0 :].strip()
                del asked[rank]
            sizes[rank] = len(text)
    return found


def _added(log: Path, before: int) -> str:
    with log.open("rb") as file:
        file.seek(before)
        return file.read().decode(errors="replace")
