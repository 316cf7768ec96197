"""What outlives the controller: ends the run's processes and removes its files if the controller is gone.

    controller ──pipe: ["dir", …], ["made", …], … ["bye"]──> guardian      end of file without "bye" ──> sweep
    controller ──TCP: ["shm", PREFIX], … ["last"]──> guardian of an applied host      end ──> sweep, answer

Run as a script with nothing but the standard library, so that it starts in milliseconds and weighs little. It
is the first process of a run. The controller uses the same `sweep` when it closes. Hosts that are not the
run's own have one each, whose connection the kernel ends with the controller. The folder of the controller's
Monarch client, which lives on between runs, has one too (`meshes/monarch/sdk.py`). The controller's ends of
all of them are in `meshes/common/guards.py`.

Nothing is removed or ended by its name or number alone: a folder has to hold the mark of its maker, a file in
/dev/shm a name with the run's id and this user as its owner, a process the run's id in its environment.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import stat
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import BinaryIO

if __name__ == "__main__":  # started by its path: our packages are found, behind the standard library
    sys.path.append(os.path.abspath(os.path.join(os.path.dirname(__file__), *[os.pardir] * 2)))

from meshes.common import procs

MARK = "NEOPROTO_RUN_ID"
"""Environment variable that all processes of a run have, and their children."""
OWNER_FILE = ".neoproto-owner"
"""In a folder of a run: a symbolic link to nowhere, whose text names the folder's owner. It is there whole
or not at all, also if its maker is killed."""
SWEEP_S = 10.0
AGAIN_S = 3.0
"""A process that was being started while the others were ended is there by then."""


def marked_processes(run_id: str) -> list[int]:
    """Living processes whose environment carries the run's mark, this one apart."""
    return [pid for pid in procs.pids() if pid != os.getpid() and is_marked(pid, run_id) and procs.lives(pid)]


def is_marked(pid: int, run_id: str) -> bool:
    """Whether a process of this machine carries the run's mark."""
    try:
        return bool(run_id) and f"{MARK}={run_id}".encode() in procs.environ(pid)
    except OSError:
        return False


def end_process(pid: int, run_id: str) -> None:
    """SIGKILL a process if it is the run's: its number may be another one's by now."""
    with contextlib.suppress(OSError):
        try:
            pidfd = os.pidfd_open(pid)
        except ProcessLookupError:
            return
        except OSError:  # no pidfds on this kernel
            if is_marked(pid, run_id):
                os.kill(pid, signal.SIGKILL)
            return
        try:
            if is_marked(pid, run_id):
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        finally:
            os.close(pidfd)


@dataclass(kw_only=True, slots=True)
class Folder:
    """A folder of temporary files that goes with the run.

    Attributes:
        path: where, as the bytes that it is.
        owner: a word that only its maker knows; the mark in the folder has it, and the folder's inode.
        made: the mark is there. A folder that is not marked yet goes only if it is empty.
    """

    path: bytes
    owner: str
    made: bool = False

    def make(self) -> None:
        """Make and mark it. What removes it knew of it before.

        Raises:
            OSError: it cannot be made, or is there already.
        """
        os.mkdir(os.fsdecode(self.path), mode=0o700)
        fd = self._open()
        try:
            os.symlink(self._mark(fd), OWNER_FILE, dir_fd=fd)
        finally:
            os.close(fd)
        self.made = True

    def remove(self) -> str:
        """Remove it with all that is in it, if it is the one that was made.

        Returns:
            why it was left there; "" if it is gone.
        """
        try:
            fd = self._open()
        except FileNotFoundError:
            return ""
        except OSError as error:  # for example a symbolic link
            return f"it is not the folder that was made: {error.strerror}"
        try:
            return self._remove(fd)
        finally:
            os.close(fd)

    def _open(self) -> int:
        return os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)

    def _mark(self, fd: int) -> str:
        # With the inode: a copy of the folder has the same words in it.
        return f"{self.owner} {os.fstat(fd).st_ino}"

    def _is_marked(self, fd: int) -> bool:
        try:
            mark = os.readlink(OWNER_FILE, dir_fd=fd)
        except OSError:
            return False
        return mark == self._mark(fd) and os.fstat(fd).st_uid == os.geteuid()

    def _remove(self, fd: int) -> str:
        if not self._is_marked(fd):
            if not self.made:
                with contextlib.suppress(OSError):  # its maker was killed before it had marked it
                    os.rmdir(self.path)
                    return ""
            return f"it is not the folder that was made: it has no {OWNER_FILE} of the run's"
        real = os.path.realpath(self.path)
        if any(point == real or point.startswith(real + b"/") for point in procs.mount_points()):
            return "a file system is mounted in it"
        _empty(fd)
        # From here on nothing tells that it is the run's, so it has to be empty to go.
        mark = os.readlink(OWNER_FILE, dir_fd=fd)
        try:
            os.unlink(OWNER_FILE, dir_fd=fd)
            os.rmdir(self.path)
        except OSError as error:
            with contextlib.suppress(OSError):
                os.symlink(mark, OWNER_FILE, dir_fd=fd)
            return f"not all of it can be removed: {error.strerror}"
        return ""


