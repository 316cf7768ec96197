"""How a worker's death is noticed: a pidfd for each process on this machine, Monarch's supervision for all.

pidfd readable ──> "gone" at once ──> cause from the kernel, or from supervision within PATIENCE_S
fault hook / __supervise__ ──> (group, rank, cause)
stopped (SIGSTOP, a debugger) for too long ──> SIGKILL, and so a death like any other

A stopped process neither dies nor answers: without the last line, a caller would wait for the
deadline of its call.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from meshes.common import procs
from meshes.common.warm_stub import exit_status

OnDeath = Callable[[str, int, str | None], None]

PATIENCE_S = 2.5
"""How long the cause of a known death is waited for."""
LOOK_S = 1.0
"""How often processes are looked at that may have been stopped."""


@dataclass(kw_only=True, slots=True, eq=False)
class _Watched:
    key: str
    rank: int
    pid: int
    pidfd: int
    give_up_at: float | None = None
    may_kill: bool = True
    stopped_s: float = 0.0
    cause: str | None = None


class DeathWatch:
    """One thread that watches the processes of this machine.

    Args:
        on_death: called with (key, rank, cause); the cause is None as long as only the death is known.
        stopped_timeout_s: how long a process may be stopped by a signal before it is killed.
    """

    def __init__(self, on_death: OnDeath, *, stopped_timeout_s: float = 10.0) -> None:
        self._on_death, self._stopped_timeout_s = on_death, stopped_timeout_s
        self._lock = threading.Lock()
        self._watched: dict[int, _Watched] = {}
        self._wake_read, self._wake_write = os.pipe()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="neoproto-deaths", daemon=True)
        self._thread.start()

    def watch(self, key: str, rank: int, pid: int, *, may_kill: bool = True) -> None:
        """Report when a process of this machine ends; one that already has is reported at once.

        Args:
            may_kill: whether one that stays stopped is killed; if not, that it is stopped is reported.
        """
        try:
            pidfd = os.pidfd_open(pid)
        except ProcessLookupError:
            self._on_death(key, rank, "ended before it was watched")
            return
        except OSError:
            return  # no pidfds on this kernel: supervision alone reports the death
        with self._lock:
            self._watched[pidfd] = _Watched(key=key, rank=rank, pid=pid, pidfd=pidfd, may_kill=may_kill)
        self._wake()

    def forget(self, key: str) -> None:
        """Stop watching a group, whose processes are about to be released."""
        with self._lock:
            gone = [one for one in self._watched.values() if one.key == key]
            for one in gone:
                del self._watched[one.pidfd]
                os.close(one.pidfd)
        self._wake()

    def report_cause(self, key: str, rank: int, cause: str) -> None:
        """Supervision's word on a death, wherever the process was."""
        with self._lock:
            waiting = [one for one in self._watched.values() if (one.key, one.rank) == (key, rank)]
            for one in waiting:
                del self._watched[one.pidfd]
                os.close(one.pidfd)
                cause = one.cause or cause
        self._on_death(key, rank, cause)
        self._wake()

    def close(self) -> None:
        """End the thread."""
        with self._lock:
            self._closed = True
        self._wake()
        self._thread.join(timeout=2.0)
        with self._lock:
            for one in self._watched.values():
                os.close(one.pidfd)
            self._watched.clear()
        os.close(self._wake_read)
        os.close(self._wake_write)

    def _wake(self) -> None:
        with contextlib.suppress(OSError):
            os.write(self._wake_write, b"x")

    def _run(self) -> None:
        looked = time.monotonic()
        while True:
            with self._lock:
                if self._closed:
                    return
                running = [one for one in self._watched.values() if one.give_up_at is None]
                ended = [one for one in self._watched.values() if one.give_up_at is not None]
                poll = select.poll()
                poll.register(self._wake_read, select.POLLIN)
                for one in running:
                    poll.register(one.pidfd, select.POLLIN)
            for number, _ in poll.poll(20 if ended else LOOK_S * 1000 if running else None):
                if number == self._wake_read:
                    os.read(self._wake_read, 4096)
                else:
                    self._process_ended(number)
            for one in ended:
                self._look_for_cause(one)
            if (since := time.monotonic() - looked) >= LOOK_S:
                looked = time.monotonic()
                # Were this process stopped as well, its time until then tells nothing about the others.
                self._look_for_stopped(min(since, 2 * LOOK_S))

    def _look_for_stopped(self, seconds: float) -> None:
        """Count the seconds since the last look for processes that are stopped, and kill in the end."""
        left_stopped: list[_Watched] = []
        with self._lock:
            for one in list(self._watched.values()):
                if one.give_up_at is not None or one.cause is not None:
                    continue
                one.stopped_s = one.stopped_s + seconds if procs.is_stopped(one.pid) else 0.0
                if one.stopped_s < self._stopped_timeout_s:
                    continue
                one.cause = f"stopped by a signal for {one.stopped_s:.1f} s"
                if not one.may_kill:
                    del self._watched[one.pidfd]
                    os.close(one.pidfd)
                    left_stopped.append(one)
                    continue
                one.cause += ", then killed"
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(one.pidfd, signal.SIGKILL)
        for one in left_stopped:
            self._on_death(one.key, one.rank, one.cause)

    def _process_ended(self, pidfd: int) -> None:
        with self._lock:
            one = self._watched.get(pidfd)
            if one is None:
                return
            one.give_up_at = time.monotonic() + PATIENCE_S
        self._on_death(one.key, one.rank, None)
        self._look_for_cause(one)

    def _look_for_cause(self, one: _Watched) -> None:
        with self._lock:
            if one.pidfd not in self._watched:
                return
            cause = one.cause or exit_cause(one.pidfd)
            if cause is None and one.give_up_at is not None and time.monotonic() < one.give_up_at:
                return
            del self._watched[one.pidfd]
            os.close(one.pidfd)
        self._on_death(one.key, one.rank, cause or "the process ended; neither exit code nor signal is known")


def exit_cause(pidfd: int) -> str | None:
    """How a process that was reaped elsewhere ended, where the kernel tells; else None."""
    status = exit_status(pidfd)
    return None if status is None else describe_status(status)


def describe_status(status: int) -> str:
    """A wait status in words: "exit code 1", "signal 9 (SIGKILL)"."""
    if os.WIFSIGNALED(status):
        return describe_signal(os.WTERMSIG(status))
    return f"exit code {os.WEXITSTATUS(status)}"


def describe_signal(number: int) -> str:
    """A signal in words, with its number."""
    with contextlib.suppress(ValueError):
        return f"signal {number} ({signal.Signals(number).name})"
    return f"signal {number}"
