"""What a run may leave on the machine: processes with its mark, shared memory, folders and sockets."""

from __future__ import annotations

import os
import tempfile
import time

from meshes.common import procs
from meshes.common.guardian import marked_processes


def traces(run_id: str, controller: int | None = None) -> list[str]:
    """Everything found of a run, and of its controller's Monarch client if the controller is gone."""
    found = [f"process {pid}: {procs.command(pid)[:120]}" for pid in marked_processes(run_id)]
    tmp = tempfile.gettempdir()
    prefixes = [f"np-{run_id}"] + ([] if controller is None else [f"np-client-{controller}-"])
    found += [f"folder {name}" for name in os.listdir(tmp) if name.startswith(tuple(prefixes))]
    found += [f"shm {name}" for name in os.listdir("/dev/shm") if run_id in name]
    return found + [f"socket {name}" for name in procs.unix_sockets(run_id)]


def wait_until_clean(run_id: str, controller: int | None, seconds: float) -> list[str]:
    """Wait for a run to be gone; what is left after `seconds`."""
    until = time.monotonic() + seconds
    while (left := traces(run_id, controller)) and time.monotonic() < until:
        time.sleep(0.1)
    return left
