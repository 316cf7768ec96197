"""A process's client of the store.

    put   encode ──> shared memory of this host's volume (`putter`) ──> volume and index are told
    get   by reference into this machine: mapped on the caller's thread, no message
          else: client's loop ──> index (by key) ──> shared memory, or the volume

A value is announced to the index when its bytes are in location, and an overwritten one is dropped after the
index has the new one: a reader finds the old value or the new one.
"""

from __future__ import annotations

import asyncio
import threading
import uuid
from collections.abc import Awaitable, Coroutine, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from monarch.actor import context

from neoproto.engines.monarch import has_context
from neoproto.errors import KeyMissing, StoreError
from neoproto.store.base import (
    KeyOrRef,
    ObjectRef,
    Rows,
    StoreFuture,
    check_key,
    forget_client,
    fresh_key,
    named_values,
    pair_rows,
    register_client,
)
from neoproto.store.codec import decode, encode
from neoproto.store.counters import REPORTED, ClientCounters
from neoproto.store.loop import LoopThread
from neoproto.store.rowcache import CachedRead, RemoteRowCache
from neoproto.store.shm import Reservation, SharedVolume
from neoproto.store.torchstore import rdma
from neoproto.store.torchstore.putter import Putter, Written, new_generation
from neoproto.store.torchstore.rpc import RpcClient
from neoproto.store.torchstore.snapshots import Lease, Snapshot
from neoproto.store.wire import DeletedValue, SentValue, ValueReply, ValueRequest, failure_of, pack

if TYPE_CHECKING:
    from neoproto.store.torchstore.engine import StoreSpec
    from neoproto.store.torchstore.in_place import InPlaceWriter

T = TypeVar("T")

_READ_TRIES = 5
_THREAD_BYTES = 1 << 20
_CACHE_BYTES = 256 << 20
_home: str = ""


def home_volume() -> str:
    """The volume this process puts into; "" before a client is attached."""
    return _home


