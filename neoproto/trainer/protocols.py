"""What the trainer knows of the workers: groups that take calls with a deadline, nothing more."""

from __future__ import annotations

from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol


class Group(Protocol):
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
    ) -> Awaitable[Any]:
        """Start `method` on the group; the deadline is fixed now, `timeout` seconds ahead."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Workers:
    """The groups of one run. `critic` and `reference` exist when the algorithm needs them."""

    rollout: Group
    reward: Group
    actor: Group
    critic: Group | None = None
    reference: Group | None = None

    @property
    def num_devices(self) -> int:
        """Devices that throughput is divided by; colocated groups share theirs."""
        return max(group.world_size for group in (self.rollout, self.actor, self.critic) if group is not None)
