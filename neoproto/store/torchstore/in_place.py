"""Values that their writer makes in place: no copy of its own is put.

    create ──> UnsealedBatch: memory, written here and, by its handles, in other processes of the host
                  ├──seal────> references
                  └──abort, or the writer is gone──> taken back

The values are bytes: a one-dimensional uint8 tensor each. Memory that was written before is mapped already
when it comes again, so writing it costs no page faults.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from neoproto.errors import StoreError
from neoproto.store.base import Location, ObjectRef, ValueInfo, new_generation
from neoproto.store.messages import DeletedValue
from neoproto.store.shm import Reservation, SegmentWriter, SharedVolume

if TYPE_CHECKING:
    from neoproto.store.torchstore.client import StoreClient


@dataclass(frozen=True, kw_only=True, slots=True)
class UnsealedValue:
    """Where a value under way is written; travels to other processes of the host.

    Attributes:
        key: its key.
        reservation: the memory reserved for it.
        nbytes: its size.
    """

    key: str
    reservation: Reservation
    nbytes: int


class OpenBatch:
    """The memory of unsealed values, open for writing in this process: `neoproto.store.base.OpenValues`."""

    def __init__(self, handles: Sequence[UnsealedValue], memory: SharedVolume) -> None:
        self.handles = tuple(handles)
        self.buffers: list[torch.Tensor] = []
        self._writers: list[SegmentWriter] = []
        try:
            for handle in self.handles:
                self._writers.append(memory.open_writer(handle.reservation))
                mapped = memory.mapping(handle.reservation.segment)
                self.buffers.append(torch.from_numpy(mapped)[: handle.nbytes])
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Release the memory. Closing twice is harmless."""
        for writer in self._writers:
            writer.close()


class UnsealedBatch(OpenBatch):
    """Values under way: `neoproto.store.base.UnsealedValues`."""

    def __init__(self, client: StoreClient, handles: Sequence[UnsealedValue], memory: SharedVolume) -> None:
        super().__init__(handles, memory)
        self._client, self._memory = client, memory

    def seal(self) -> list[ObjectRef]:
        """Make the values readable; see `neoproto.store.base.UnsealedValues`."""
        client = self._client
        refs = [
            ObjectRef(
                store=client.name,
                key=value.key,
                volume=client.volume,
                info=ValueInfo(kind="tensor", dtype="uint8", shape=(value.nbytes,), nbytes=value.nbytes),
                generation=new_generation(),
                location=_location(value),
            )
            for value in self.handles
        ]
        slots = [_location(value).slot for value in self.handles]
        self._memory.seal(slots, [ref.generation for ref in refs])
        what = f"unsealed {refs[0].key!r}"
        try:
            client.run(client.publish(what, refs, [value.reservation.token for value in self.handles]))
        except BaseException:
            # Their words are set, so retiring the reservations alone would keep them.
            gone = [
                DeletedValue(key=ref.key, generation=ref.generation, volume=ref.volume, slot=slot)
                for ref, slot in zip(refs, slots, strict=True)
            ]
            with contextlib.suppress(StoreError):
                client.run(client.free(gone))
            raise
        finally:
            # Not before the commit: the volume takes back reservations that are not locked.
            self.close()
        client.counters.puts += len(refs)
        client.counters.bytes_in += sum(value.nbytes for value in self.handles)
        return refs

    def abort(self) -> None:
        """Give the memory back. A volume that cannot be reached takes back by itself what is not locked."""
        self.close()
        with contextlib.suppress(StoreError):
            self._client.run(self._client.retire([value.reservation.token for value in self.handles]))


class InPlaceWriter:
    """Makes values in the shared memory of one client's volume. Made by `StoreClient.in_place`."""

    def __init__(self, client: StoreClient, memory: SharedVolume) -> None:
        self._client, self._memory = client, memory

    @property
    def volume(self) -> str:
        """The volume whose host's processes can open the values."""
        return self._client.volume

    def create(self, sizes: Mapping[str, int]) -> UnsealedBatch:
        """Reserve memory for values; see `neoproto.store.base.InPlaceWriter`."""
        keys = list(sizes)
        what = f"unsealed {keys[0]!r}" + (f" and {len(keys) - 1} more" if len(keys) > 1 else "")
        client = self._client
        reserved = client.run(client.reserve(what, [(nbytes, 1) for nbytes in sizes.values()]))
        handles = [
            UnsealedValue(key=key, reservation=reservation, nbytes=nbytes)
            for (key, nbytes), reservation in zip(sizes.items(), reserved, strict=True)
        ]
        try:
            return UnsealedBatch(client, handles, self._memory)
        except BaseException:
            with contextlib.suppress(StoreError):
                client.run(client.retire([reservation.token for reservation in reserved]))
            raise

    def open(self, handles: Sequence[UnsealedValue]) -> OpenBatch:
        """Open what a process of this host created; see `neoproto.store.base.InPlaceWriter`."""
        return OpenBatch(handles, self._memory)


def _location(value: UnsealedValue) -> Location:
    reservation = value.reservation
    return Location(segment=reservation.segment, offset=0, slot=reservation.slots[0], sizes=(value.nbytes,))
