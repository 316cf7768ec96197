"""What outlives the controller: ends the run's processes and removes its files if the controller is gone.

    controller ──pipe: "dir PATH" … "bye"──> guardian            end of file without "bye" ──> sweep
    controller ──TCP: "shm PREFIX" … "last"──> guardian of an applied host         end ──> sweep, answer

Run as a script with nothing but the standard library, so that it starts in milliseconds and weighs little. It
is the first process of a run. The controller uses the same `sweep` when it closes. Hosts that are not the
run's own have one each (`meshes/guards.py`), whose connection the kernel ends with the controller. The folder
of the controller's Monarch client, which lives on between runs, has one too (`meshes/sdk.py`).
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
import weakref
from collections.abc import Iterable, Iterator

MARK = "NEOPROTO_RUN_ID"
"""Environment variable that all processes of a run have, and their children."""
SWEEP_S = 10.0
AGAIN_S = 3.0
"""A process that was being started while the others were ended is there by then."""


def marked_processes(run_id: str) -> list[int]:
    """Living processes whose environment carries the run's mark, this one and its parent apart."""
    needle = f"{MARK}={run_id}".encode()
    found = []
    for entry in os.listdir("/proc"):
        if not entry.isdigit() or int(entry) == os.getpid():
            continue
        try:
            with open(f"/proc/{entry}/environ", "rb") as file:
                marked = needle in file.read().split(b"\0")
            if marked and not _is_zombie(entry):
                found.append(int(entry))
        except OSError:
            continue
    return found


def sweep(
    run_id: str, paths: Iterable[str], shm_prefixes: Iterable[str] = (), timeout_s: float = SWEEP_S
) -> list[int]:
    """SIGKILL the run's processes until none is left, then remove its folders and shared-memory files.

    Returns:
        processes that could not be ended in time.
    """
    until = time.monotonic() + timeout_s
    semaphores: set[int] = set()
    left = marked_processes(run_id)
    while left and time.monotonic() < until:
        for pid in left:
            with contextlib.suppress(OSError):
                semaphores |= _mapped_shm(pid)
        for pid in left:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)
        left = marked_processes(run_id)
    for path in paths:
        shutil.rmtree(path, ignore_errors=True)
    _remove_shm(tuple(shm_prefixes), semaphores)
    return left


def _remove_shm(prefixes: tuple[str, ...], semaphores: set[int]) -> None:
    """Remove files by name, and multiprocessing's semaphores by inode: their tracker was killed too."""
    with contextlib.suppress(OSError):
        for entry in os.scandir("/dev/shm"):
            semaphore = entry.name.startswith("sem.mp-") and entry.inode() in semaphores
            if semaphore or entry.name.startswith(prefixes):
                with contextlib.suppress(OSError):
                    os.unlink(entry.path)


def _mapped_shm(pid: int) -> set[int]:
    """Inodes of the shared-memory files a process has mapped (a semaphore under a name not its own)."""
    with open(f"/proc/{pid}/maps") as file:
        return {int(line.split()[4]) for line in file if " /dev/shm/" in line}


class Guardian:
    """The controller's end of the pipe.

    Args:
        run_id: whose processes are ended; no process has that of a guardian for files alone.
    """

    def __init__(self, run_id: str) -> None:
        read_end, self._pipe = os.pipe()
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", __file__, run_id],
                stdin=read_end,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        finally:
            os.close(read_end)
        self.paths: list[str] = []
        self.shm_prefixes: list[str] = []
        # A forked child would hold the pipe open beyond the controller's end.
        this = weakref.ref(self)
        os.register_at_fork(after_in_child=lambda: _let_go(this()))

    def guard_dir(self, path: str) -> None:
        """Have a folder removed at the end."""
        self.paths.append(path)
        self._tell(f"dir {path}")

    def guard_shm(self, prefix: str) -> None:
        """Have shared-memory files whose names begin so removed at the end."""
        self.shm_prefixes.append(prefix)
        self._tell(f"shm {prefix}")

    def dismiss(self) -> None:
        """Everything is closed: let it go."""
        self._tell("bye")
        self.let_go()
        with contextlib.suppress(subprocess.TimeoutExpired):  # on a busy machine; it goes by itself
            self._process.wait(timeout=2.0)

    def let_go(self) -> None:
        """Close this process's end of the pipe."""
        pipe, self._pipe = self._pipe, -1
        if pipe >= 0:
            os.close(pipe)

    def _tell(self, line: str) -> None:
        if self._pipe < 0:  # in a forked child
            return
        # A guardian that is gone (killed by hand) must not end the run it guards.
        with contextlib.suppress(BrokenPipeError):
            os.write(self._pipe, line.encode() + b"\n")


def _let_go(guardian: Guardian | None) -> None:
    if guardian is not None:
        guardian.let_go()


def main() -> None:
    """Read lines until the input ends; sweep unless the last word was "bye", again unless it was "last"."""
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN)
    run_id = sys.argv[1]
    paths = sys.argv[2:]
    prefixes: list[str] = []
    last = False
    for line in _lines():
        word, _, rest = line.rstrip("\n").partition(" ")
        if word == "bye":
            return
        last = word == "last"
        if word == "kill":
            _kill(run_id, int(rest))
        elif not last:
            (paths if word == "dir" else prefixes).append(rest)
    left = sweep(run_id, paths, prefixes)
    with contextlib.suppress(OSError):  # a pipe, or a controller that is gone
        os.write(0, f"{len(left)}\n".encode())
    if last:
        return
    with contextlib.suppress(OSError):
        os.close(0)
    time.sleep(AGAIN_S)
    sweep(run_id, paths, prefixes)


def _lines() -> Iterator[str]:
    # A connection may also end by a reset, or because nothing has answered for long.
    with contextlib.suppress(OSError):
        yield from sys.stdin


def _kill(run_id: str, pid: int) -> None:
    """End one process, if it is the run's."""
    with contextlib.suppress(OSError):
        with open(f"/proc/{pid}/environ", "rb") as file:
            marked = f"{MARK}={run_id}".encode() in file.read().split(b"\0")
        if marked:
            os.kill(pid, signal.SIGKILL)


def _is_zombie(pid: str) -> bool:
    with open(f"/proc/{pid}/stat") as file:
        return file.read().rsplit(")", 1)[1].split()[0] in "ZX"


if __name__ == "__main__":
    main()
