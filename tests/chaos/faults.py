"""Bringing a fault about: signals to processes of a run, small file systems of its own that are filled."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

from meshes.common import procs
from tests.chaos.plan import Action, Kind, Plan, matches

SHM_MIB, DISK_MIB = 512, 384
"""Sizes of a run's own /dev/shm and of its run folder, where one of them is to be full."""
FILLER = "filler"


def namespaces_possible() -> bool:
    """Whether a run can have a mount namespace of its own here."""
    command = ["unshare", "--mount", "mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", "/dev/shm"]
    try:
        return subprocess.run(command, capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        return False


def within(kind: Kind, folder: Path) -> list[str]:
    """What a command is run by so that it sees a small file system where `kind` fills one; [] for none.

    Args:
        folder: the run folder, which exists.
    """
    if kind.action is not Action.FILL:
        return []
    where, size = ("/dev/shm", SHM_MIB) if kind.mount == "/dev/shm" else (str(folder), DISK_MIB)
    script = 'mount -t tmpfs -o size="$1"m tmpfs "$2" && shift 2 && exec "$@"'
    return ["unshare", "--mount", "bash", "-c", script, "bash", str(size), where]


class View:
    """A folder as the processes of a run see it; stays readable when they are gone."""

    def __init__(self, pid: int, path: Path) -> None:
        self._fd = os.open(f"/proc/{pid}/root{path}", os.O_RDONLY | os.O_DIRECTORY)
        self.path = Path(f"/proc/self/fd/{self._fd}")

    def close(self) -> None:
        """Let go of it, and so of a file system that nobody else has mounted any more."""
        os.close(self._fd)


def fill(folder: Path) -> int:
    """Write to a file until nothing is left; returns how many bytes that took."""
    written, block = 0, b"\0" * (1 << 20)
    with (folder / FILLER).open("wb", buffering=0) as file:
        while block:
            try:
                written += file.write(block)
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise
                block = block[: len(block) // 2]
    return written


def targets(kind: Kind, run_folder: Path) -> list[tuple[str, int, int]]:
    """(group, rank, pid) of the processes the fault may be for, in a fixed order; [] before there are any."""
    with contextlib.suppress(FileNotFoundError):
        found = listed(run_folder)
        found += [one for group, _, pid in found if group == "controller" for one in helpers(pid)]
        return sorted(process for process in found if matches(kind, process[0]))
    return []


def helpers(controller: int) -> list[tuple[str, int, int]]:
    """("host" or "guardian", number, pid) of a controller's children that it does not list.

    Not the guardian of its Monarch client: that one is for the client's folder alone.
    """
    found: dict[str, list[int]] = {"host": [], "guardian": []}
    with contextlib.suppress(psutil.NoSuchProcess):
        for child in psutil.Process(controller).children():
            with contextlib.suppress(OSError, psutil.NoSuchProcess):
                words = procs.command(child.pid)
                if "guardian.py" in words and " client-" not in words:
                    found["guardian"].append(child.pid)
                elif any(one.startswith(b"HYPERACTOR_PROCESS_NAME=") for one in procs.environ(child.pid)):
                    found["host"].append(child.pid)
    return [(group, number, pid) for group, pids in found.items() for number, pid in enumerate(sorted(pids))]


def listed(run_folder: Path) -> list[tuple[str, int, int]]:
    """(group, rank, pid) of all processes that a run says it has.

    Raises:
        FileNotFoundError: it has not said so yet.
    """
    rows = json.loads((run_folder / "processes.json").read_text(encoding="utf-8"))
    return [(row["group"], row["rank"], row["pid"]) for row in rows]


def choose(plan: Plan, found: Sequence[tuple[str, int, int]]) -> tuple[str, int, int]:
    """The one of them that the plan's chance falls on."""
    return found[int(plan.choice * len(found))]


def strike(pid: int, kind: Kind, pause_s: float) -> None:
    """Send the signal; for a pause also what ends it, in time.

    Raises:
        ProcessLookupError: the process is gone.
    """
    if kind.action is Action.SIGNAL:
        os.kill(pid, signal.Signals[kind.signal])
        return
    os.kill(pid, signal.SIGSTOP)
    try:
        time.sleep(pause_s)
    finally:
        with contextlib.suppress(ProcessLookupError):  # it may have been ended meanwhile
            os.kill(pid, signal.SIGCONT)
