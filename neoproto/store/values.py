"""What a volume holds of our clients: encoded values, in shared memory where it can, and leases on them.

local client:   reserve ──> (it copies) ──> commit            read: not at all, see `local`
remote client:  keep (bytes in the message)                    read (bytes in the reply)
both:           drop ──> freed now, or when the last lease ends
"""

from __future__ import annotations

import logging
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from neoproto.errors import KeyMissing, StoreError
from neoproto.store.base import Location, ObjectRef, Rows, ValueInfo
from neoproto.store.codec import Parts, check_rows, decode, select_rows
from neoproto.store.counters import REPORTED
from neoproto.store.local import SharedVolume, total_bytes
from neoproto.store.pool import Reservation, SegmentPool, Spill, default_limit
from neoproto.store.shm import Owner, Table, sweep_dead_owners, volume_prefix
from neoproto.store.wire import SentValue, ValueReply, ValueRequest

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class VolumeOptions:
    """What a volume is started with.

    Attributes:
        store: the store's name.
        shared_memory: whether to use any.
        limit_bytes: bound on it; 0 for this volume's part of `pool.default_limit`.
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
    parts: Parts  # empty if there is a place


class VolumeContents:
    """The values of one volume. All methods run on the volume's event loop.

    Attributes:
        prefix: of its files in shared memory; "" if it has none.
        newest: key -> generation, of the values stock clients see.
    """

    def __init__(self, options: VolumeOptions, clock: Callable[[], float] = time.monotonic) -> None:
        self._store, self._clock = options.store, clock
        self._held: dict[tuple[str, int], _Held] = {}
        self.newest: dict[str, int] = {}
        self._leases: dict[tuple[str, int], dict[str, float]] = {}
        self._dropped: set[tuple[str, int]] = set()
        self._bytes_in = self._bytes_out = 0
        self._reports: dict[str, dict[str, int]] = {}
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
        self._owner = Owner.claim(prefix)
        self._table = Table.create(prefix)
        spill = Spill.into(tempfile.gettempdir(), options.volumes_on_host) if options.spill else None
        self._pool = SegmentPool(prefix, self._table, limit, spill)
        self._memory = SharedVolume(prefix, self._table)
        self.prefix = prefix

    # -- writing ------------------------------------------------------------------------------------------

    async def reserve(
        self, wanted: Sequence[tuple[int, int]], retired: Sequence[int] = ()
    ) -> list[Reservation]:
        """Reservations for (bytes, number of values) each: all of them, or none.

        Args:
            retired: reservations that the caller is done with.

        Raises:
            StoreFull: they do not fit.
        """
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

    def commit(self, tokens: Sequence[int], refs: Sequence[ObjectRef]) -> None:
        """Take note of values whose bytes are in location.

        Raises:
            StoreError: a reservation was taken back.
        """
        for token, ref in zip(tokens, refs, strict=True):
            assert ref.location is not None
            if not self._pool.commit(token, [(ref.location.slot, ref.generation)]):
                self._note(ref.key, ref.generation, _Held(ref.info, ref.location, ()))

    async def keep(self, sent: Sequence[SentValue]) -> list[Location | None]:
        """Keep values whose bytes came in a message: all of them, or none.

        Raises:
            StoreFull: they do not fit.
        """
        places: list[Location | None] = [None] * len(sent)
        if self.prefix and sent:
            sizes = [[part.size for part in one.parts] for one in sent]
            (reservation,) = await self.reserve([(total_bytes(sizes), len(sent))])
            writer = self._memory.open_writer(reservation)
            placed: list[tuple[int, int]] = []
            for at, one in enumerate(sent):
                location = places[at] = writer.allocate(sizes[at])
                writer.write(location, one.parts)
                self._memory.seal([location.slot], [one.generation])
                placed.append((location.slot, one.generation))
            writer.close()
            self._pool.commit(reservation.token, placed)
        for one, kept in zip(sent, places, strict=True):
            parts = one.parts if kept is None else ()
            self._note(one.key, one.generation, _Held(one.info, kept, parts))
        return places

    def record_client_stats(self, report: tuple[str, dict[str, int]]) -> None:
        """Take note of what a client has done so far."""
        client, counts = report
        self._reports[client] = counts

    def _note(self, key: str, generation: int, held: _Held) -> None:
        self._held[key, generation] = held
        self.newest[key] = generation
        self._bytes_in += held.info.nbytes

    # -- reading ------------------------------------------------------------------------------------------

    def read(self, wanted: ValueRequest) -> ValueReply:
        """A value's bytes, or those of some rows, to be sent."""
        found = self._held.get((wanted.key, wanted.generation))
        if found is None:
            return ValueReply(problem="missing")
        info = found.info
        try:
            if wanted.rows is None:
                parts = self._parts(wanted.key, wanted.generation)
            else:
                rows: Rows = check_rows(info, wanted.rows, wanted.key)
                info, parts = self._rows(wanted, found, rows)
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

    def _parts(self, key: str, generation: int) -> Parts:
        held = self._held[key, generation]
        return held.parts or self._memory.parts(self._ref(key, generation, held))

    def _rows(self, wanted: ValueRequest, held: _Held, rows: Rows) -> tuple[ValueInfo, Parts]:
        return select_rows(held.info, self._parts(wanted.key, wanted.generation), rows)

    # -- deleting, and what holds it up ---------------------------------------------------------------------

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
            self._pool.frees_value(slot, generation)

    def lease(self, key: str, generation: int, holder: str, seconds: float) -> None:
        """Hold up a value's deletion for so long, or longer than said before.

        Raises:
            KeyMissing: it is gone, or deleted and this holder's lease is over.
        """
        self._expire()
        value = (key, generation)
        renewed = holder in self._leases.get(value, {})
        if value not in self._held or (value in self._dropped and not renewed):
            raise KeyMissing(f"{key!r} is not in store {self._store!r}")
        self._leases.setdefault(value, {})[holder] = self._clock() + seconds

    def end_lease(self, key: str, generation: int, holder: str) -> None:
        """Let go; a lease that is over already is ignored."""
        self._leases.get((key, generation), {}).pop(holder, None)
        self._expire()

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

    # -- all of them ----------------------------------------------------------------------------------------

    def reset(self) -> None:
        """Forget every value."""
        for key, generation in list(self._held):
            self._free(key, generation)
        self.newest.clear()
        self._leases.clear()
        self._dropped.clear()

    def close(self) -> None:
        """Forget every value, refuse readers, remove the files. Closing twice is harmless."""
        if self._owner is not None:
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
        found |= {name: sum(report[name] for report in self._reports.values()) for name in REPORTED}
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
