"""Pulls published versions: reads them under a lease, whole tensors or slices of them.

    acquire ──> read ──> validate ──> hand over ──(tensors are used, the lease lives)──> loaded, or release

On every way out reads stop before the lease ends: afterwards the publisher may write the memory again.

                          ┌─ bucket that can be mapped, or whole tensors wanted: the bucket, and views of it
    entry ──> its pieces ─┤
                          └─ else: the bytes of the slice, and no others

A tensor in one piece is a view; one that several hosts wrote is put together in memory of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import threading
from collections.abc import AsyncIterator, Generator, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from neoproto.errors import KeyMissing, NeoProtoError, TornRead, WeightMismatch
from neoproto.store import ObjectStore
from neoproto.weights.manifest import Box, Entry, Manifest, Piece, TensorLayout, check_layout, piece_view
from neoproto.weights.registry import Lease, WeightRegistry
from neoproto.weights.transports import Transport
from neoproto.weights.transports.store import StoreTransport
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
            # A thread cannot be cancelled: it is asked to stop and waited for, at every cancellation.
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


T = TypeVar("T")

_RANGES = 1024
"""Ranges of bytes that are asked for at a time."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Slice:
    """A part of a tensor: `start` to `stop` (not included) along `dim`; what a tensor-parallel rank needs."""

    dim: int
    start: int
    stop: int


Selection = Mapping[str, Slice | None]
"""Which tensors are wanted, and which part of each; None is all of it."""


class ReadStopped(Exception):
    """A read was stopped before it was complete."""


class WeightReader:
    """Reads versions of one model. Knows nothing of leases: see `Puller`.

    The first version fixes the layout; a later one with other names, shapes or dtypes is refused before
    anything is read.
    """

    def __init__(self, store: ObjectStore, transport: Transport | None = None) -> None:
        self._transport = transport or StoreTransport(store)
        self._layout: dict[str, TensorLayout] | None = None

    def read(
        self, manifest: Manifest, stop: threading.Event | None = None, *, select: Selection | None = None
    ) -> dict[str, Tensor]:
        """The version's tensors by name, in the model's order, on the CPU.

        They may be views of the buckets read; names that were tied share memory if they are wanted alike.

        Args:
            stop: read nothing more once it is set.
            select: the tensors wanted, or parts of them; None is everything.

        Raises:
            WeightMismatch: the layout is not that of the versions before, a selection does not fit it, or a
                bucket's size is not the manifest's.
            KeyMissing: the version is gone from the store.
            ReadStopped: `stop` was set.
        """
        return finish(self.reading(manifest, select), stop)

    def reading(
        self, manifest: Manifest, select: Selection | None = None
    ) -> Generator[None, None, dict[str, Tensor]]:
        """`read`, step by step: a step is one access to the store."""
        layout = manifest.layout()
        if self._layout is not None:
            check_layout(layout, self._layout, what=f"weights {manifest.version}")
        parts = _parts(manifest, select)
        reading = _Reading(self._transport, manifest, whole=select is None)
        found: dict[tuple[tuple[Piece, ...], Box], Tensor] = {}
        tensors: dict[str, Tensor] = {}
        for entry, part in parts:
            key = (entry.pieces, part)
            if key not in found or not entry.pieces:
                found[key] = yield from reading.part(entry, part)
            tensors[entry.name] = found[key]
        self._layout = layout
        return tensors


def finish(reading: Generator[None, None, T], stop: threading.Event | None = None) -> T:
    """Run a read to its end.

    Raises:
        ReadStopped: `stop` was set.
    """
    while True:
        if stop is not None and stop.is_set():
            raise ReadStopped
        try:
            next(reading)
        except StopIteration as end:
            value: T = end.value
            return value


