"""The process that hosts a run's weight registry, and how others reach it.

RegistryWorker (own process) ── LocalRegistry
      ▲ calls with a deadline
GroupRegistry: awaited, by update agents and the controller      BlockingRegistry: by publishers' threads
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from neoproto.runtime import Dispatch, Worker, register
from neoproto.weights.manifest import Manifest
from neoproto.weights.registry import Lease, LeaseInfo, LocalRegistry, RegistryState
from neoproto.weights.version import WeightVersion

CALL_TIMEOUT_S = 30.0
"""What an answer of the registry may take, apart from what it was asked to wait for."""


class RegistryWorker(Worker):
    """Hosts the registry; methods as in `neoproto.weights.registry.Registry`. One rank, and nothing else in
    its process, so that it can be lost alone."""

    def __init__(self) -> None:
        self._registry = LocalRegistry()

    @register(dispatch_mode=Dispatch.RANK_ZERO)
    async def publish(self, manifest: Manifest) -> None:
        """See `WeightRegistry.publish`, and so on for all below."""
        await self._registry.publish(manifest)

    @register(dispatch_mode=Dispatch.RANK_ZERO)
    async def latest(self) -> Manifest | None:
        return await self._registry.latest()

    @register(dispatch_mode=Dispatch.RANK_ZERO)
    async def retire(self, version: WeightVersion) -> None:
        await self._registry.retire(version)

    @register(dispatch_mode=Dispatch.RANK_ZERO)
    async def reclaim(self, version: WeightVersion) -> bool:
        return await self._registry.reclaim(version)

    @register(dispatch_mode=Dispatch.RANK_ZERO)
    async def holders(self, version: WeightVersion) -> tuple[LeaseInfo, ...]:
        return await self._registry.holders(version)

    @register(dispatch_mode=Dispatch.RANK_ZERO)
    async def acquire(self, holder: str, version: WeightVersion | None, ttl: float) -> Lease:
        return await self._registry.acquire(holder, version, ttl=ttl)

    @register(dispatch_mode=Dispatch.RANK_ZERO)
    async def renew(self, lease_id: str) -> None:
        await self._registry.renew(lease_id)

    @register(dispatch_mode=Dispatch.RANK_ZERO)
    async def validate(self, lease_id: str) -> bool:
        return await self._registry.validate(lease_id)

    @register(dispatch_mode=Dispatch.RANK_ZERO)
    async def release(self, lease_id: str) -> bool:
        return await self._registry.release(lease_id)

    @register(dispatch_mode=Dispatch.RANK_ZERO)
    async def report_serving(self, replica: str, version: WeightVersion) -> None:
        await self._registry.report_serving(replica, version)

    @register(dispatch_mode=Dispatch.RANK_ZERO)
    async def forget_replica(self, replica: str) -> None:
        await self._registry.forget_replica(replica)

    @register(dispatch_mode=Dispatch.RANK_ZERO)
    async def serving(self) -> dict[str, WeightVersion]:
        return await self._registry.serving()

    @register(dispatch_mode=Dispatch.RANK_ZERO)
    async def state(self) -> RegistryState:
        return await self._registry.state()

    @register(dispatch_mode=Dispatch.RANK_ZERO)
    async def wait_newer(self, than: WeightVersion | None, timeout: float) -> WeightVersion | None:
        return await self._registry.wait_newer(than, timeout)

    @register(dispatch_mode=Dispatch.RANK_ZERO)
    async def wanted(self) -> WeightVersion | None:
        return await self._registry.wanted()

    @register(dispatch_mode=Dispatch.RANK_ZERO)
    async def wait_serving(self, replicas: Sequence[str], version: WeightVersion, timeout: float) -> bool:
        return await self._registry.wait_serving(replicas, version, timeout)

    @register(dispatch_mode=Dispatch.RANK_ZERO)
    async def wait_reclaimed(self, version: WeightVersion, timeout: float) -> tuple[LeaseInfo, ...]:
        return await self._registry.wait_reclaimed(version, timeout)


class Group(Protocol):
    """The registry's worker group as seen from here; a `RemoteWorkerGroup` is one."""

    def submit(
        self,
        method: str,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        timeout: float | None = None,
    ) -> Any:
        """A `RemoteCall`."""
        ...


