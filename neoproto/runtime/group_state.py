"""The state of a group, as this process knows it: which ranks live, whose turn it is, are calls taken."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from neoproto.errors import GroupBroken, RuntimeClosed, WorkerDied
from neoproto.files import is_full
from neoproto.runtime.backend import ProcessGroup
from neoproto.runtime.wire import GroupRef

LOG_TAIL_LINES = 20


class GroupState:
    """State of one group's processes, shared by the group and its views.

    Attributes:
        key, name: the group.
        processes: the backend's handle.
        closing: held while the processes are released.
    """

    def __init__(self, key: str, name: str, processes: ProcessGroup, log_dir: Path) -> None:
        self.key, self.name, self.processes = key, name, processes
        self.log_dir = log_dir
        self.closing = threading.Lock()
        # Writers take the lock. Readers do without: each field only ever goes one way (living → dying → dead,
        # open → broken, open → closed), so a late look is one that came a moment earlier.
        self._lock = threading.Lock()
        self._turns = [0] * len(processes.processes)
        self._deaths: dict[int, WorkerDied] = {}
        self._dying: set[int] = set()
        self._broken: str | None = None
        self._closed: str | None = None

    @property
    def world_size(self) -> int:
        return len(self._turns)

    @property
    def ref(self) -> GroupRef:
        """What names the group in other processes."""
        return GroupRef(key=self.key, name=self.name, world_size=self.world_size)

    def admit(self, ranks: Iterable[int]) -> bool:
        """Whether a call to `ranks` may be sent; False if one is dying and the cause is not yet known.

        Raises:
            RuntimeClosed, GroupBroken, WorkerDied: it may not.
        """
        if self._closed is not None:
            raise RuntimeClosed(self._closed)
        if self._broken is not None:
            raise GroupBroken(self._broken)
        if not self._dying:
            return True
        for rank in ranks:
            if rank in self._deaths:
                raise self._deaths[rank]
        return not self.is_dying(ranks)

    def take_turns(self, ranks: Sequence[int]) -> tuple[int | tuple[int, ...], tuple[int, ...] | None]:
        """The next turn of each rank in its order of sync calls: one number if all have the same."""
        with self._lock:  # of all ranks in one go: two calls must not have opposite orders on two ranks
            taken = tuple(self._turns[rank] for rank in ranks)
            for rank in ranks:
                self._turns[rank] += 1
        if all(turn == taken[0] for turn in taken):
            return taken[0], None
        return taken, tuple(ranks)

    def mark_dying(self, rank: int) -> bool:
        """Note that a rank's process is gone; False if that was known."""
        with self._lock:
            if rank in self._dying or self._closed is not None:
                return False
            self._dying.add(rank)
            return True

    def is_dying(self, ranks: Iterable[int]) -> bool:
        """Whether the process of one of `ranks` is known to be gone."""
        return any(rank in self._dying for rank in ranks)

    def mark_dead(self, rank: int, cause: str) -> None:
        """Note why. From now on calls to it are refused."""
        host = self.processes.processes[rank].host
        if is_full(self.log_dir):
            cause += f"; {self.log_dir}: {os.strerror(errno.ENOSPC)}"
        death = WorkerDied(self.name, rank, host, cause, self.log_tail(rank))
        with self._lock:
            self._dying.add(rank)
            self._deaths.setdefault(rank, death)

    def death_of(self, rank: int) -> WorkerDied:
        """How a rank ended."""
        return self._deaths[rank]

    @property
    def deaths(self) -> Mapping[int, WorkerDied]:
        """How ranks ended, of those that have."""
        return self._deaths

    def living(self) -> list[int]:
        """Ranks not known to be dead."""
        return [rank for rank in range(self.world_size) if rank not in self._dying]

    @property
    def broken(self) -> str | None:
        """Why the group refuses calls, if it does."""
        return self._broken

    def mark_broken(self, reason: str) -> None:
        """Refuse calls from now on."""
        with self._lock:
            self._broken = self._broken or reason

    @property
    def closed(self) -> str | None:
        """Why the group takes no calls any more, if it has been closed."""
        return self._closed

    def mark_closed(self, reason: str) -> bool:
        """Refuse calls from now on; False if it was closed."""
        with self._lock:
            if self._closed is not None:
                return False
            self._closed = reason
            return True

    def log_tail(self, rank: int, lines: int = LOG_TAIL_LINES) -> str:
        """The last lines a rank has written, if its log is on this machine."""
        return log_tail(self.log_dir / f"rank{rank}.log", lines)


def log_tail(path: Path, lines: int = LOG_TAIL_LINES) -> str:
    """The last lines of a file; "" if there is none."""
    try:
        with path.open("rb") as file:
            file.seek(0, 2)
            file.seek(max(0, file.tell() - 200 * lines))
            text: Sequence[str] = file.read().decode(errors="replace").splitlines()
    except OSError:
        return ""
    return "\n".join(text[-lines:])
