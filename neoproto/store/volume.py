"""What a volume holds of our clients: values and leases on them, and the segments that their bytes are in.

local client:   reserve ──> (it copies) ──> commit            get: not at all, see `shm`
remote client:  put (bytes in the message)                     get (bytes in the reply)
both:           delete ──> freed now, or when the last lease ends

segments:       reserve ──> Reservation ──(the writer copies)──> fulfil ──> live ──free──> idle ──reserve──> …
                              └──writer gone──> retire

All methods run on the volume's event loop. Only `SegmentPool` creates, reuses and removes segments.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import pickle
import tempfile
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from neoproto.errors import KeyMissing, StoreClosed, StoreError, StoreFull
from neoproto.store.base import Location, ObjectRef, ValueInfo
from neoproto.store.codec import Parts, check_rows, decode, select_rows
from neoproto.store.counters import REPORTED
from neoproto.store.messages import DeletedValue, SentValue, ValueReply, ValueRequest
from neoproto.store.shm import (
    FIRST_SLOT,
    PAGE,
    RESERVED,
    SHM_DIR,
    SLOTS,
    Owner,
    Reservation,
    SharedVolume,
    Table,
    path_of,
    sweep_dead_owners,
    total_bytes,
    try_lock,
    volume_prefix,
)

logger = logging.getLogger(__name__)

_MOST_MARGIN = 64 << 20
_SPILL_MARGIN = 256 << 20
_GRACE_S = 30.0
_WAIT_S = 2.0
_POLL_S = 0.02
_BLOCKING_ALLOCATION = 8 << 20
_MAX_SLOTS = 1 << 16
_MOST_DELETED_EARLY = 4096


@dataclass(frozen=True, kw_only=True, slots=True)
class VolumeOptions:
    """What a volume is started with.

    Attributes:
        store: the store's name.
        shared_memory: whether to use any.
        limit_bytes: bound on it; 0 for this volume's part of `default_limit`.
        volumes_on_host: how many share the host.
        spill: whether values that do not fit there go to files in the process's temporary folder.
    """

    store: str
    shared_memory: bool
    limit_bytes: int
    volumes_on_host: int
    spill: bool = False


@dataclass(frozen=True, slots=True)
class _Held:
    info: ValueInfo
    location: Location | None
    parts: Parts  # empty if there is a location


class VolumeContents:
    """The values of one volume, ours and none of stock clients. All methods run on the volume's event loop.

    Attributes:
        prefix: of its files in shared memory; "" if it has none.
        newest: key -> generation, of the values stock clients see.
        forget_stock: forgets the value that a stock client put under a key, if there is one.
    """

    def __init__(self, options: VolumeOptions, clock: Callable[[], float] = time.monotonic) -> None:
        self._store, self._clock = options.store, clock
        self._held: dict[tuple[str, int], _Held] = {}
        self.newest: dict[str, int] = {}
        self.forget_stock: Callable[[str], object] = lambda key: None
        self._leases: dict[tuple[str, int], dict[str, float]] = {}
        self._dropped: set[tuple[str, int]] = set()
        self._bytes_in = self._bytes_out = 0
        self._client_stats: dict[str, dict[str, int]] = {}
        self._closed = False
        self.prefix = ""
        self._owner: Owner | None = None
        if options.shared_memory:
            try:
                self._open_memory(options)
            except OSError as error:
                logger.warning("no shared memory for store %s: %s", options.store, error)

    def _open_memory(self, options: VolumeOptions) -> None:
        for prefix in sweep_dead_owners():
            logger.warning("removed what the dead owner of %s left in shared memory", prefix)
        prefix = volume_prefix(options.store)
        limit = options.limit_bytes or default_limit() // options.volumes_on_host
        # The owner's lock first: a sweep in another process removes files whose owner file is unlocked.
        self._owner = Owner.claim(prefix)
        self._table = Table.create(prefix)
        spill = Spill.into(tempfile.gettempdir(), options.volumes_on_host) if options.spill else None
        self._pool = SegmentPool(prefix, self._table, limit, spill)
        self._memory = SharedVolume(prefix, self._table)
        self.prefix = prefix

    def _check_open(self) -> None:
        if self._closed:
            raise StoreClosed("the store is closed")

    # -- put: a local client reserves, writes and commits, another one sends the bytes ---------------------

    async def reserve(
        self, wanted: Sequence[tuple[int, int]], retired: Sequence[int] = ()
    ) -> list[Reservation]:
        """Reserve memory for (bytes, number of values) each: all of them, or none.

        Args:
            retired: reservations that the caller is done with.

        Raises:
            StoreFull: they do not fit.
            StoreClosed: after `close`, as in all methods that put or read.
        """
        self._check_open()
        for token in retired:
            self._pool.retire(token)
        self._expire()
        reservations: list[Reservation] = []
        try:
            for nbytes, slots in wanted:
                reservations.append(await self._pool.reserve(nbytes, slots))
        except StoreError:
            for reservation in reservations:
                self._pool.retire(reservation.token)
            raise
        return reservations

    def commit(self, tokens: Sequence[int], packed: bytes, report: tuple[str, dict[str, int]]) -> None:
        """Keep values that are in place and sealed.

        Args:
            tokens: the reservation of each.
            packed: a pickle of the references to them.
            report: see `record_client_stats`.

        Raises:
            StoreError: a reservation was taken back.
        """
        self._check_open()
        self.record_client_stats(report)
        refs: list[ObjectRef] = pickle.loads(packed)
        for token, ref in zip(tokens, refs, strict=True):
            assert ref.location is not None
            if self._pool.fulfil(token, ref.location.slot, ref.generation):
                self._add(ref.key, ref.generation, _Held(ref.info, ref.location, ()))

    async def put(
        self, sent: Sequence[SentValue], report: tuple[str, dict[str, int]]
    ) -> list[Location | None]:
        """Keep values whose bytes came in a message: all of them, or none. Returns where each is.

        Raises:
            StoreFull: they do not fit.
        """
        self._check_open()
        self.record_client_stats(report)
        locations: list[Location | None] = [None] * len(sent)
        if self.prefix and sent:
            sizes = [[part.size for part in one.parts] for one in sent]
            (reservation,) = await self.reserve([(total_bytes(sizes), len(sent))])
            writer = self._memory.open_writer(reservation)
            for at, one in enumerate(sent):
                location = locations[at] = writer.allocate(sizes[at])
                writer.write(location, one.parts)
                self._memory.seal([location.slot], [one.generation])
                self._pool.fulfil(reservation.token, location.slot, one.generation)
            writer.close()
        for one, kept in zip(sent, locations, strict=True):
            parts = one.parts if kept is None else ()
            self._add(one.key, one.generation, _Held(one.info, kept, parts))
        return locations

    def record_client_stats(self, report: tuple[str, dict[str, int]]) -> None:
        """Keep what a client has done so far: its id, and `REPORTED` counters."""
        client, counts = report
        self._client_stats[client] = counts

    def _add(self, key: str, generation: int, held: _Held) -> None:
        self._held[key, generation] = held
        self.newest[key] = generation
        self.forget_stock(key)
        self._bytes_in += held.info.nbytes

    # -- get: by message; local clients read the shared memory themselves ----------------------------------

    def get(self, wanted: ValueRequest) -> ValueReply:
        """A value's bytes, or those of some rows, to be sent."""
        self._check_open()
        found = self._held.get((wanted.key, wanted.generation))
        if found is None:
            return ValueReply(problem="missing")
        info = found.info
        try:
            rows = None if wanted.rows is None else check_rows(info, wanted.rows, wanted.key)
            parts = found.parts or self._memory.parts(self._ref(wanted.key, wanted.generation, found))
            if rows is not None:
                info, parts = select_rows(info, parts, rows)
        except ValueError as error:
            return ValueReply(problem=str(error))
        self._bytes_out += info.nbytes
        return ValueReply(info=info, parts=parts)

    def value_of(self, key: str) -> Any:
        """The newest value under a key, decoded. It has to be there."""
        generation = self.newest[key]
        held = self._held[key, generation]
        if held.location is None:
            return decode(held.info, held.parts)
        return self._memory.read(self._ref(key, generation, held))

    def info_of(self, key: str) -> ValueInfo:
        """What the newest value under a key is. It has to be there."""
        return self._held[key, self.newest[key]].info

    def _ref(self, key: str, generation: int, held: _Held) -> ObjectRef:
        return ObjectRef(
            store=self._store,
            key=key,
            volume="",
            info=held.info,
            generation=generation,
            location=held.location,
        )

    # -- delete, and what holds it up ----------------------------------------------------------------------

    def delete(self, values: Sequence[DeletedValue]) -> None:
        """Forget values; those that are gone already are ignored. Generation 0 is one of a stock client."""
        for value in values:
            if value.generation == 0:
                self.forget_stock(value.key)
            else:
                self.drop(value.key, value.generation, value.slot)

    def drop(self, key: str, generation: int, slot: int = 0) -> None:
        """Forget a value, now or when its last lease ends. One that is gone already is ignored."""
        self._expire()
        if self.newest.get(key) == generation:
            del self.newest[key]
        if (key, generation) in self._leases:
            self._dropped.add((key, generation))
        elif (key, generation) in self._held:
            self._free(key, generation)
        elif slot and self.prefix:
            # Announced and not committed: the writer's commit comes later, or never.
            self._pool.free_uncommitted(slot, generation)

    def lease(self, key: str, generation: int, holder: str, seconds: float) -> None:
        """Hold up a value's deletion for so long, or longer than said before; 0 seconds end the lease.

        Leases are judged by this clock alone, so that clocks of hosts need not agree.

        Raises:
            KeyMissing: it is gone, or deleted and this holder's lease is over.
        """
        self._check_open()
        value = (key, generation)
        if seconds <= 0:
            self._leases.get(value, {}).pop(holder, None)
            self._expire()
            return
        self._expire()
        renewed = holder in self._leases.get(value, {})
        if value not in self._held or (value in self._dropped and not renewed):
            raise KeyMissing(f"{key!r} is not in store {self._store!r}")
        self._leases.setdefault(value, {})[holder] = self._clock() + seconds

    def _expire(self) -> None:
        now = self._clock()
        for value, holders in list(self._leases.items()):
            for holder in [name for name, until in holders.items() if until <= now]:
                del holders[holder]
            if not holders:
                del self._leases[value]
                if value in self._dropped:
                    self._dropped.discard(value)
                    self._free(*value)

    def _free(self, key: str, generation: int) -> None:
        held = self._held.pop((key, generation), None)
        if held is not None and held.location is not None:
            self._pool.free(held.location.slot)

    # -- all of them ---------------------------------------------------------------------------------------

    def reset(self) -> None:
        """Forget every value."""
        for key, generation in list(self._held):
            self._free(key, generation)
        self.newest.clear()
        self._leases.clear()
        self._dropped.clear()

    def close(self) -> None:
        """Forget every value, refuse readers, remove the files. Closing twice is harmless."""
        self._closed = True
        if self._owner is not None:
            # Before the words are cleared: a reader whose word is gone looks whether the store is closed.
            self._table.mark_closed()
        self.reset()
        if self._owner is not None:
            self._pool.close()
            self._owner.release()
            self._owner = None

    def stats(self) -> dict[str, int]:
        """Counters and sizes, by name; `bytes_out` went by message, `REPORTED` are sums over clients."""
        self._expire()
        found = {
            "objects": len(self._held),
            "object_bytes": sum(held.info.nbytes for held in self._held.values()),
            "leases": sum(len(holders) for holders in self._leases.values()),
            "deferred_deletions": len(self._dropped),
            "bytes_in": self._bytes_in,
            "bytes_out": self._bytes_out,
        }
        found |= {name: sum(report[name] for report in self._client_stats.values()) for name in REPORTED}
        if self.prefix:
            found |= asdict(self._pool.stats())
        return found


