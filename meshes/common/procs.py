"""Facts about processes, read from /proc as the bytes they are. Standard library only, for the guardian.

Names of processes, sockets and files are any bytes: the kernel cuts a process name at 15 bytes, in the middle
of a letter if need be. Everything here is for this machine; a process that is gone is an `OSError`, or "" and
False where that says it as well.
"""

from __future__ import annotations

import os

SHM_DIR = "/dev/shm"


def pids() -> list[int]:
    """All processes that can be seen."""
    return [int(entry) for entry in os.listdir("/proc") if entry.isdigit()]


def environ(pid: int) -> list[bytes]:
    """What a process was started with: "NAME=value" each.

    Raises:
        OSError: it is gone, or not ours to look into.
    """
    return _read(f"{pid}/environ").split(b"\0")


def command(pid: int) -> str:
    """Its command line for people to read; "" if it is gone."""
    try:
        words = _read(f"{pid}/cmdline")
    except OSError:
        return ""
    return words.replace(b"\0", b" ").decode(errors="backslashreplace").strip()


def parent(pid: int) -> int:
    """The process that started it, or has adopted it; 0 if it is gone."""
    fields = _stat(pid)
    return int(fields[1]) if fields else 0


def state(pid: int) -> str:
    """The letter of its state: R, S, D, T (stopped), t (by a debugger), Z (a zombie), …; "" if it is gone."""
    fields = _stat(pid)
    return fields[0].decode("ascii") if fields else ""


def _stat(pid: int) -> list[bytes]:
    """The fields after its name; none if it is gone."""
    try:
        # The name stands in brackets and may itself have some.
        return _read(f"{pid}/stat").rpartition(b")")[2].split()
    except OSError:
        return []


def lives(pid: int) -> bool:
    """Whether there is such a process that has not ended; a zombie has."""
    return state(pid) not in ("", "Z", "X", "x")


def is_stopped(pid: int) -> bool:
    """Whether a process has been stopped by a signal, or by a debugger."""
    return state(pid) in ("T", "t")


def mapped_shm(pid: int) -> set[tuple[int, int]]:
    """(device, inode) of the shared-memory files that a process has mapped.

    Raises:
        OSError: it is gone, or not ours to look into.
    """
    found = set()
    for line in _read(f"{pid}/maps").splitlines():
        fields = line.split(maxsplit=5)
        if len(fields) == 6 and fields[5].startswith(os.fsencode(SHM_DIR) + b"/"):
            major, minor = (int(number, 16) for number in fields[3].split(b":"))
            found.add((os.makedev(major, minor), int(fields[4])))
    return found


def unix_sockets(part: str) -> list[str]:
    """Names of the machine's Unix sockets that have `part` in them; an abstract one's begins with "@"."""
    # A name may hold any byte, line ends too, so one that is looked for need not stand in one line.
    text, needle = _read("net/unix"), os.fsencode(part)
    if needle not in text:
        return []
    names = [os.fsdecode(line.split(maxsplit=7)[-1]) for line in text.splitlines() if needle in line]
    return names or [part]


def mount_points() -> list[bytes]:
    """Where file systems are mounted, as this process sees them."""
    fields = (line.split(b" ") for line in _read("self/mountinfo").splitlines())
    # Blanks, line ends and backslashes are written in octal there.
    return [_unescaped(one[4]) for one in fields]


def thread_names() -> list[bytes]:
    """Names of this process's threads."""
    found = []
    for entry in os.listdir("/proc/self/task"):
        try:
            found.append(_read(f"self/task/{entry}/comm").rstrip(b"\n"))
        except OSError:
            continue  # it has just ended
    return found


def _unescaped(name: bytes) -> bytes:
    first, *rest = name.split(b"\\")
    return first + b"".join(bytes([int(part[:3], 8)]) + part[3:] for part in rest)


def _read(name: str) -> bytes:
    with open(f"/proc/{name}", "rb") as file:
        return file.read()
