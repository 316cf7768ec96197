"""What the trainer knows of the workers: groups that take calls with a deadline, nothing more."""

from __future__ import annotations

from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol


class Call(Awaitable[Any], Protocol):
    """A call under way."""

    def cancel(self) -> Any:
        """Ask the worker to stop an async method; the call then ends with `CallCancelled`."""
        ...


class Callee(Protocol):
    """What takes calls: a worker group, or a set of them."""

    def submit(
        self,
        method: str,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        timeout: float | None = None,
    ) -> Awaitable[Any]:
        """Call `method`; the deadline is fixed now, `timeout` seconds ahead."""
        ...


class Group(Callee, Protocol):
    """A worker group as the trainer sees it; `neoproto.runtime.WorkerGroup` is one."""

    @property
    def name(self) -> str: ...

    @property
    def world_size(self) -> int: ...

    def submit(
        self,
        method: str,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        timeout: float | None = None,
    ) -> Call:
        """Start `method` on the group; the deadline is fixed now, `timeout` seconds ahead."""
        ...


class OwnedGroup(Group, Protocol):
    """A group whose processes its holder may release."""

    def close(self, drain_s: float) -> None:
        """Release the processes after `drain_s` seconds for what runs; blocks. Closing twice is a no-op."""
        ...


class Samplers(Protocol):
    """Who answers prompts, and who judges the answers."""

    @property
    def rollout(self) -> Callee: ...

    @property
    def reward(self) -> Callee: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Workers:
    """The groups of one run. `critic` and `reference` exist when the algorithm needs them.

    Attributes:
        num_devices: devices that throughput is divided by: all that the groups run on, rollout's too.
        rollout: all replicas as one, see `ReplicaSet`.
    """

    num_devices: int
    rollout: Callee
    reward: Group
    actor: Group
    critic: Group | None = None
    reference: Group | None = None
