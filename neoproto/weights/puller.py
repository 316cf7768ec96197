"""Reads published versions under a lease.

    acquire ──> read ──> validate ──> hand over ──(tensors are used, the lease lives)──> loaded, or release

On every way out reads stop before the lease ends: afterwards the publisher may write the memory again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import AsyncIterator, Generator
from contextlib import asynccontextmanager

from torch import Tensor

from neoproto.errors import KeyMissing, NeoProtoError, TornRead
from neoproto.store import ObjectStore
from neoproto.weights.manifest import Manifest
from neoproto.weights.reading import Selection, WeightReader, finish
from neoproto.weights.registry import Lease, WeightRegistry
from neoproto.weights.transport import Transport
from neoproto.weights.version import WeightVersion

logger = logging.getLogger(__name__)


class Pulled:
    """A version that was read and is held by a lease.

    Attributes:
        version: which.
        tensors: by name, in the model's order, on the CPU. Tied ones share memory. On the publisher's host
            they are views of its slot: copy what is to be kept, and drop the rest with the lease.
    """

    def __init__(self, tensors: dict[str, Tensor], lease: _HeldLease) -> None:
        self.tensors = tensors
        self._lease = lease

    @property
    def version(self) -> WeightVersion:
        return self._lease.lease.version

    @property
    def manifest(self) -> Manifest:
        """What was published."""
        return self._lease.lease.manifest

    async def check(self) -> None:
        """Ask the registry whether the lease has lived until now: call it when the tensors were used.

        Raises:
            TornRead: it lapsed; what was read, or made of it, cannot be verified any more.
        """
        await self._lease.check()

    async def loaded(self, replica: str) -> None:
        """`check`, and have the registry note that `replica` serves the version: one message.

        The lease ends with it: nothing may read the tensors any more.

        Raises:
            TornRead: it lapsed; what was loaded must not be served.
        """
        await self._lease.loaded(replica)


class _HeldLease:
    """A lease of this process, renewed every third of its time until it ends."""

    def __init__(self, registry: WeightRegistry, lease: Lease) -> None:
        self.lease = lease
        self._registry = registry
        self._ended = False
        self._failure: NeoProtoError | None = None
        self._renewing = asyncio.create_task(self._renew(), name=f"lease on weights {lease.version}")

    async def check(self) -> None:
        if self._failure is not None or not await self._registry.validate(self.lease.lease_id):
            raise self._torn() from self._failure

    async def loaded(self, replica: str) -> None:
        # Renewals stop first: the registry refuses one that comes after the end of the lease. Two thirds of
        # the lease are left for this message.
        await self._stop_renewing()
        if self._failure is not None or not await self._registry.loaded(self.lease.lease_id, replica):
            raise self._torn() from self._failure
        self._ended = True

    async def end(self, *, quietly: bool) -> None:
        """Release the lease, unless `loaded` has ended it.

        Args:
            quietly: a registry that cannot be reached is only logged.
        """
        await self._stop_renewing()
        if self._ended:
            return
        try:
            await self._registry.release(self.lease.lease_id)
        except NeoProtoError as error:
            if not quietly:
                raise
            logger.warning("lease %s is left to lapse: %s", self.lease.lease_id, error)

    async def _stop_renewing(self) -> None:
        self._renewing.cancel()
        await asyncio.wait([self._renewing])

    async def _renew(self) -> None:
        try:
            while True:
                await asyncio.sleep(self.lease.ttl / 3)
                await self._registry.renew(self.lease.lease_id)
        except NeoProtoError as error:
            self._failure = error

    def _torn(self) -> TornRead:
        lease = self.lease
        what = f"the lease of {lease.holder} on weights {lease.version}"
        return TornRead(f"{what} lapsed, {lease.ttl} s after its last renewal")


class Puller:
    """Pulls versions of one model for one replica.

    The first version fixes the layout; a later one with other names, shapes or dtypes is refused before
    anything is read.

    Args:
        store: where the bytes are.
        registry: which versions there are.
        holder: the replica, as others shall see it.
        ttl: seconds after which a lease lapses if this process is gone or stuck.
        transport: how the bytes come, see `make_transport`; None is through the store.
    """

    def __init__(
        self,
        store: ObjectStore,
        registry: WeightRegistry,
        holder: str,
        ttl: float = 30.0,
        *,
        transport: Transport | None = None,
    ) -> None:
        self._registry, self._holder, self._ttl = registry, holder, ttl
        self._reader = WeightReader(store, transport)

    @asynccontextmanager
    async def pull(
        self,
        version: WeightVersion | None = None,
        *,
        select: Selection | None = None,
        min_version: WeightVersion | None = None,
    ) -> AsyncIterator[Pulled]:
        """Lease a version, or the latest, and read it; the lease lasts as long as the block.

        Args:
            select: the tensors wanted, and which part of each; nothing else is read. None is everything.
            min_version: an older one is refused.

        Raises:
            WeightsNotReady: it is not published yet, or retired, or older than `min_version`.
            TornRead: the lease lapsed during the read.
            WeightMismatch: its layout is not that of the versions before; names what differs.
        """
        lease = _HeldLease(
            self._registry,
            await self._registry.acquire(self._holder, version, ttl=self._ttl, min_version=min_version),
        )
        try:
            pulled = Pulled(await self._read(lease, select), lease)
            await pulled.check()
            yield pulled
        except BaseException:
            await lease.end(quietly=True)
            raise
        await lease.end(quietly=False)

    async def _read(self, lease: _HeldLease, select: Selection | None) -> dict[str, Tensor]:
        """Read; when this is cancelled, the read has ended before it returns."""
        stop = threading.Event()
        reading = self._reader.reading(lease.lease.manifest, select)
        work = asyncio.ensure_future(self._finish(reading, stop))
        try:
            return await asyncio.shield(work)
        except KeyMissing:
            await lease.check()  # gone because the lease lapsed, most likely
            raise
        except asyncio.CancelledError:
            # A thread cannot be cancelled: it is told to stop and waited for, however often we are cancelled.
            stop.set()
            while not work.done():
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.wait([work])
            work.exception()  # looked at, so that asyncio does not warn of it
            raise

    async def _finish(
        self, reading: Generator[None, None, dict[str, Tensor]], stop: threading.Event
    ) -> dict[str, Tensor]:
        """On a thread: the store blocks, and reading may be long."""
        return await asyncio.to_thread(finish, reading, stop)