def _empty(fd: int) -> None:
    """Remove what is in an open folder, its mark apart."""
    # By its descriptor: what the name leads to may change meanwhile.
    with os.scandir(fd) as entries:
        found = [(entry.name, entry.is_dir(follow_symlinks=False)) for entry in entries]
    for name, is_folder in found:
        if is_folder:
            shutil.rmtree(name, ignore_errors=True, dir_fd=fd)
        elif name != OWNER_FILE:
            with contextlib.suppress(OSError):
                os.unlink(name, dir_fd=fd)


def check_shm_prefix(run_id: str, prefix: str) -> None:
    """Raises ValueError: files whose names begin so need not be the run's."""
    if len(run_id) < 8 or run_id not in prefix:
        raise ValueError(
            f"files in {procs.SHM_DIR} are removed by a prefix with the id of their run, "
            f"got {prefix!r} for run {run_id!r}"
        )


def sweep(
    run_id: str, folders: Iterable[Folder], shm_prefixes: Iterable[str] = (), timeout_s: float = SWEEP_S
) -> tuple[list[int], dict[str, str]]:
    """SIGKILL the run's processes until none is left, then remove its folders and shared-memory files.

    Returns:
        processes that could not be ended in time, and folders that were left, with the reason.
    """
    until = time.monotonic() + timeout_s
    semaphores: set[tuple[int, int]] = set()
    left = marked_processes(run_id)
    while left and time.monotonic() < until:
        for pid in left:
            with contextlib.suppress(OSError):
                semaphores |= procs.mapped_shm(pid)
        for pid in left:
            end_process(pid, run_id)
        time.sleep(0.02)
        left = marked_processes(run_id)
    wrong = {os.fsdecode(folder.path): folder.remove() for folder in folders}
    _remove_shm(run_id, shm_prefixes, semaphores)
    return left, {path: reason for path, reason in wrong.items() if reason}


def _remove_shm(run_id: str, prefixes: Iterable[str], semaphores: set[tuple[int, int]]) -> None:
    """Remove files by name, and multiprocessing's semaphores by inode: their tracker was killed too."""
    checked = []
    for prefix in prefixes:
        with contextlib.suppress(ValueError):
            check_shm_prefix(run_id, prefix)
            checked.append(prefix)
    with contextlib.suppress(OSError):
        for entry in os.scandir(procs.SHM_DIR):
            with contextlib.suppress(OSError):
                facts = entry.stat(follow_symlinks=False)
                inode = facts.st_dev, facts.st_ino
                named = entry.name.startswith(tuple(checked)) and facts.st_uid == os.geteuid()
                semaphore = entry.name.startswith("sem.mp-") and inode in semaphores
                if stat.S_ISREG(facts.st_mode) and (named or semaphore):
                    os.unlink(entry.path)


def write_message(*words: str | int) -> bytes:
    """One message: a line, whatever the words are. What is cut off in the middle is none."""
    return json.dumps(words).encode() + b"\n"


def read_message(line: bytes) -> list[str]:
    """The words of a message; none if it is not a whole one."""
    try:
        words = json.loads(line)
    except (ValueError, RecursionError):  # anybody may connect and send something
        return []
    return [str(word) for word in words] if isinstance(words, list) else []


def path_word(path: str | bytes) -> str:
    """A path as a word of a message: byte by byte, so that both sides mean the same file in any locale."""
    return os.fsencode(path).decode("latin-1")


class Guarded:
    """What a guardian is to remove."""

    def __init__(self, run_id: str) -> None:
        self.run_id = run_id
        self.folders: dict[bytes, Folder] = {}
        self.prefixes: list[str] = []
        self.done = self.last = False

    def record(self, words: list[str]) -> None:
        """Take a message; one that is not understood changes nothing."""
        with contextlib.suppress(ValueError):
            match words:
                case ["bye"]:
                    self.done = True
                case ["last"]:
                    self.last = True
                case ["dir", path, owner]:
                    self._add(Folder(path=path.encode("latin-1"), owner=owner))
                case ["made", path]:
                    if folder := self.folders.get(path.encode("latin-1")):
                        folder.made = True
                case ["forget", path]:
                    self.folders.pop(path.encode("latin-1"), None)
                case ["shm", prefix]:
                    self.prefixes.append(prefix)
                case ["kill", pid]:
                    end_process(int(pid), self.run_id)

    def _add(self, folder: Folder) -> None:
        if os.path.isabs(folder.path) and folder.owner:
            self.folders[folder.path] = folder

    def sweep(self) -> list[int]:
        """End and remove it all."""
        return sweep(self.run_id, self.folders.values(), self.prefixes)[0]


def main() -> None:
    """Read messages until the input ends; sweep unless the last was "bye", again unless it was "last"."""
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN)
    guarded = Guarded(sys.argv[1])
    for told in sys.argv[2:]:
        guarded.record(read_message(told.encode()))
    for line in _lines(sys.stdin.buffer):
        guarded.record(read_message(line))
        if guarded.done:
            return
    left = guarded.sweep()
    with contextlib.suppress(OSError):  # a pipe, or a controller that is gone
        os.write(0, write_message("left", len(left)))
    if guarded.last:
        return
    with contextlib.suppress(OSError):
        os.close(0)
    time.sleep(AGAIN_S)
    guarded.sweep()


def _lines(stream: BinaryIO) -> Iterator[bytes]:
    # A connection may also end by a reset, or because nothing has answered for long.
    with contextlib.suppress(OSError):
        yield from stream


if __name__ == "__main__":
    main()