class GroupRegistry:
    """The registry of a worker group, as a `Registry`. Every call has an absolute deadline.

    Args:
        group: of one `RegistryWorker`.
        timeout: seconds an answer may take; what a method waits for on purpose is added.

    Raises (all methods):
        DeadlineExceeded, WorkerDied, RuntimeClosed: the registry did not answer, or is gone.
    """

    def __init__(self, group: Group, timeout: float = CALL_TIMEOUT_S) -> None:
        self._group, self._timeout = group, timeout

    async def publish(self, manifest: Manifest) -> None:
        await self._call("publish", manifest)

    async def latest(self) -> Manifest | None:
        found: Manifest | None = await self._call("latest")
        return found

    async def retire(self, version: WeightVersion) -> None:
        await self._call("retire", version)

    async def reclaim(self, version: WeightVersion) -> bool:
        return bool(await self._call("reclaim", version))

    async def holders(self, version: WeightVersion) -> tuple[LeaseInfo, ...]:
        found: tuple[LeaseInfo, ...] = await self._call("holders", version)
        return found

    async def acquire(self, holder: str, version: WeightVersion | None = None, *, ttl: float) -> Lease:
        lease: Lease = await self._call("acquire", holder, version, ttl)
        return lease

    async def renew(self, lease_id: str) -> None:
        await self._call("renew", lease_id)

    async def validate(self, lease_id: str) -> bool:
        return bool(await self._call("validate", lease_id))

    async def release(self, lease_id: str) -> bool:
        return bool(await self._call("release", lease_id))

    async def report_serving(self, replica: str, version: WeightVersion) -> None:
        await self._call("report_serving", replica, version)

    async def forget_replica(self, replica: str) -> None:
        await self._call("forget_replica", replica)

    async def serving(self) -> dict[str, WeightVersion]:
        found: dict[str, WeightVersion] = await self._call("serving")
        return found

    async def state(self) -> RegistryState:
        found: RegistryState = await self._call("state")
        return found

    async def wait_newer(self, than: WeightVersion | None, timeout: float) -> WeightVersion | None:
        found: WeightVersion | None = await self._call("wait_newer", than, timeout, waits=timeout)
        return found

    async def wanted(self) -> WeightVersion | None:
        found: WeightVersion | None = await self._call("wanted")
        return found

    async def wait_serving(self, replicas: Sequence[str], version: WeightVersion, timeout: float) -> bool:
        return bool(await self._call("wait_serving", tuple(replicas), version, timeout, waits=timeout))

    async def wait_reclaimed(self, version: WeightVersion, timeout: float) -> tuple[LeaseInfo, ...]:
        left: tuple[LeaseInfo, ...] = await self._call("wait_reclaimed", version, timeout, waits=timeout)
        return left

    async def _call(self, method: str, *args: Any, waits: float = 0.0) -> Any:
        call = self._group.submit(method, args, timeout=self._timeout + waits)
        try:
            return await call
        except asyncio.CancelledError:
            call.cancel()  # else a long wait would go on in the registry's process
            raise


class BlockingRegistry:
    """What a publisher needs of the registry, for a thread that may block; see `PublishingRegistry`.

    Args, Raises: as `GroupRegistry`.
    """

    def __init__(self, group: Group, timeout: float = CALL_TIMEOUT_S) -> None:
        self._group, self._timeout = group, timeout

    def publish(self, manifest: Manifest) -> None:
        self._group.submit("publish", (manifest,), timeout=self._timeout).result()

    def retire(self, version: WeightVersion) -> None:
        self._group.submit("retire", (version,), timeout=self._timeout).result()

    def wait_reclaimed(self, version: WeightVersion, timeout: float) -> tuple[LeaseInfo, ...]:
        call = self._group.submit("wait_reclaimed", (version, timeout), timeout=self._timeout + timeout)
        left: tuple[LeaseInfo, ...] = call.result()
        return left
