"""Starts a judge, and ends it whole: with every process that it started.

    JudgePool ──start──> keeper ──start──> judge ──> its children, and theirs
        │                  │  adopts orphans, whatever session, group or environment they have
        └──control pipe────┘  closed (by the pool, or its death), or the judge is dead ──> all are killed

Run as a script with nothing but the standard library, so that it starts in milliseconds and weighs little. It
does not have the mark of the run: what ends a run's processes by that mark must not end it before the others.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import select
import signal
import sys
import time

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""What a terminal and a service manager send to all processes. The pool ends a judge."""
TRACKER = b"multiprocessing.resource_tracker"
"""It removes the shared memory and semaphores of processes that are gone, and then ends by itself."""

_PAUSE_S, _TRACKER_S = 0.002, 1.0
_GIVE_UP_S = 10.0
"""A process may refuse to end: one of another user, or one that the kernel holds."""


def main() -> None:
    """Arguments: the control pipe's number; KEY=VALUE for the judge's environment, or ""; its command."""
    control, extra, *command = int(sys.argv[1]), *sys.argv[2:]
    os.set_inheritable(control, False)
    deaths = watch_deaths()
    # Orphans of the judge become children of this process.
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    judge = start(command, extra)
    release_pipes()
    status = None
    while status is None:
        ready, _, _ = select.select([control, deaths], [], [])
        if deaths in ready:
            os.read(deaths, 4096)
            status = reap(judge)
        if control in ready:
            break
    ended = kill_children(judge)
    leave(status if status is not None else ended)


def watch_deaths() -> int:
    """A descriptor that is readable once a child has died; other signals are ignored."""
    for signum in IGNORED:
        signal.signal(signum, signal.SIG_IGN)
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)
    signal.signal(signal.SIGCHLD, lambda signum, frame: None)
    signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
    return read_end


def prctl(option: int, value: int) -> None:
    ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def start(command: list[str], extra: str) -> int:
    """The judge's process, in a session of its own: a signal to its group reaches no other process."""
    keeper = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    try:
        os.setsid()
        for signum in IGNORED:
            signal.signal(signum, signal.SIG_DFL)
        # Should the keeper be killed, the judge goes with it.
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() == keeper:
            name, _, value = extra.partition("=")
            os.execve(command[0], command, {**os.environ, name: value} if name else dict(os.environ))
    finally:
        os._exit(127)


def release_pipes() -> None:
    """Keep the judge's pipes open in the judge alone: their end is how its death is known."""
    null = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1):
        os.dup2(null, number)
    os.close(null)


def reap(judge: int) -> int | None:
    """Collect the children that have died. The wait status of the judge, if it is among them.

    Raises:
        ChildProcessError: there is no child, dead or alive.
    """
    while True:
        pid, ended = os.waitpid(-1, os.WNOHANG)
        if not pid:
            return None
        if pid == judge:
            return ended


def kill_children(judge: int) -> int:
    """Kill children until there are none; those of a dead child become children of this process.

    Returns:
        the judge's wait status, if it was alive.
    """
    status, begin = 0, time.monotonic()
    with contextlib.suppress(ChildProcessError):
        while (passed := time.monotonic() - begin) < _GIVE_UP_S:
            # Only this process collects its children, so no number can be another process's by now.
            for pid in children():
                with contextlib.suppress(OSError):
                    if passed > _TRACKER_S or not is_tracker(pid):
                        os.kill(pid, signal.SIGKILL)
            status = reap(judge) or status
            time.sleep(_PAUSE_S)
    return status


def children() -> list[int]:
    """Living and dead, by the kernel's table of processes."""
    parent, found = str(os.getpid()).encode(), []
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError), open(f"/proc/{entry}/stat", "rb") as file:
                # The name before it may hold anything, brackets and spaces too.
                if file.read().rsplit(b")", 1)[1].split()[1] == parent:
                    found.append(int(entry))
    return found


def is_tracker(pid: int) -> bool:
    with open(f"/proc/{pid}/cmdline", "rb") as file:
        return TRACKER in file.read()


def leave(status: int) -> None:
    """End as the judge ended: that is what the waiting process is to see."""
    code = os.waitstatus_to_exitcode(status)
    if code >= 0:
        os._exit(code)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(OSError):  # SIGKILL has no action to reset
        signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)
    os._exit(1)


if __name__ == "__main__":
    main()
