"""How new weights leave the trainer: one ticket a version, with the two points that a loop may wait for.

    publish() ─> ticket ── policy ranks write, registry announces ──> published
                    └── every replica serves it ──> committed

`sync` and `separate_async` drive the second half themselves (`DrivenFlow`); in `decoupled_async` replicas do
it when they choose (`PulledFlow`), and the trainer only reads from the registry what they serve.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from neoproto.errors import WeightsNotServed
from neoproto.trainer.metrics.phases import PhaseClock
from neoproto.trainer.protocols import Workers
from neoproto.weights import WeightVersion

PHASE = "update_weights"
_GRACE_S = 5.0
"""How much later than its deadline an answer of the registry may come."""


class ServingStatus(Protocol):
    """Which replica serves which weights: a `ReplicaSet` or a weight registry."""

    async def serving(self) -> Mapping[str, WeightVersion]:
        """The version that each replica serves, by name."""
        ...

    async def wait_serving(self, replicas: Sequence[str], version: WeightVersion, timeout: float) -> bool:
        """Wait until all `replicas` serve `version` or a newer one; False when `timeout` seconds passed."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Ticket:
    """A version on its way.

    Attributes:
        version: which.
    """

    version: WeightVersion
    _flow: WeightFlow = field(repr=False)
    _publishing: asyncio.Task[Any] = field(repr=False)

    async def published(self, clock: PhaseClock) -> None:
        """Return when pullers can read it. Its failure also ends the task group of the flow."""
        await clock.wait(PHASE, asyncio.shield(self._publishing))

    async def committed(self, clock: PhaseClock, limit: float | None = None) -> None:
        """Return when every replica serves this version or a newer one.

        Args:
            clock: the wait is booked there, under `update_weights`.
            limit: seconds from when it is published; None takes the flow's.

        Raises:
            DeadlineExceeded, WeightsNotServed: some replica does not, in time.
        """
        await self.published(clock)
        await self._flow.commit(self.version, clock, limit)


class WeightFlow(ABC):
    """Publishes versions in order. Subclasses define what commits one.

    Args:
        tasks: owns the publishing calls; one that fails ends it.
        limit: seconds that publishing may take, and committing too.
        first: the first version.
    """

    def __init__(
        self, workers: Workers, tasks: asyncio.TaskGroup, *, limit: float, first: WeightVersion | None = None
    ) -> None:
        self._workers, self._tasks, self._limit = workers, tasks, limit
        self._next = first or WeightVersion(epoch=0, n=0)
        self._newest: Ticket | None = None

    @property
    def newest(self) -> Ticket:
        """The ticket given out last.

        Raises:
            ValueError: none was.
        """
        if self._newest is None:
            raise ValueError("no weights were published yet")
        return self._newest

    def publish(self) -> Ticket:
        """Start publishing the policy's weights as they are now, as the next version.

        Whatever is called on the policy afterwards runs after it: its ranks run calls in the order they are
        submitted in, which also serialises versions.
        """
        version, self._next = self._next, self._next.next()
        call = self._workers.actor.within(self._limit).publish_weights(version)
        task = self._tasks.create_task(_finish(call), name=f"publish {version}")
        self._newest = Ticket(version=version, _flow=self, _publishing=task)
        return self._newest

    @abstractmethod
    async def commit(self, version: WeightVersion, clock: PhaseClock, limit: float | None = None) -> None:
        """Return when every replica serves `version` or a newer one."""


class DrivenFlow(WeightFlow):
    """The trainer has all replicas load at once: each stops, pulls, loads and resumes.

    The first version is loaded by the supervisor instead, in each replica as it comes up.
    """

    _committed: WeightVersion | None = None

    async def commit(self, version: WeightVersion, clock: PhaseClock, limit: float | None = None) -> None:
        if self._committed is None or version > self._committed:
            rollout = self._workers.rollout.within(limit or self._limit)
            await clock.wait(PHASE, rollout.update_weights(version))
            self._committed = version


class PulledFlow(WeightFlow):
    """Replicas pull by themselves; the trainer calls none of them."""

    def __init__(
        self,
        workers: Workers,
        tasks: asyncio.TaskGroup,
        status: ServingStatus,
        replicas: Sequence[str],
        *,
        limit: float,
        first: WeightVersion | None = None,
    ) -> None:
        super().__init__(workers, tasks, limit=limit, first=first)
        self._status, self._replicas = status, tuple(replicas)

    async def commit(self, version: WeightVersion, clock: PhaseClock, limit: float | None = None) -> None:
        seconds = limit or self._limit
        async with asyncio.timeout(seconds + _GRACE_S):
            served = await clock.wait(PHASE, self._status.wait_serving(self._replicas, version, seconds))
        if not served:
            raise WeightsNotServed(
                f"weights {version} are not served by all of {', '.join(self._replicas)} after {seconds:g} s"
            )


async def _finish(call: Any) -> Any:
    return await call
