"""The writing half of a client: from values to bytes in shared memory, ready to be told of.

    small ──> arena: memory reserved before, filled bit by bit          no message before the bytes are there
    else  ──> reserve: one reservation a large value, one for all the rest      one message

All methods run on the client's loop; large copies go to a thread.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from neoproto.errors import StoreError
from neoproto.store.base import Location, ObjectRef, ValueInfo
from neoproto.store.codec import Parts, encode
from neoproto.store.shm import Reservation, SegmentWriter, SharedVolume, total_bytes

ARENA_BYTES = 256 << 10
ARENA_SLOTS = 64
_ARENA_SHARE = ARENA_BYTES // 4
LARGE_BYTES = 1 << 20
"""Values of at least this size have a segment of their own, so that its memory goes when they go."""
_THREAD_BYTES = 1 << 20

Reserve = Callable[[str, list[tuple[int, int]], list[int]], Awaitable[list[Reservation]]]


def new_generation() -> int:
    """A number that no other value has: 63 random bits, never 0 for all practical purposes."""
    return int.from_bytes(os.urandom(8)) >> 1


@dataclass(frozen=True, slots=True)
class Written:
    """Values whose bytes are in place and readable by reference.

    Attributes:
        refs: to them.
        tokens: the reservation of each.
        writers: to be closed when the volume knows.
    """

    refs: list[ObjectRef]
    tokens: list[int]
    writers: list[SegmentWriter]

    def close(self) -> None:
        """Let go of the segments' locks."""
        for writer in self.writers:
            writer.close()


@dataclass(frozen=True, slots=True)
class _Value:
    key: str
    info: ValueInfo
    parts: Parts
    sizes: tuple[int, ...]


class Putter:
    """Writes values of one client into its volume's shared memory."""

    def __init__(self, store: str, volume: str, memory: SharedVolume, reserve: Reserve) -> None:
        """Args:
        reserve: asks the volume; takes what for, (bytes, slots) each, and reservations done with.
        """
        self._store, self._volume, self._memory, self._reserve = store, volume, memory, reserve
        self._arena: SegmentWriter | None = None
        self._retired: list[int] = []
        self._arena_lock = asyncio.Lock()

    async def write(self, what: str, named: Sequence[tuple[str, Any]]) -> Written:
        """Encode values and copy them into shared memory.

        Raises:
            StoreFull: they do not fit; nothing of them is left.
        """
        values = []
        for key, value in named:
            info, parts = encode(value)
            values.append(_Value(key, info, parts, tuple(part.size for part in parts)))
        if len(values) <= ARENA_SLOTS // 4 and total_bytes([v.sizes for v in values]) <= _ARENA_SHARE:
            return await self._write_small(what, values)
        large = [v for v in values if v.info.nbytes >= LARGE_BYTES]
        rest = [v for v in values if v.info.nbytes < LARGE_BYTES]
        groups = [[v] for v in large] + ([rest] if rest else [])
        wanted = [(total_bytes([v.sizes for v in group]), len(group)) for group in groups]
        retired, self._retired = self._retired, []
        reservations = await self._reserve(what, wanted, retired)
        writers: list[SegmentWriter] = []
        try:
            for reservation in reservations:
                writers.append(self._memory.open_writer(reservation))
            jobs = [
                (writer, writer.allocate(v.sizes), v)
                for writer, group in zip(writers, groups, strict=True)
                for v in group
            ]
            if sum(v.info.nbytes for v in values) >= _THREAD_BYTES:
                await asyncio.to_thread(_copy, jobs)
            else:
                _copy(jobs)
        except BaseException:
            for writer in writers:
                writer.close()
            self._retired += [reservation.token for reservation in reservations]
            raise
        by_key = {id(v): (writer, location) for writer, location, v in jobs}
        return self._publish([(*by_key[id(v)], v) for v in values], writers)

    async def _write_small(self, what: str, values: list[_Value]) -> Written:
        async with self._arena_lock:
            writer = self._arena
            total = total_bytes([v.sizes for v in values])
            if writer is None or not writer.room_for_all(len(values), total):
                writer = await self._new_arena(what)
            jobs = [(writer, writer.allocate(v.sizes), v) for v in values]
            _copy(jobs)
            return self._publish(jobs, [])

    async def _new_arena(self, what: str) -> SegmentWriter:
        if self._arena is not None:
            # Committed values stay; what was not used is free again. Told with the next reservation.
            self._arena.close()
            self._retired.append(self._arena.reservation.token)
            self._arena = None
        retired, self._retired = self._retired, []
        (reservation,) = await self._reserve(what, [(ARENA_BYTES, ARENA_SLOTS)], retired)
        self._arena = self._memory.open_writer(reservation)
        return self._arena

    def _publish(
        self, jobs: Sequence[tuple[SegmentWriter, Location, _Value]], writers: list[SegmentWriter]
    ) -> Written:
        refs = [
            ObjectRef(
                store=self._store,
                key=value.key,
                volume=self._volume,
                info=value.info,
                generation=new_generation(),
                location=location,
            )
            for _, location, value in jobs
        ]
        self._memory.seal([location.slot for _, location, _ in jobs], [ref.generation for ref in refs])
        return Written(refs, [writer.reservation.token for writer, _, _ in jobs], writers)

    def close(self) -> None:
        """Let go of the arena; the volume takes back what is left of it."""
        if self._arena is not None:
            self._arena.close()
            self._arena = None


def _copy(jobs: Sequence[tuple[SegmentWriter, Location, _Value]]) -> None:
    for writer, location, value in jobs:
        try:
            writer.write(location, value.parts)
        except OSError as error:
            raise StoreError(f"{value.key!r} could not be written: {error.strerror}") from error
