"""A process's client of the store: the whole way of a put and of a get.

    put   encode ──> memory of this host's volume ──> copy ──> seal ──> volume (commit) and index (announce)
    get   by reference into this machine: mapped on the caller's thread, no message
          else: client's loop ──> index (by key) ──> shared memory, or the volume

A value is announced to the index when its bytes are in place, and an overwritten one is freed after the
index has the new one: a reader finds the old value or the new one.
"""

from __future__ import annotations

import asyncio
import pickle
import threading
import uuid
from collections.abc import Awaitable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from monarch.actor import context

from neoproto.errors import KeyMissing, StoreError
from neoproto.private_api.monarch import has_context
from neoproto.store.base import (
    KeyOrRef,
    Location,
    ObjectRef,
    Rows,
    ValueInfo,
    check_key,
    forget_client,
    fresh_key,
    named_values,
    new_generation,
    pair_rows,
    register_client,
)
from neoproto.store.codec import Parts, decode, encode
from neoproto.store.counters import REPORTED, ClientCounters
from neoproto.store.loop import LoopThread, run_in_thread
from neoproto.store.messages import DeletedValue, SentValue, ValueReply, ValueRequest, failure_of
from neoproto.store.rowcache import RemoteRowCache
from neoproto.store.shm import Reservation, SegmentWriter, SharedVolume, total_bytes
from neoproto.store.torchstore import rdma
from neoproto.store.torchstore.rpc import RpcClient
from neoproto.store.torchstore.snapshots import Snapshot

if TYPE_CHECKING:
    from neoproto.store.torchstore.actors import StoreSpec
    from neoproto.store.torchstore.in_place import InPlaceWriter

T = TypeVar("T")

_READ_TRIES = 5
_THREAD_BYTES = 1 << 20
_CACHE_BYTES = 256 << 20
_ARENA_BYTES = 256 << 10
_ARENA_SLOTS = 64
_LARGE_BYTES = 1 << 20
"""Values of at least this size have a segment of their own, so that its memory is freed with them."""
_home: str = ""


def home_volume() -> str:
    """The volume this process puts into; "" before a client is attached."""
    return _home


class _NotLocal(Exception):
    """A value is not in this machine's shared memory. No error: it has to be read by message."""


@dataclass(slots=True, eq=False)
class _Put:
    """One value of a put, encoded."""

    key: str
    info: ValueInfo
    parts: Parts
    sizes: tuple[int, ...]


@dataclass(slots=True, eq=False)
class _Get:
    """One value of a get: which one, where it is once that is known, and the value once it is there."""

    key: KeyOrRef
    rows: Rows | None
    ref: ObjectRef | None
    value: Any = None
    done: bool = False

    def finish(self, value: Any) -> None:
        self.value, self.done = value, True


