"""Reads published versions under a lease.

lease ──> read ──> check the lease ──> hand over ──(the holder uses the tensors, the lease lives)──> release

Reads stop before the lease is released, on every way out.
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
from neoproto.weights.registry import Lease, Registry
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

    def __init__(self, tensors: dict[str, Tensor], keeper: _Keeper) -> None:
        self.tensors = tensors
        self._keeper = keeper

    @property
    def version(self) -> WeightVersion:
        return self._keeper.lease.version

    @property
    def manifest(self) -> Manifest:
        """What was published."""
        return self._keeper.lease.manifest

    async def check(self) -> None:
        """Ask the registry whether the lease has lived until now: call it when the tensors were used.

        Raises:
            TornRead: it lapsed; what was read, or made of it, cannot be verified any more.
        """
        await self._keeper.check()


class _Keeper:
    """Renews a lease every third of its time, until it ends."""

    def __init__(self, registry: Registry, lease: Lease) -> None:
        self.lease = lease
        self._registry = registry
        self._task: asyncio.Task[None] | None = None
        self._failure: NeoProtoError | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._renew(), name=f"lease on weights {self.lease.version}")

    async def check(self) -> None:
        if self._failure is None and await self._registry.validate(self.lease.lease_id):
            return
        lease = self.lease
        what = f"the lease of {lease.holder} on weights {lease.version}"
        raise TornRead(f"{what} lapsed, {lease.ttl} s after its last renewal") from self._failure

    async def end(self, *, quietly: bool) -> None:
        """Stop renewing and release. With `quietly` a registry that cannot be told is only logged."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        try:
            await self._registry.release(self.lease.lease_id)
        except NeoProtoError as error:
            if not quietly:
                raise
            logger.warning("lease %s is left to lapse: %s", self.lease.lease_id, error)

    async def _renew(self) -> None:
        try:
            while True:
                await asyncio.sleep(self.lease.ttl / 3)
                await self._registry.renew(self.lease.lease_id)
        except NeoProtoError as error:
            self._failure = error


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
        registry: Registry,
        holder: str,
        ttl: float = 30.0,
        *,
        transport: Transport | None = None,
    ) -> None:
        self._registry, self._holder, self._ttl = registry, holder, ttl
        self._reader = WeightReader(store, transport)

    @asynccontextmanager
    async def pull(
        self, version: WeightVersion | None = None, *, select: Selection | None = None
    ) -> AsyncIterator[Pulled]:
        """Lease a version, or the latest, and read it; the lease lasts as long as the block.

        Args:
            select: the tensors wanted, and which part of each; nothing else is read. None is everything.

        Raises:
            KeyMissing: it is not ready: not published yet, or retired.
            TornRead: the lease lapsed during the read.
            WeightMismatch: its layout is not that of the versions before; names what differs.
        """
        keeper = _Keeper(self._registry, await self._registry.acquire(self._holder, version, ttl=self._ttl))
        try:
            keeper.start()
            pulled = Pulled(await self._read(keeper, select), keeper)
            await pulled.check()
            yield pulled
        except BaseException:
            await keeper.end(quietly=True)
            raise
        await keeper.end(quietly=False)

    async def _read(self, keeper: _Keeper, select: Selection | None) -> dict[str, Tensor]:
        """Read; when this is cancelled, the read has ended before it returns."""
        stop = threading.Event()
        job = asyncio.ensure_future(self._finish(self._reader.reading(keeper.lease.manifest, select), stop))
        try:
            return await asyncio.shield(job)
        except KeyMissing:
            await keeper.check()  # gone because the lease lapsed, most likely
            raise
        except asyncio.CancelledError:
            stop.set()
            while not job.done():
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.wait([job])
            job.exception()  # looked at, so that nobody is warned of it
            raise

    async def _finish(
        self, reading: Generator[None, None, dict[str, Tensor]], stop: threading.Event
    ) -> dict[str, Tensor]:
        """On a thread: the store blocks, and reading may be long."""
        return await asyncio.to_thread(finish, reading, stop)