class _NotHere(Exception):
    """A value is not in this machine's shared memory: no error, it says where to go on."""


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
        self._putter: Putter | None = None
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
            host_id: this host, as `StoreServer.start` was told; one without a volume puts into the first.
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

        if blocking and (here := self._read_all_here([(key, rows)])) is not None:
            return here[0]

        async def first() -> Any:
            return (await self._get([(key, rows)]))[0]

        return self._run(first(), blocking)

    def get_batch(
        self, keys: Sequence[KeyOrRef], *, rows: Sequence[Rows | None] | None = None, blocking: bool = True
    ) -> Any:
        """See `ObjectStore.get_batch`."""
        wanted = pair_rows(keys, rows)
        if blocking and (here := self._read_all_here(wanted)) is not None:
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
        found: list[str] = self._run(self._call("listing keys", self._spec.index.keys, prefix), True)
        return found

    def in_place(self) -> InPlaceWriter | None:
        """Values to be written in place; None if this process cannot write to its volume's memory."""
        from neoproto.store.torchstore.in_place import (
            InPlaceWriter,  # with torch, which not every process needs
        )

        memory = self._memory(self.volume)
        return None if memory is None else InPlaceWriter(self, memory)

    def maps(self, ref: ObjectRef) -> bool:
        """Whether the value lies in memory that this process can map."""
        return ref.location is not None and self._memory(ref.volume) is not None

    def fail(self, reason: str) -> None:
        """Have operations under way and later ones fail with `StoreError(reason)`: the store is lost."""
        self._loop.fail(reason)

    def snapshot(self, key: KeyOrRef, *, seconds: float = 60.0) -> Snapshot:
        """Take a lease on a value: it stays readable through the snapshot, also when it is deleted meanwhile.

        The lease renews itself while this process lives, and runs out so many seconds after its death.

        Raises:
            KeyMissing: the value is gone, or was put by a stock TorchStore client.
        """

        async def take() -> tuple[ObjectRef, Lease]:
            ref = key if isinstance(key, ObjectRef) else (await self._locate({0: key}, {})).get(0)
            if ref is None:
                raise KeyMissing(f"{key!r} was put by a stock client: no snapshots of such values")
            holder = uuid.uuid4().hex
            what = f"snapshot of {ref.key!r}"
            say = self._volume(ref.volume).lease

            async def renew(more: float) -> None:
                await self._call(what, say, ref.key, ref.generation, holder, more)

            await renew(seconds)
            return ref, Lease(renew, seconds)

        ref, lease = self._run(take(), True)
        self._loop.submit(lease.keep())
        return Snapshot(self, ref, lease)

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

        found: dict[str, int] = self._run(ask(), True)
        return found

    def _report(self) -> tuple[str, dict[str, int]]:
        """Who this is and what it has read so far, for the run's sums."""
        return self._id, {name: self._own_stats()[name] for name in REPORTED}

    def _own_stats(self) -> dict[str, int]:
        return self.counters.with_memory(list(self._memories.values()), self._cache)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run something on the client's loop and wait for it."""
        result: T = self._run(work, True)
        return result

    def close(self) -> None:
        """End this client; operations under way fail with `StoreClosed`. Closing twice is harmless."""
        forget_client(self)
        self._closed = True
        self._loop.close()
        self._rpc_client.close()
        if self._putter is not None:
            self._putter.close()

    def _run(self, work: Coroutine[Any, Any, Any], blocking: bool) -> Any:
        if blocking and self._loop.is_current:
            work.close()
            raise RuntimeError("a blocking store operation cannot run on the client's own loop")
        future = self._loop.submit(work)
        return future.result() if blocking else StoreFuture(future)

    async def _put(self, named: list[tuple[str, Any]]) -> list[ObjectRef]:
        if not named:
            return []
        what = f"put of {named[0][0]!r}" + (f" and {len(named) - 1} more" if len(named) > 1 else "")
        memory = self._memory(self.volume)
        refs = await (self._send(what, named) if memory is None else self._share(what, named, memory))
        self.counters.puts += len(refs)
        self.counters.bytes_in += sum(ref.info.nbytes for ref in refs)
        return refs

    async def _share(self, what: str, named: list[tuple[str, Any]], memory: SharedVolume) -> list[ObjectRef]:
        """Put through shared memory: written here, then both the volume and the index are told."""
        if self._putter is None:
            self._putter = Putter(self.name, self.volume, memory, self.reserve)
        return await self.publish(what, await self._putter.write(what, named))

    async def publish(self, what: str, written: Written) -> list[ObjectRef]:
        """Announce values whose bytes are in place; for the client's own writers."""
        packed = pack(written.refs)
        try:
            told: tuple[Any, Any] = await asyncio.gather(
                self._rpc(what, self.volume, "commit", written.tokens, packed, self._report()),
                self._rpc(what, None, "announce", packed),
                return_exceptions=True,
            )
        finally:
            written.close()
        committed, announced = told
        if not isinstance(announced, BaseException):
            if isinstance(committed, BaseException):
                await self._delete(written.refs, missing_ok=True)
            await self.drop(announced)
        for outcome in told:
            if isinstance(outcome, BaseException):
                raise outcome
        return written.refs

    async def reserve(
        self, what: str, wanted: list[tuple[int, int]], retired: list[int]
    ) -> list[Reservation]:
        """Memory of this host's volume to write into; `retired` are reservations done with."""
        reservations: list[Reservation] = await self._rpc(what, self.volume, "reserve", wanted, retired)
        return reservations

    async def _send(self, what: str, named: list[tuple[str, Any]]) -> list[ObjectRef]:
        """Put by messages, into a volume of another host."""
        sent = []
        for key, value in named:
            info, parts = encode(value)
            sent.append(SentValue(key=key, generation=new_generation(), info=info, parts=parts))
        places = await self._call(what, self._volume(self.volume).put_many, sent, self._report())
        refs = [
            ObjectRef(
                store=self.name,
                key=one.key,
                volume=self.volume,
                info=one.info,
                generation=one.generation,
                location=location,
            )
            for one, location in zip(sent, places, strict=True)
        ]
        await self.drop(await self._rpc(what, None, "announce", pack(refs)))
        return refs

    async def _get(self, wanted: list[tuple[KeyOrRef, Rows | None]]) -> list[Any]:
        values: dict[int, Any] = {}
        for _ in range(_READ_TRIES):
            left = [(i, key, rows) for i, (key, rows) in enumerate(wanted) if i not in values]
            if not left:
                break
            refs = await self._locate({i: key for i, key, _ in left}, values)
            await self._read([(i, refs[i], rows) for i, _, rows in left if i in refs], values, wanted)
        missing = [_name(key) for i, (key, _) in enumerate(wanted) if i not in values]
        if missing:
            raise KeyMissing(f"{', '.join(map(repr, missing))} not in store {self.name!r}")
        return [values[i] for i in range(len(wanted))]

    async def _locate(self, keys: Mapping[int, KeyOrRef], values: dict[int, Any]) -> dict[int, ObjectRef]:
        """References for keys; values that stock clients put are read on the spot."""
        refs = {i: key for i, key in keys.items() if isinstance(key, ObjectRef)}
        named = {i: key for i, key in keys.items() if isinstance(key, str)}
        if not named:
            return refs
        located = await self._rpc("looking up keys", None, "locate", list(named.values()))
        for (i, key), found in zip(named.items(), located, strict=True):
            if found.ref is not None:
                refs[i] = found.ref
            elif found.stock:
                values[i] = await self._bounded(f"get of {key!r}", self._stock_client().get(key))
            else:
                raise KeyMissing(f"{key!r} is not in store {self.name!r}")
        return refs

    async def _read(
        self,
        wanted: list[tuple[int, ObjectRef, Rows | None]],
        values: dict[int, Any],
        asked: list[tuple[KeyOrRef, Rows | None]],
    ) -> None:
        """Read what is there into `values`; what a key named a moment ago may be gone, and is left out."""
        by_volume: dict[str, list[tuple[int, ObjectRef, Rows | None]]] = {}
        plans: dict[int, CachedRead] = {}
        for item in wanted:
            i, ref, rows = item
            try:
                if rows is None or ref.info.nbytes < _THREAD_BYTES:
                    values[i] = self._read_here(ref, rows)
                else:
                    values[i] = await asyncio.to_thread(self._read_here, ref, rows)
            except _NotHere:
                plans[i] = self._cache.plan(ref, rows)
                by_volume.setdefault(ref.volume, []).append(item)
            except KeyMissing:
                if isinstance(asked[i][0], ObjectRef):
                    raise
        answers = await asyncio.gather(
            *(self._ask(volume, items, plans) for volume, items in by_volume.items())
        )
        for items, received in zip(by_volume.values(), answers, strict=True):
            for (i, ref, _), answer in zip(items, received, strict=True):
                if answer.info is not None:
                    info, parts = self._cache.complete(plans[i], answer.info, answer.parts)
                    values[i] = decode(info, parts)
                    self.counters.gets += 1
                    self.counters.bytes_out += answer.info.nbytes
                    continue
                self._cache.forget(ref.generation)
                if answer.problem != "missing":
                    raise ValueError(answer.problem)
                if isinstance(asked[i][0], ObjectRef):
                    raise KeyMissing(f"{ref.key!r} is not in store {self.name!r}: deleted or overwritten")

    def _read_here(self, ref: ObjectRef, rows: Rows | None) -> Any:
        """Read from this machine's shared memory, on any thread.

        Raises:
            _NotHere: the volume has to be asked.
        """
        memory = None if ref.location is None else self._memory(ref.volume)
        if memory is None:
            raise _NotHere
        try:
            value = memory.read(ref, rows)
        except OSError as error:
            # No descriptor or mapping left in this process: the volume has some.
            raise _NotHere from error
        self.counters.gets += 1
        self.counters.gets_shared += 1
        return value

    def _read_all_here(self, wanted: Sequence[tuple[KeyOrRef, Rows | None]]) -> list[Any] | None:
        """Values of references into this machine; None if any has to be asked for."""
        if self._closed or not all(isinstance(key, ObjectRef) for key, _ in wanted):
            return None
        try:
            return [self._read_here(key, rows) for key, rows in wanted if isinstance(key, ObjectRef)]
        except _NotHere:
            return None

    def _memory(self, volume: str) -> SharedVolume | None:
        """A volume's shared memory, if it is this machine's."""
        with self._memory_lock:
            if volume not in self._memories:
                prefix = self._spec.memory.get(volume, "")
                ours = self._spec.sharing == "machine" or volume.split(":")[0] == self._host_id
                self._memories[volume] = SharedVolume.open(prefix) if prefix and ours else None
            return self._memories[volume]

    async def _ask(
        self, volume: str, items: list[tuple[int, ObjectRef, Rows | None]], plans: Mapping[int, CachedRead]
    ) -> list[ValueReply]:
        request = [
            ValueRequest(key=ref.key, generation=ref.generation, rows=plans[i].fetch) for i, ref, _ in items
        ]
        what, actor = f"get of {items[0][1].key!r}", self._volume(volume)
        answers: list[ValueReply] = await self._call(what, actor.get_many, request, self._rdma)
        offers = [answer.offer.number for answer in answers if answer.offer is not None]
        if offers:
            answers = [await self._bounded(what, rdma.fetch(answer)) for answer in answers]
            await self._call(what, actor.withdraw, offers)
        return answers

    async def _delete(self, keys: Sequence[KeyOrRef], missing_ok: bool) -> None:
        if not keys:
            return
        request = [(_name(key), key.generation if isinstance(key, ObjectRef) else None) for key in keys]
        found = await self._rpc(f"delete of {request[0][0]!r}", None, "retract", request)
        await self.drop([gone for each in found for gone in each])
        missing = [_name(key) for key, each in zip(keys, found, strict=True) if not each]
        if missing and not missing_ok:
            raise KeyMissing(f"{', '.join(map(repr, missing))} not in store {self.name!r}")

    async def drop(self, gone: list[DeletedValue]) -> None:
        """Let bytes go whose values nobody can find any more."""
        by_volume: dict[str, list[tuple[str, int, int]]] = {}
        for item in gone:
            by_volume.setdefault(item.volume, []).append((item.key, item.generation, item.slot))
        await asyncio.gather(
            *(
                self._rpc(f"delete of {items[0][0]!r}", volume, "delete_many", items)
                for volume, items in by_volume.items()
            )
        )

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
        """Wait for an actor's answer, `timeout_s` at most, and say in the store's words what went wrong."""
        try:
            async with asyncio.timeout(self._spec.timeout_s):
                return await answer
        except TimeoutError as error:
            limit = self._spec.timeout_s
            raise StoreError(f"{what}: store {self.name!r} did not answer within {limit} s") from error
        except Exception as error:
            raise failure_of(what, self.name, error) from error


def _name(key: KeyOrRef) -> str:
    return key.key if isinstance(key, ObjectRef) else key