class StoreClient:
    """An `ObjectStore` on TorchStore. Make it with `attach`.

    Attributes:
        name: the store's.
        volume: the id of the volume it puts into.
        counters: what this process did through it.
    """

    def __init__(self, spec: StoreSpec, volume: str, host_id: str) -> None:
        self.name, self.volume, self._id = spec.name, volume, uuid.uuid4().hex
        self.counters = ClientCounters()
        self._spec, self._host_id = spec, host_id
        self._rdma = spec.remote == "rdma" or (spec.remote == "auto" and rdma.available())
        self._volumes: dict[str, Any] = {}
        self._memories: dict[str, SharedVolume | None] = {}
        self._memory_lock = threading.Lock()
        self._cache = RemoteRowCache(_CACHE_BYTES)
        self._arena: SegmentWriter | None = None
        self._arena_lock = asyncio.Lock()
        self._retired: list[int] = []
        self._closed = False
        self._loop = LoopThread(f"client of store {spec.name!r}")
        self._rpc_client = RpcClient(f"replies of store {spec.name!r}")
        self._stock: Any = None

    @classmethod
    def attach(cls, spec: StoreSpec, *, host_id: str, local_rank: int | None = None) -> StoreClient:
        """Make a client of this process.

        Call it where Monarch's context is: in an endpoint, in a thread that carries one's context, or in the
        controller. The client may then be used from anywhere in the process.

        Args:
            host_id: this host, as in `StoreServer.start`; one without a volume puts into the first.
            local_rank: which of the host's volumes, under the strategy "local_rank"; None is 0.

        Raises:
            StoreError: Monarch's context is not there.
        """
        global _home
        if not has_context():
            raise StoreError(f"store {spec.name!r}: attach where Monarch's context is")
        context()
        volume = host_id if spec.strategy == "host" else f"{host_id}:{local_rank or 0}"
        client = cls(spec, volume if volume in spec.volumes else next(iter(spec.volumes)), host_id)
        _home = client.volume
        register_client(client)
        return client

    # -- what `ObjectStore` promises -----------------------------------------------------------------------

    def put(self, value: Any, *, key: str | None = None, blocking: bool = True) -> Any:
        """See `ObjectStore.put`. Do not change a value put without waiting before the future is done."""
        name = fresh_key() if key is None else check_key(key)

        async def first() -> ObjectRef:
            return (await self._put([(name, value)]))[0]

        return self._run(first(), blocking)

    def put_batch(self, values: Mapping[str, Any] | Sequence[Any], *, blocking: bool = True) -> Any:
        """See `ObjectStore.put_batch`."""
        return self._run(self._put(named_values(values)), blocking)

    def get(self, key: KeyOrRef, *, rows: Rows | None = None, blocking: bool = True) -> Any:
        """See `ObjectStore.get`."""
        if blocking and (here := self._get_here([(key, rows)])) is not None:
            return here[0]

        async def first() -> Any:
            return (await self._get([(key, rows)]))[0]

        return self._run(first(), blocking)

    def get_batch(
        self, keys: Sequence[KeyOrRef], *, rows: Sequence[Rows | None] | None = None, blocking: bool = True
    ) -> Any:
        """See `ObjectStore.get_batch`."""
        wanted = pair_rows(keys, rows)
        if blocking and (here := self._get_here(wanted)) is not None:
            return here
        return self._run(self._get(wanted), blocking)

    def delete(self, key: KeyOrRef, *, missing_ok: bool = False, blocking: bool = True) -> Any:
        """See `ObjectStore.delete`."""
        return self._run(self._delete([key], missing_ok), blocking)

    def delete_batch(
        self, keys: Sequence[KeyOrRef], *, missing_ok: bool = False, blocking: bool = True
    ) -> Any:
        """See `ObjectStore.delete_batch`."""
        return self._run(self._delete(keys, missing_ok), blocking)

    def keys(self, prefix: str | None = None) -> list[str]:
        """The keys of all values in the store; with a prefix, those that continue it after a dot."""
        return self.run(self._call("listing keys", self._spec.index.keys, prefix))

    def in_place(self) -> InPlaceWriter | None:
        """See `ObjectStore.in_place`."""
        from neoproto.store.torchstore.in_place import InPlaceWriter  # needs torch, as not every process does

        memory = self._memory(self.volume)
        return None if memory is None else InPlaceWriter(self, memory)

    def maps(self, ref: ObjectRef) -> bool:
        """See `ObjectStore.maps`."""
        return ref.location is not None and self._memory(ref.volume) is not None

    def snapshot(self, key: KeyOrRef, *, seconds: float = 60.0) -> Snapshot:
        """Take a lease on a value: it stays readable through the snapshot, also when it is deleted meanwhile.

        The lease renews itself while this process lives, and runs out so many seconds after its death.

        Raises:
            KeyMissing: the value is gone, or was put by a stock TorchStore client.
        """

        async def take() -> Snapshot:
            wanted = _Get(key, None, key if isinstance(key, ObjectRef) else None)
            await self._locate([wanted])
            if wanted.ref is None:
                raise KeyMissing(f"{key!r} was put by a stock client: no snapshots of such values")
            snapshot = Snapshot(self, wanted.ref, seconds)
            await snapshot.renew()
            return snapshot

        snapshot = self.run(take())
        self._loop.submit(snapshot.keep())
        return snapshot

    def stats(self, *, run: bool = False) -> dict[str, int]:
        """Counts of this process, or, with `run`, the sums over the run's volumes.

        Of a process: puts, gets, gets_shared (without a message), bytes_in, bytes_out (by message),
        bytes_mapped and bytes_copied (of shared memory), holds (segments kept by values it still has),
        cache_hits and cache_misses (rows of other hosts' values), cache_bytes. Of a run: those of all
        processes, each as of its last put, and `VolumeContents.stats`.
        """
        if not run:
            return self._own_stats()

        async def ask() -> dict[str, int]:
            names = list(self._spec.volumes)
            calls = [self._call("stats", self._volume(name).stats) for name in names]
            total: dict[str, int] = {"volumes": len(names)}
            for found in await asyncio.gather(*calls):
                for name, value in found.items():
                    total[name] = total.get(name, 0) + value
            return total

        return self.run(ask())

    def fail(self, reason: str) -> None:
        """Have operations under way and later ones fail with `StoreError(reason)`: the store is lost."""
        self._loop.fail(reason)

    def close(self) -> None:
        """End this client; operations under way fail with `StoreClosed`. Closing twice is harmless."""
        forget_client(self)
        self._closed = True
        self._loop.close()  # first: nothing writes to the arena, or waits for a reply, once it has ended
        self._rpc_client.close()
        if self._arena is not None:
            self._arena.close()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run something on the client's loop and wait for it."""
        result: T = self._run(work, True)
        return result

    def _run(self, work: Coroutine[Any, Any, Any], blocking: bool) -> Any:
        if blocking and self._loop.is_current:
            work.close()
            raise RuntimeError("a blocking store operation cannot run on the client's own loop")
        future = self._loop.submit(work)
        return future.result() if blocking else future

    def _own_stats(self) -> dict[str, int]:
        return self.counters.with_memory(list(self._memories.values()), self._cache)

    def _report(self) -> tuple[str, dict[str, int]]:
        """Who this is and what it has read so far, for the run's sums."""
        return self._id, {name: self._own_stats()[name] for name in REPORTED}

    # -- put -----------------------------------------------------------------------------------------------

    async def _put(self, named: list[tuple[str, Any]]) -> list[ObjectRef]:
        if not named:
            return []
        what = f"put of {named[0][0]!r}" + (f" and {len(named) - 1} more" if len(named) > 1 else "")
        values = []
        for key, value in named:
            info, parts = encode(value)
            values.append(_Put(key, info, parts, tuple(part.size for part in parts)))
        memory = self._memory(self.volume)
        if memory is None:
            refs = await self._put_by_message(what, values)
        elif len(values) <= _ARENA_SLOTS // 4 and _total(values) <= _ARENA_BYTES // 4:
            refs = await self._put_in_arena(what, values, memory)
        else:
            refs = await self._put_in_segments(what, values, memory)
        self.counters.puts += len(refs)
        self.counters.bytes_in += sum(ref.info.nbytes for ref in refs)
        return refs

    async def _put_in_arena(self, what: str, values: list[_Put], memory: SharedVolume) -> list[ObjectRef]:
        """Put small values into memory that was reserved before: no message until their bytes are there."""
        # Asking for a new arena lets other puts run, which must neither ask for one too nor fill the old one.
        async with self._arena_lock:
            if self._arena is None or not self._arena.room_for_all(len(values), _total(values)):
                if self._arena is not None:
                    # Committed values stay; the volume frees the rest when it hears of it, with the next
                    # reservation.
                    self._arena.close()
                    self._retired.append(self._arena.reservation.token)
                    self._arena = None
                (reservation,) = await self.reserve(what, [(_ARENA_BYTES, _ARENA_SLOTS)])
                self._arena = memory.open_writer(reservation)
            arena = self._arena
            jobs = [(arena, arena.allocate(value.sizes), value) for value in values]
            _copy(jobs)
        return await self._seal(what, jobs, memory)

    async def _put_in_segments(self, what: str, values: list[_Put], memory: SharedVolume) -> list[ObjectRef]:
        """Put large values into a segment each, and all the others into one."""
        groups = [[value] for value in values if value.info.nbytes >= _LARGE_BYTES]
        if rest := [value for value in values if value.info.nbytes < _LARGE_BYTES]:
            groups.append(rest)
        reservations = await self.reserve(what, [(_total(group), len(group)) for group in groups])
        writers: list[SegmentWriter] = []
        try:
            try:
                for reservation in reservations:
                    writers.append(memory.open_writer(reservation))
                jobs = [
                    (writer, writer.allocate(value.sizes), value)
                    for writer, group in zip(writers, groups, strict=True)
                    for value in group
                ]
                if sum(value.info.nbytes for value in values) >= _THREAD_BYTES:
                    # Not `to_thread`: when this is cancelled the writers are closed, and a thread still at it
                    # would write to whatever file has their descriptors next.
                    await run_in_thread(lambda: _copy(jobs))
                else:
                    _copy(jobs)
            except BaseException:
                self._retired += [reservation.token for reservation in reservations]
                raise
            job_of = {id(job[2]): job for job in jobs}
            return await self._seal(what, [job_of[id(value)] for value in values], memory)
        finally:
            # Not before the commit: the volume takes back reservations that are not locked.
            for writer in writers:
                writer.close()

    async def _seal(self, what: str, jobs: Sequence[_Job], memory: SharedVolume) -> list[ObjectRef]:
        """Make values readable whose bytes are in place: by reference at once, then by key."""
        refs = [
            ObjectRef(
                store=self.name,
                key=value.key,
                volume=self.volume,
                info=value.info,
                generation=new_generation(),
                location=location,
            )
            for _, location, value in jobs
        ]
        memory.seal([location.slot for _, location, _ in jobs], [ref.generation for ref in refs])
        await self.publish(what, refs, [writer.reservation.token for writer, _, _ in jobs])
        return refs

    async def publish(self, what: str, refs: list[ObjectRef], tokens: list[int]) -> None:
        """Have the volume keep sealed values, and the index name them.

        Args:
            tokens: the reservation of each.

        Raises:
            StoreError: the volume or the index failed; what the index named is deleted again.
        """
        packed = pickle.dumps(refs)  # once, for two messages
        # Both at once, so that a put takes the time of one message. Whichever comes first, readers are right:
        # the values are sealed. If another put of a key deletes one before its commit comes, the volume
        # remembers that (`SegmentPool.fulfil`).
        outcomes: tuple[Any, Any] = await asyncio.gather(
            self._rpc(what, self.volume, "commit", tokens, packed, self._report()),
            self._rpc(what, None, "announce", packed),
            return_exceptions=True,
        )
        committed, announced = outcomes
        if not isinstance(announced, BaseException):
            if isinstance(committed, BaseException):
                await self._delete(refs, missing_ok=True)
            # Only now: until the announcement, the older value is what a reader of the key is sent to.
            await self.free(announced)
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise outcome

    async def reserve(self, what: str, wanted: list[tuple[int, int]]) -> list[Reservation]:
        """Memory of this host's volume to write into, for (bytes, number of values) each.

        Reservations that this client is done with go along.

        Raises:
            StoreFull: they do not fit; nothing is reserved.
        """
        retired, self._retired = self._retired, []
        reserved: list[Reservation] = await self._rpc(what, self.volume, "reserve", wanted, retired)
        return reserved

    async def retire(self, tokens: list[int]) -> None:
        """Give reservations back that no value was written into."""
        self._retired += tokens
        await self.reserve("giving memory back", [])

    async def _put_by_message(self, what: str, values: list[_Put]) -> list[ObjectRef]:
        """Put into a volume whose memory this process cannot map: one of another host."""
        sent = [
            SentValue(key=value.key, generation=new_generation(), info=value.info, parts=value.parts)
            for value in values
        ]
        locations: list[Location | None] = await self._call(
            what, self._volume(self.volume).put_many, sent, self._report()
        )
        refs = [
            ObjectRef(
                store=self.name,
                key=one.key,
                volume=self.volume,
                info=one.info,
                generation=one.generation,
                location=location,
            )
            for one, location in zip(sent, locations, strict=True)
        ]
        await self.free(await self._rpc(what, None, "announce", pickle.dumps(refs)))
        return refs

    # -- get -----------------------------------------------------------------------------------------------

    def _get_here(self, wanted: Sequence[tuple[KeyOrRef, Rows | None]]) -> list[Any] | None:
        """Values of references into this machine, on the caller's thread; None if any has to be asked for."""
        if self._closed or not all(isinstance(key, ObjectRef) for key, _ in wanted):
            return None
        try:
            return [self._map(key, rows) for key, rows in wanted if isinstance(key, ObjectRef)]
        except _NotLocal:
            return None

    async def _get(self, wanted: list[tuple[KeyOrRef, Rows | None]]) -> list[Any]:
        gets = [_Get(key, rows, key if isinstance(key, ObjectRef) else None) for key, rows in wanted]
        for _ in range(_READ_TRIES):
            # A key that was overwritten after the index had answered is looked up again.
            left = [get for get in gets if not get.done]
            if not left:
                break
            await self._locate(left)
            await self._read([get for get in left if not get.done])
        missing = [_name(get.key) for get in gets if not get.done]
        if missing:
            raise KeyMissing(f"{', '.join(map(repr, missing))} not in store {self.name!r}")
        return [get.value for get in gets]

    async def _locate(self, gets: list[_Get]) -> None:
        """Find the references of keys; values that stock clients put are read at once."""
        named = [(get, get.key) for get in gets if isinstance(get.key, str)]
        if not named:
            return
        located = await self._rpc("looking up keys", None, "locate", [key for _, key in named])
        for (get, key), found in zip(named, located, strict=True):
            get.ref = found.ref
            if found.ref is None and not found.stock:
                raise KeyMissing(f"{key!r} is not in store {self.name!r}")
            if found.ref is None:
                get.finish(await self._bounded(f"get of {key!r}", self._stock_client().get(key)))

    async def _read(self, gets: list[_Get]) -> None:
        """Read values by their references. One whose key was overwritten meanwhile is left as it is."""
        elsewhere: dict[str, list[_Get]] = {}
        for get in gets:
            ref = get.ref
            assert ref is not None
            try:
                if get.rows is None or ref.info.nbytes < _THREAD_BYTES:
                    get.finish(self._map(ref, get.rows))
                else:
                    get.finish(await asyncio.to_thread(self._map, ref, get.rows))
            except _NotLocal:
                elsewhere.setdefault(ref.volume, []).append(get)
            except KeyMissing:
                if isinstance(get.key, ObjectRef):
                    raise
        await asyncio.gather(*(self._read_by_message(volume, some) for volume, some in elsewhere.items()))

    def _map(self, ref: ObjectRef, rows: Rows | None) -> Any:
        """Read from this machine's shared memory, on any thread.

        Raises:
            _NotLocal: the volume has to be asked.
        """
        memory = None if ref.location is None else self._memory(ref.volume)
        if memory is None:
            raise _NotLocal
        try:
            value = memory.read(ref, rows)
        except OSError as error:
            # No descriptor or mapping left in this process: the volume has some.
            raise _NotLocal from error
        self.counters.gets += 1
        self.counters.gets_shared += 1
        return value

    async def _read_by_message(self, volume: str, gets: list[_Get]) -> None:
        """Read values of one volume by message or RDMA, without the rows that were read before."""
        refs = [get.ref for get in gets if get.ref is not None]
        cached = [self._cache.plan(ref, get.rows) for ref, get in zip(refs, gets, strict=True)]
        request = [
            ValueRequest(key=ref.key, generation=ref.generation, rows=read.fetch)
            for ref, read in zip(refs, cached, strict=True)
        ]
        what, actor = f"get of {refs[0].key!r}", self._volume(volume)
        replies: list[ValueReply] = await self._call(what, actor.get_many, request, self._rdma)
        offers = [reply.offer.number for reply in replies if reply.offer is not None]
        if offers:
            replies = [await self._bounded(what, rdma.fetch(reply)) for reply in replies]
            await self._call(what, actor.withdraw, offers)
        for get, ref, read, reply in zip(gets, refs, cached, replies, strict=True):
            if reply.info is not None:
                get.finish(decode(*self._cache.complete(read, reply.info, reply.parts)))
                self.counters.gets += 1
                self.counters.bytes_out += reply.info.nbytes
                continue
            self._cache.forget(ref.generation)
            if reply.problem != "missing":
                raise ValueError(reply.problem)
            if isinstance(get.key, ObjectRef):
                raise KeyMissing(f"{ref.key!r} is not in store {self.name!r}: deleted or overwritten")

    # -- delete --------------------------------------------------------------------------------------------

    async def _delete(self, keys: Sequence[KeyOrRef], missing_ok: bool) -> None:
        if not keys:
            return
        request = [(_name(key), key.generation if isinstance(key, ObjectRef) else None) for key in keys]
        found = await self._rpc(f"delete of {request[0][0]!r}", None, "retract", request)
        await self.free([deleted for each in found for deleted in each])
        missing = [_name(key) for key, each in zip(keys, found, strict=True) if not each]
        if missing and not missing_ok:
            raise KeyMissing(f"{', '.join(map(repr, missing))} not in store {self.name!r}")

    async def free(self, deleted: Sequence[DeletedValue]) -> None:
        """Have volumes free the bytes of values that no key names any more."""
        by_volume: dict[str, list[DeletedValue]] = {}
        for value in deleted:
            by_volume.setdefault(value.volume, []).append(value)
        await asyncio.gather(
            *(
                self._rpc(f"delete of {values[0].key!r}", volume, "delete", values)
                for volume, values in by_volume.items()
            )
        )

    # -- volumes, the index, and messages to them ----------------------------------------------------------

    def _memory(self, volume: str) -> SharedVolume | None:
        """A volume's shared memory, if it is this machine's."""
        with self._memory_lock:  # callers' threads read, the loop writes: one view of a volume for all
            if volume not in self._memories:
                prefix = self._spec.memory.get(volume, "")
                ours = self._spec.sharing == "machine" or volume.split(":")[0] == self._host_id
                self._memories[volume] = SharedVolume.open(prefix) if prefix and ours else None
            return self._memories[volume]

    def _volume(self, volume: str) -> Any:
        if volume not in self._volumes:
            if volume not in self._spec.volumes:
                raise StoreError(f"store {self.name!r} has no volume {volume!r}")
            self._volumes[volume] = self._spec.volume(volume)
        return self._volumes[volume]

    def _stock_client(self) -> Any:
        if self._stock is None:
            self._stock = self._spec.stock_client()
        return self._stock

    async def lease(self, ref: ObjectRef, holder: str, seconds: float) -> None:
        """Hold up a value's deletion for so long from now; 0 ends the lease. For snapshots."""
        endpoint = self._volume(ref.volume).lease
        await self._call(f"snapshot of {ref.key!r}", endpoint, ref.key, ref.generation, holder, seconds)

    async def _rpc(self, what: str, volume: str | None, method: str, *args: Any) -> Any:
        """Call a volume, or the index, past its endpoints."""
        actor, address = self._spec.index, self._spec.index_address
        if volume is not None:
            actor, address = self._volume(volume), self._spec.addresses[volume]

        def alive() -> Awaitable[Any]:
            answer: Awaitable[Any] = actor.identify.call_one().as_asyncio()
            return answer

        return await self._bounded(what, self._rpc_client.call(address, alive, method, args))

    async def _call(self, what: str, endpoint: Any, *args: Any) -> Any:
        return await self._bounded(what, endpoint.call_one(*args).as_asyncio())

    async def _bounded(self, what: str, answer: Awaitable[T]) -> T:
        """Wait for an actor's answer, `timeout_s` at most; failures become the store's errors."""
        try:
            async with asyncio.timeout(self._spec.timeout_s):
                return await answer
        except TimeoutError as error:
            limit = self._spec.timeout_s
            raise StoreError(f"{what}: store {self.name!r} did not answer within {limit} s") from error
        except Exception as error:
            raise failure_of(what, self.name, error) from error


_Job = tuple[SegmentWriter, Location, _Put]
"""A value to be copied: by whom, and to where."""


def _copy(jobs: Sequence[_Job]) -> None:
    for writer, location, value in jobs:
        try:
            writer.write(location, value.parts)
        except OSError as error:
            raise StoreError(f"{value.key!r} could not be written: {error.strerror}") from error


def _total(values: Sequence[_Put]) -> int:
    return total_bytes([value.sizes for value in values])


def _name(key: KeyOrRef) -> str:
    return key.key if isinstance(key, ObjectRef) else key
