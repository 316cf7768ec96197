"""Values that their writer makes in place: no copy of its own is put.

    create ──> UnsealedBatch: memory, written here and, by its handles, in other processes of the host
                  ├──seal────> references
                  └──abort, or the writer is gone──> taken back

A batch's values are bytes: a one-dimensional uint8 tensor each. Memory that was written before is mapped
already when it comes again, so writing it costs no page faults.
"""

from __future__ import annotations

import collections
import contextlib
import os
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from neoproto.errors import StoreError
from neoproto.store.base import Location, ObjectRef, ValueInfo
from neoproto.store.shm import Reservation, SegmentWriter, SharedVolume, map_shared, path_of
from neoproto.store.torchstore.putter import Written, new_generation
from neoproto.store.wire import DeletedValue

if TYPE_CHECKING:
    from neoproto.store.base import ObjectStore
    from neoproto.store.torchstore.client import StoreClient

_MAPPINGS = 4096


@dataclass(frozen=True, kw_only=True, slots=True)
class UnsealedValue:
    """Where a value of a batch goes; travels to other processes of the host.

    Attributes:
        key: its key.
        reservation: the memory reserved for it.
        nbytes: its size.
    """

    key: str
    reservation: Reservation
    nbytes: int


class OpenValues:
    """The memory of handles, open for writing in this process.

    Attributes:
        buffers: one a handle, uint8 [nbytes], shared with every process that has the handle open. Not to be
            used after `close`.
    """

    def __init__(self, buffers: list[torch.Tensor], writers: list[SegmentWriter]) -> None:
        self.buffers = buffers
        self._writers = writers

    def close(self) -> None:
        """Let go of the memory. Closing twice is harmless."""
        for writer in self._writers:
            writer.close()


class UnsealedBatch(OpenValues):
    """Values under way. Ends with `seal` or `abort`."""

    def __init__(
        self,
        writer: InPlaceWriter,
        handles: tuple[UnsealedValue, ...],
        buffers: list[torch.Tensor],
        writers: list[SegmentWriter],
    ) -> None:
        super().__init__(buffers, writers)
        self.handles = handles
        self._writer = writer

    def seal(self) -> list[ObjectRef]:
        """Make the values readable, all at once or none; nobody writes into them any more.

        Raises:
            StoreError: the store did not take note of them; nothing of them remains.
        """
        return self._writer.seal(self)

    def abort(self) -> None:
        """Give the memory back."""
        self.close()
        self._writer.give_back(self.handles)


class InPlaceWriter:
    """Makes unsealed values in the shared memory of one client's volume. Made by `StoreClient.in_place`."""

    def __init__(self, client: StoreClient, memory: SharedVolume) -> None:
        self._client, self._memory = client, memory
        self._lock = threading.Lock()
        self._mapped: collections.OrderedDict[str, torch.Tensor] = collections.OrderedDict()

    @property
    def volume(self) -> str:
        """The volume whose host's processes can open the handles."""
        return self._client.volume

    def create(self, sizes: Mapping[str, int]) -> UnsealedBatch:
        """Reserve memory for values: key -> bytes, each > 0.

        Raises:
            StoreFull: they do not fit; nothing is reserved.
        """
        keys = list(sizes)
        what = f"unsealed {keys[0]!r}" + (f" and {len(keys) - 1} more" if len(keys) > 1 else "")
        wanted = [(nbytes, 1) for nbytes in sizes.values()]
        reservations = self._client.run(self._client.reserve(what, wanted, []))
        handles = tuple(
            UnsealedValue(key=key, reservation=reservation, nbytes=nbytes)
            for (key, nbytes), reservation in zip(sizes.items(), reservations, strict=True)
        )
        try:
            opened = self.open(handles)
        except BaseException:
            self.give_back(handles)
            raise
        return UnsealedBatch(self, handles, opened.buffers, opened._writers)

    def open(self, handles: Sequence[UnsealedValue]) -> OpenValues:
        """Open handles that a process of this host reserved.

        Raises:
            StoreError: they were taken back meanwhile.
        """
        writers: list[SegmentWriter] = []
        try:
            for handle in handles:
                writers.append(self._memory.open_writer(handle.reservation))
            buffers = [self._mapping(handle.reservation.segment)[: handle.nbytes] for handle in handles]
        except BaseException:
            for writer in writers:
                writer.close()
            raise
        return OpenValues(buffers, writers)

    def seal(self, batch: UnsealedBatch) -> list[ObjectRef]:
        """See `UnsealedBatch.commit`."""
        refs = [
            ObjectRef(
                store=self._client.name,
                key=handle.key,
                volume=self.volume,
                info=ValueInfo(kind="tensor", dtype="uint8", shape=(handle.nbytes,), nbytes=handle.nbytes),
                generation=new_generation(),
                location=Location(
                    segment=handle.reservation.segment,
                    offset=0,
                    slot=handle.reservation.slots[0],
                    sizes=(handle.nbytes,),
                ),
            )
            for handle in batch.handles
        ]
        slots = [handle.reservation.slots[0] for handle in batch.handles]
        self._memory.seal(slots, [ref.generation for ref in refs])
        written = Written(refs, [handle.reservation.token for handle in batch.handles], batch._writers)
        try:
            self._client.run(self._client.publish(f"unsealed {refs[0].key!r}", written))
        except BaseException:
            # Their words are set, so retiring the reservations alone would keep them.
            with contextlib.suppress(StoreError):
                self._client.run(self._client.drop([_gone(ref) for ref in refs]))
            raise
        self._client.counters.puts += len(refs)
        self._client.counters.bytes_in += sum(handle.nbytes for handle in batch.handles)
        return refs

    def give_back(self, handles: Sequence[UnsealedValue]) -> None:
        """End reservations; a volume that cannot be told takes back by itself what nobody locks."""
        with contextlib.suppress(StoreError):
            tokens = [handle.reservation.token for handle in handles]
            self._client.run(self._client.reserve("giving memory back", [], tokens))

    def _mapping(self, segment: str) -> torch.Tensor:
        """A segment's memory, mapped once and kept: its pages are there when it is written again."""
        with self._lock:
            memory = self._mapped.get(segment)
            if memory is None:
                # Through a file opened anew: a mapping would keep the lock of the writer's.
                fd = os.open(path_of(segment), os.O_RDWR | os.O_CLOEXEC)
                try:
                    memory = torch.from_numpy(map_shared(fd, os.fstat(fd).st_size))
                finally:
                    os.close(fd)
                self._mapped[segment] = memory
                if len(self._mapped) > _MAPPINGS:
                    self._mapped.popitem(last=False)
            self._mapped.move_to_end(segment)
            return memory


def _gone(ref: ObjectRef) -> DeletedValue:
    assert ref.location is not None
    return DeletedValue(key=ref.key, generation=ref.generation, volume=ref.volume, slot=ref.location.slot)


def in_place_writer(store: ObjectStore) -> InPlaceWriter | None:
    """What makes unsealed values in the store's shared memory; None if this process has none to write to."""
    make = getattr(store, "in_place", None)
    writer: InPlaceWriter | None = make() if callable(make) else None
    return writer