def volume_ids(strategy: str, host_ids: Sequence[str], count: int) -> list[str]:
    """Names of `count` volumes, in the order of their processes.

    Raises:
        ValueError: `count` does not fit the strategy.
    """
    per_host, rest = divmod(count, max(1, len(host_ids)))
    if strategy not in ("host", "local_rank"):
        raise ValueError(f"object_store.strategy must be 'host' or 'local_rank', got {strategy!r}")
    if rest or per_host < 1 or (strategy == "host" and per_host != 1):
        raise ValueError(f"strategy {strategy!r}: {count} processes do not fit {len(host_ids)} hosts")
    if strategy == "host":
        return list(host_ids)
    return [f"{host}:{rank}" for host in host_ids for rank in range(per_host)]


@dataclass(frozen=True, kw_only=True, slots=True)
class Spill:
    """Where segments go that shared memory has no room for.

    Attributes:
        folder: on a disk, in general; its maker removes it.
        limit_bytes: bound on them.
    """

    folder: str
    limit_bytes: int

    @classmethod
    def into(cls, folder: str, sharers: int = 1) -> Spill:
        """A part of what the folder's file system has left, for one of so many volumes."""
        return cls(folder=folder, limit_bytes=3 * _free_in(folder) // 4 // sharers)


@dataclass(slots=True, eq=False)
class _Segment:
    name: str
    capacity: int
    in_use: int = 0  # slots reserved or live

    @property
    def spilled(self) -> bool:
        return "/" in self.name


@dataclass(slots=True, eq=False)
class _Pending:
    segment: _Segment
    open_slots: set[int]
    since: float


@dataclass(kw_only=True, slots=True)
class PoolStats:
    """Counters of one volume's pool; bytes and the numbers of segments are of this moment.

    Attributes:
        held_bytes: in shared memory.
        spilled_bytes: in files elsewhere.
    """

    limit_bytes: int = 0
    held_bytes: int = 0
    spilled_bytes: int = 0
    segments: int = 0
    idle_segments: int = 0
    reservations: int = 0
    live_slots: int = 0
    made: int = 0
    reused: int = 0
    taken_back: int = 0
    refused: int = 0


@dataclass(slots=True)
class SegmentPool:
    """Segments of one volume, in the files `<prefix>.s<n>`.

    Attributes:
        limit_bytes: bound on the shared memory of all segments.
        spill: where segments go that do not fit there; None: nowhere.
        free_bytes: what shared memory has left, for all programs of the host.
        grace_s: how old a reservation is before the writer's lock is asked about.
        wait_s: how long a full pool waits for readers to release segments.
    """

    prefix: str
    table: Table
    limit_bytes: int
    spill: Spill | None = None
    free_bytes: Callable[[], int] = lambda: _free_in(SHM_DIR)
    grace_s: float = _GRACE_S
    wait_s: float = _WAIT_S
    clock: Callable[[], float] = time.monotonic
    _segments: dict[str, _Segment] = field(default_factory=dict)
    _idle: list[_Segment] = field(default_factory=list)
    _reservations: dict[int, _Pending] = field(default_factory=dict)
    _owner_of: dict[int, _Segment] = field(default_factory=dict)  # slot -> segment
    _spare_slots: list[int] = field(default_factory=list)
    _next_slot: int = FIRST_SLOT
    _deleted_early: dict[int, None] = field(default_factory=dict)  # generations; oldest first
    _held: int = 0
    _spilled: int = 0
    _serial: int = 0
    _counts: PoolStats = field(default_factory=PoolStats)

    async def reserve(self, nbytes: int, slots: int) -> Reservation:
        """Find or make a segment for `slots` values of `nbytes` altogether.

        Raises:
            StoreFull: it does not fit, also not after a moment's wait for readers.
        """
        if not 1 <= slots <= _MAX_SLOTS:
            raise StoreError(f"a reservation has 1 to {_MAX_SLOTS} slots, not {slots}")
        self.reap()
        capacity = round_up(nbytes)
        until = self.clock() + self.wait_s
        while (segment := self._reuse(capacity)) is None and not self._has_room(capacity):
            if self._may_spill(capacity):
                segment = await self._make(capacity, nbytes, spilled=True)
                break
            if capacity > self.limit_bytes or self.clock() >= until or not self._may_shrink():
                self._counts.refused += 1
                raise StoreFull(self._full(nbytes))
            await asyncio.sleep(_POLL_S)
        if segment is None:
            segment = await self._make(capacity, nbytes)
        token = uuid.uuid4().int >> 66
        numbers = self._take_slots(segment, slots)
        for slot in numbers:
            self.table.words[slot] = RESERVED | token
        self._reservations[token] = _Pending(segment, set(numbers), self.clock())
        return Reservation(token=token, segment=segment.name, nbytes=nbytes, slots=tuple(numbers))

    def fulfil(self, token: int, slot: int, generation: int) -> bool:
        """Count a slot as a value's; the writer has set its word already.

        Returns:
            False if the value is deleted already: another writer's value under the same key was announced,
            and this one's deletion overtook its commit.

        Raises:
            StoreError: the reservation was taken back meanwhile.
        """
        if generation in self._deleted_early:
            del self._deleted_early[generation]
            return False
        if slot not in self._owner_of or self.table.words[slot] != generation:
            raise StoreError("the reservation was taken back: the writer was thought to be gone")
        reservation = self._reservations.get(token)
        if reservation is not None:  # else it was retired when the value was there already
            reservation.open_slots.discard(slot)
            if not reservation.open_slots:
                del self._reservations[token]
        return True

    def retire(self, token: int) -> None:
        """End a reservation. Slots without a value are free again; those with one stay until deleted."""
        reservation = self._reservations.pop(token, None)
        for slot in reservation.open_slots if reservation else ():
            if self.table.words[slot] == RESERVED | token:
                self.free(slot)

    def free(self, slot: int) -> None:
        """Make a slot's value missing from now on, and its bytes reusable once no reader holds them."""
        segment = self._owner_of.pop(slot, None)
        if segment is None:
            return
        self.table.words[slot] = 0  # before `_reuse` tries for the lock; readers do it the other way round
        self._spare_slots.append(slot)
        segment.in_use -= 1
        if segment.in_use == 0:
            self._idle.append(segment)

    def free_uncommitted(self, slot: int, generation: int) -> None:
        """Free a slot whose value was announced and not committed, if it is that value's."""
        if slot not in self._owner_of or self.table.words[slot] != generation:
            return
        for token, reservation in list(self._reservations.items()):
            if slot in reservation.open_slots:
                reservation.open_slots.discard(slot)
                if not reservation.open_slots:
                    del self._reservations[token]
        self.free(slot)
        self._deleted_early[generation] = None
        if len(self._deleted_early) > _MOST_DELETED_EARLY:  # writers that died before they committed
            del self._deleted_early[next(iter(self._deleted_early))]

    def reap(self) -> None:
        """Take back old reservations whose writers hold no lock any more.

        The kernel drops a lock with its process, so a writer that died is known by that; one that is stopped
        keeps its reservation. The age gives a writer the time to open the segment in the first place.
        """
        old = self.clock() - self.grace_s
        for token, reservation in list(self._reservations.items()):
            if reservation.since < old and _unlocked(reservation.segment.name):
                self._counts.taken_back += 1
                self.retire(token)

    def stats(self) -> PoolStats:
        """A copy of the counters."""
        return PoolStats(
            limit_bytes=self.limit_bytes,
            held_bytes=self._held,
            spilled_bytes=self._spilled,
            segments=len(self._segments),
            idle_segments=len(self._idle),
            reservations=len(self._reservations),
            live_slots=len(self._owner_of),
            made=self._counts.made,
            reused=self._counts.reused,
            taken_back=self._counts.taken_back,
            refused=self._counts.refused,
        )

    def close(self) -> None:
        """Forget everything; the files in shared memory are removed by their owner."""
        for slot in list(self._owner_of):
            self.table.words[slot] = 0
        for segment in list(self._segments.values()):
            if segment.spilled:
                self._remove(segment)
        self._segments.clear()
        self._idle.clear()
        self._reservations.clear()
        self._owner_of.clear()
        self._held = 0

    def _reuse(self, capacity: int) -> _Segment | None:
        """The idle segment used last that fits and is not locked: its pages are the warmest."""
        for at in range(len(self._idle) - 1, -1, -1):
            segment = self._idle[at]
            fits = capacity <= segment.capacity <= capacity + max(capacity // 2, 4 * PAGE)
            if fits and _unlocked(segment.name):
                del self._idle[at]
                self._counts.reused += 1
                return segment
        return None

    async def _make(self, capacity: int, nbytes: int, *, spilled: bool = False) -> _Segment:
        """A new file with its memory allocated, so that no later write to it can fail."""
        self._serial += 1
        name = f"{self.prefix}.s{self._serial}"
        if spilled and self.spill is not None:
            name = os.path.join(self.spill.folder, name)
        segment = _Segment(name, capacity)
        self._segments[segment.name] = segment
        self._count(segment, capacity)  # before the loop runs another reservation, which looks at the bound
        try:
            fd = os.open(path_of(segment.name), os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
            try:
                if capacity <= _BLOCKING_ALLOCATION:
                    os.posix_fallocate(fd, 0, capacity)
                else:
                    await asyncio.to_thread(os.posix_fallocate, fd, 0, capacity)
            finally:
                os.close(fd)
        except OSError as error:
            self._remove(segment)
            self._counts.refused += 1
            raise StoreFull(f"{self._full(nbytes)}: {error.strerror}") from error
        self._counts.made += 1
        return segment

    def _has_room(self, capacity: int) -> bool:
        """Whether a new segment fits, after as many idle ones as needed were removed."""
        while True:
            fits = self._held + capacity <= self.limit_bytes and self.free_bytes() >= capacity + margin()
            if fits or capacity > self.limit_bytes:
                return fits
            victim = next((one for one in self._idle if not one.spilled and _unlocked(one.name)), None)
            if victim is None:
                return False
            self._idle.remove(victim)
            self._remove(victim)

    def _may_spill(self, capacity: int) -> bool:
        """Whether a segment fits elsewhere, after idle ones there were removed."""
        spill = self.spill
        while spill is not None:
            room = min(spill.limit_bytes - self._spilled, _free_in(spill.folder) - _SPILL_MARGIN)
            if capacity <= room:
                if not self._spilled:
                    text = "%s has no room for %d bytes: files in %s"
                    logger.warning(text, SHM_DIR, capacity, spill.folder)
                return True
            victim = next((one for one in self._idle if one.spilled and _unlocked(one.name)), None)
            if victim is None:
                break
            self._idle.remove(victim)
            self._remove(victim)
        return False

    def _count(self, segment: _Segment, nbytes: int) -> None:
        if segment.spilled:
            self._spilled += nbytes
        else:
            self._held += nbytes

    def _remove(self, segment: _Segment) -> None:
        # Truncated first: writers keep mappings of segments they know, which would keep the memory.
        with contextlib.suppress(FileNotFoundError):
            os.truncate(path_of(segment.name), 0)
            os.unlink(path_of(segment.name))
        del self._segments[segment.name]
        self._count(segment, -segment.capacity)

    def _take_slots(self, segment: _Segment, count: int) -> list[int]:
        numbers = [self._spare_slots.pop() for _ in range(min(count, len(self._spare_slots)))]
        fresh = count - len(numbers)
        if self._next_slot + fresh > SLOTS:
            self._spare_slots += numbers
            self._idle.append(segment)
            raise StoreFull(f"the store holds {SLOTS - FIRST_SLOT} values on this host, as many as it can")
        try:
            self.table.allocate(self._next_slot + fresh)
        except OSError as error:
            self._spare_slots += numbers
            self._idle.append(segment)
            raise StoreFull(f"no memory for {fresh} more values: {SHM_DIR}: {error.strerror}") from error
        numbers += range(self._next_slot, self._next_slot + fresh)
        self._next_slot += fresh
        for slot in numbers:
            self._owner_of[slot] = segment
        segment.in_use += count
        return numbers

    def _may_shrink(self) -> bool:
        """Whether waiting may help: something is idle and held, or on its way."""
        return bool(self._idle or self._reservations)

    def _full(self, nbytes: int) -> str:
        elsewhere = ""
        if self.spill is not None:
            most = self.spill.limit_bytes
            elsewhere = f"; {self.spill.folder} holds {self._spilled} of at most {most} bytes"
        return (
            f"{nbytes} bytes do not fit: the store holds {self._held} of at most {self.limit_bytes} bytes on "
            f"this host, and {SHM_DIR} has {self.free_bytes()} left, of which {margin()} stay free{elsewhere}"
        )


def round_up(nbytes: int) -> int:
    """A segment's capacity for a number of bytes: an eighth of it is wasted at most, or a few pages."""
    nbytes = max(nbytes, 1)
    unit = max(PAGE, 1 << max(0, nbytes.bit_length() - 4))
    return -(-nbytes // unit) * unit


def margin() -> int:
    """Bytes of /dev/shm that the store leaves to others: a quarter of a small one, 64 MiB of a large one."""
    found = os.statvfs(SHM_DIR)
    return min(_MOST_MARGIN, found.f_blocks * found.f_frsize // 4)


def default_limit() -> int:
    """Bytes all volumes of a host may hold: three quarters of what /dev/shm has left, half the memory."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min(3 * _free_in(SHM_DIR) // 4, memory // 2)


def _free_in(folder: str | Path) -> int:
    found = os.statvfs(folder)
    return found.f_bavail * found.f_frsize


def _unlocked(name: str) -> bool:
    """Whether no reader or writer holds the segment at this moment; False if its file was removed."""
    try:
        fd = os.open(path_of(name), os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        return try_lock(fd, exclusive=True)
    finally:
        os.close(fd)