class _Reading:
    """One read of one version. Its methods are generators that yield before each access to the store.

    So a cancelled pull stops between two accesses (`finish`), and a property test lets publishers, lapses and
    crashes happen between any two (`tests/neoproto/weights/test_schedules.py`).
    """

    def __init__(self, transport: Transport, manifest: Manifest, *, whole: bool) -> None:
        self._transport, self._manifest, self._whole = transport, manifest, whole
        self._buckets: dict[int, Tensor] = {}

    def part(self, entry: Entry, part: Box) -> Generator[None, None, Tensor]:
        """A part of a tensor: a view where one piece holds it, else put together."""
        dtype = entry.layout.torch_dtype
        overlaps = [(piece, part.overlap(piece.box)) for piece in entry.pieces]
        wanted = [(piece, box) for piece, box in overlaps if box is not None]
        if len(wanted) == 1 and wanted[0][1] == part:
            return (yield from self._box(wanted[0][0], part, dtype))
        if sum(box.numel for _, box in wanted) != part.numel:
            raise WeightMismatch(f"weights {self._manifest.version}: {entry.name} is not complete")
        tensor = torch.empty(part.shape, dtype=dtype)
        for piece, box in wanted:
            found = yield from self._box(piece, box, dtype)
            box.inside(part).of(tensor).copy_(found)
        return tensor

    def _box(self, piece: Piece, box: Box, dtype: torch.dtype) -> Generator[None, None, Tensor]:
        inner = box.inside(piece.box)
        bucket = self._manifest.buckets[piece.bucket]
        if self._whole or piece.bucket in self._buckets or self._transport.maps(bucket):
            found = yield from self._bucket(piece.bucket)
            return inner.of(piece_view(found, dtype, piece))
        ranges = list(byte_ranges(piece, inner, dtype.itemsize))
        data = torch.empty(box.numel * dtype.itemsize, dtype=torch.uint8)
        end = 0
        for first in range(0, len(ranges), _RANGES):
            yield
            for got in self._transport.read(bucket, ranges[first : first + _RANGES]):
                data[end : end + got.numel()] = got
                end += got.numel()
        return data.view(dtype).view(box.shape)

    def _bucket(self, index: int) -> Generator[None, None, Tensor]:
        if index not in self._buckets:
            key, size = self._manifest.buckets[index], self._manifest.bucket_bytes[index]
            yield
            (bucket,) = self._transport.read(key)
            if bucket.numel() != size:
                name = key if isinstance(key, str) else key.key
                raise WeightMismatch(f"bucket {name} has {bucket.numel()} bytes, its manifest says {size}")
            self._buckets[index] = bucket
        return self._buckets[index]


def byte_ranges(piece: Piece, inner: Box, itemsize: int) -> Iterator[range]:
    """The ranges of bytes of a bucket that hold a part of a piece, in the part's row-major order.

    Args:
        inner: the part, in the piece's coordinates.
    """
    shape = piece.box.shape
    # Up to the last dimension that is cut, whatever follows lies together.
    cut = max((dim for dim, size in enumerate(inner.shape) if size != shape[dim]), default=-1)
    outer = cut if cut >= 0 else 0
    run = math.prod(inner.shape[outer:])
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    base = sum(start * stride for start, stride in zip(inner.start, strides, strict=True))
    for number in range(math.prod(inner.shape[:outer])):
        first = base
        for dim in range(outer - 1, -1, -1):
            number, at = divmod(number, inner.shape[dim])
            first += at * strides[dim]
        begin = piece.offset + first * itemsize
        yield range(begin, begin + run * itemsize)


def _parts(manifest: Manifest, select: Selection | None) -> list[tuple[Entry, Box]]:
    """What is wanted of each tensor.

    Raises:
        WeightMismatch: a name that the version does not have, or a slice outside its tensor.
    """
    if select is None:
        return [(entry, Box.whole(entry.shape)) for entry in manifest]
    unknown = sorted(select.keys() - manifest.layout().keys())
    if unknown:
        raise WeightMismatch(f"weights {manifest.version} have no {', '.join(unknown[:8])}")
    parts = []
    for entry in manifest:
        if entry.name not in select:
            continue
        wanted, box = select[entry.name], Box.whole(entry.shape)
        if wanted is not None:
            dim, start, stop = wanted.dim, wanted.start, wanted.stop
            if not (0 <= dim < len(entry.shape) and 0 <= start <= stop <= entry.shape[dim]):
                raise WeightMismatch(f"{entry.name} is {entry.layout}, it has no {wanted}")
            starts, shape = list(box.start), list(box.shape)
            starts[dim], shape[dim] = start, stop - start
            box = Box(start=tuple(starts), shape=tuple(shape))
        parts.append((entry, box))
    return parts
