"""How this process reaches a group: directly where the group is owned, through the owner elsewhere.

    the run's root:   LocalLink ──────────────> CallTracker ──> containers
    a worker:         RelayedLink (attached.py) ──> the root's relay server ──> CallTracker ──> containers

All calls of a run pass through one `CallTracker`, which is what gives sync methods one order on all ranks,
whoever sends, and every sender the same word on deaths, deadlines and closed groups.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn, Protocol

from neoproto.errors import RuntimeClosed
from neoproto.runtime.call import RemoteCall
from neoproto.runtime.call_tracker import CallTracker, Submission
from neoproto.runtime.group_state import GroupState

MESHES_TIMEOUT_S = 30.0

Find = Callable[[str, str, int], "Link"]
"""(key, name, world size) of a group that arrived here by pickle → how to reach it."""


class Link(Protocol):
    """The way to a group's ranks."""

    @property
    def key(self) -> str: ...

    @property
    def name(self) -> str: ...

    @property
    def world_size(self) -> int: ...

    @property
    def native(self) -> Any: ...

    def start(self, submission: Submission) -> RemoteCall[Any]:
        """Start a call."""
        ...

    def mesh_ranks(self, role: str) -> Sequence[dict[str, tuple[int, bool]]]:
        """What the workers told `Worker.register_mesh`, by rank."""
        ...


class LocalLink:
    """To a group whose processes belong to this process's runtime."""

    def __init__(self, state: GroupState, tracker: CallTracker) -> None:
        self.state, self._tracker = state, tracker

    @property
    def key(self) -> str:
        return self.state.key

    @property
    def name(self) -> str:
        return self.state.name

    @property
    def world_size(self) -> int:
        return self.state.world_size

    @property
    def native(self) -> Any:
        return self.state.processes.native

    def start(self, submission: Submission) -> RemoteCall[Any]:
        return self._tracker.start(self.state, submission)

    def mesh_ranks(self, role: str) -> Sequence[dict[str, tuple[int, bool]]]:
        return self.state.processes.meshes(role, MESHES_TIMEOUT_S)


class ClosedLink:
    """To a group that is not there: every use raises `RuntimeClosed`."""

    native = None

    def __init__(self, key: str, name: str, world_size: int) -> None:
        self.key, self.name, self.world_size = key, name, world_size

    def start(self, _: Submission) -> NoReturn:
        raise RuntimeClosed(f"worker group {self.name} has been closed")

    def mesh_ranks(self, _: str) -> NoReturn:
        raise RuntimeClosed(f"worker group {self.name} has been closed")


_find: Find | None = None


def set_finder(find: Find | None) -> None:
    """Say how this process reaches groups that arrive by pickle; None: it reaches none."""
    global _find
    _find = find


def find_link(key: str, name: str, world_size: int) -> Link:
    """The way to a group that arrived here by pickle."""
    return ClosedLink(key, name, world_size) if _find is None else _find(key, name, world_size)
