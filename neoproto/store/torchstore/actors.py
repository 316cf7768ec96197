"""The store's actors: the run's one global store.

    client ──put_many──> Volume (one a host, or one a local rank)      holds bytes
       └────announce───> Index (one, in a process of its own)          holds references, never bytes
    stock TorchStore client ──get_or_spawn_controller(name)──> Directory ──> the same Index and Volumes

A stock client calls the endpoints that TorchStore's own actors have. What they do for it is in
`stock`, which is imported with the first such call: TorchStore and torch take seconds to import, and
hundreds of megabytes, in every process.
"""

# mypy: disable-error-code="untyped-decorator, misc"

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import neoproto.private_api.monarch  # noqa: F401 - first: it sets the environment that Monarch reads when imported

# isort: split

from monarch.actor import Actor, current_rank, endpoint

from neoproto.errors import StoreClosed, StoreError
from neoproto.private_api.monarch_ports import Address
from neoproto.store.base import Location, ObjectRef
from neoproto.store.messages import (
    DeletedValue,
    KeyLocation,
    SentValue,
    ValueReply,
    ValueRequest,
    text_of,
)
from neoproto.store.shm import remove_files
from neoproto.store.torchstore.directory import close_directory, open_directory
from neoproto.store.torchstore.rdma import RdmaOffers, available
from neoproto.store.torchstore.rpc import RpcServer
from neoproto.store.volume import VolumeContents, VolumeOptions, volume_ids

if TYPE_CHECKING:
    from neoproto.store.torchstore.stock import StockIndex, StockVolume

Strategy = Literal["host", "local_rank"]
Remote = Literal["auto", "rdma", "message"]

_START_TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True)
class VolumeAddress:
    """What clients need to know of a volume.

    Attributes:
        volume: its id.
        prefix: how the names of its files in shared memory begin; "" if it has none.
        rdma: whether it has the hardware.
        address: where it is called past its endpoints.
    """

    volume: str
    prefix: str
    rdma: bool
    address: Address


@dataclass(frozen=True, kw_only=True, slots=True)
class StoreSpec:
    """What a process needs to attach to a store. Travels in Monarch messages.

    Attributes:
        name: the store's name; stock clients use it as `store_name`.
        strategy: "host" (one volume a host) or "local_rank" (one a local rank of each host).
        volumes: volume id -> its coordinates in `volume_mesh`.
        memory: volume id -> how the names of its files in shared memory begin; "" if it has none.
        sharing: which volumes a client reads and writes in shared memory: "machine" all whose files it finds,
            "host" those of its own host id.
        volume_mesh, index: the actors.
        addresses, index_address: where they are called past their endpoints; see `torchstore.rpc`.
        remote: how large values come from other hosts: "rdma", "message", or "auto", which is RDMA where both
            sides have the hardware.
        timeout_s: how long one operation may take.
    """

    name: str
    strategy: Strategy
    volumes: dict[str, dict[str, int]]
    memory: dict[str, str]
    sharing: Literal["machine", "host", "off"]
    volume_mesh: Any
    index: Any
    addresses: dict[str, Address]
    index_address: Address
    remote: Remote
    timeout_s: float

    def volume(self, volume_id: str) -> Any:
        """The actor of one volume."""
        return self.volume_mesh.slice(**self.volumes[volume_id])

    def stock_client(self) -> Any:
        """A TorchStore client, for values that TorchStore's own API put."""
        from neoproto.store.torchstore.stock import StockStrategy, stock_client

        return stock_client(StockStrategy(self.volume_mesh, self.volumes, self.index))


class Volume(Actor):
    """Holds the bytes of one host, or of one local rank. For stock clients, a TorchStore `StorageVolume`."""

    def __init__(self, ids: Sequence[str], options: VolumeOptions) -> None:
        self.volume_id: str = ids[current_rank().rank]
        self.contents = VolumeContents(options)
        self.offers = RdmaOffers()
        self._stock_volume: StockVolume | None = None
        self._rpc_server: RpcServer | None = None

    def _stock(self) -> StockVolume:
        """What stock clients put and read; made when the first of them calls."""
        if self._stock_volume is None:
            from neoproto.store.torchstore.stock import StockVolume

            self._stock_volume = StockVolume(self.contents)
        return self._stock_volume

    @endpoint
    async def identify(self) -> VolumeAddress:
        """Its address, and what its clients need to know."""
        if self._rpc_server is None:
            contents = self.contents
            methods = (contents.reserve, contents.commit, contents.delete)
            self._rpc_server = RpcServer("volume", {method.__name__: method for method in methods})
        return VolumeAddress(self.volume_id, self.contents.prefix, available(), self._rpc_server.address)

    @endpoint
    async def close(self) -> None:
        """Forget every value and refuse new ones."""
        self.contents.close()
        if self._stock_volume is not None:
            self._stock_volume.reset()

    @endpoint
    async def put_many(
        self, sent: list[SentValue], report: tuple[str, dict[str, int]]
    ) -> list[Location | None]:
        """Keep values of a client of another host; the index announces them afterwards."""
        return await self.contents.put(sent, report)

    @endpoint
    async def get_many(self, wanted: list[ValueRequest], rdma: bool) -> list[ValueReply]:
        """Read values, or of each some rows; large ones are on offer if the caller can use `rdma`."""
        replies = [self.contents.get(item) for item in wanted]
        return [await self.offers.instead(reply) for reply in replies] if rdma else replies

    @endpoint
    async def withdraw(self, offers: list[int]) -> None:
        """See `RdmaOffers.withdraw`."""
        await self.offers.withdraw(offers)

    @endpoint
    async def forget(self, values: list[DeletedValue]) -> None:
        """`VolumeContents.delete`, for the index."""
        self.contents.delete(values)

    @endpoint
    async def lease(self, key: str, generation: int, holder: str, seconds: float) -> None:
        """See `VolumeContents.lease`."""
        self.contents.lease(key, generation, holder, seconds)

    @endpoint
    async def stats(self) -> dict[str, int]:
        """See `VolumeContents.stats`; without stock clients' values. `offered`: answers read by RDMA."""
        return self.contents.stats() | {"offered": self.offers.made}

    # -- what a stock client calls -------------------------------------------------------------------------

    @endpoint
    async def get_id(self) -> str:
        return self.volume_id

    @endpoint
    async def put(self, key: str, transport_buffer: Any, request: Any) -> None:
        await self._stock().put(key, transport_buffer, request)

    @endpoint
    async def get(self, key: str, transport_buffer: Any, request: Any) -> Any:
        return await self._stock().get(key, transport_buffer, request)

    @endpoint
    async def get_meta(self, key: str, request: Any = None) -> Any:
        return await self._stock().get_meta(key, request)

    @endpoint
    async def delete(self, key: str) -> None:
        await self._stock().delete(key)

    @endpoint
    async def reset(self) -> None:
        self.contents.reset()
        if self._stock_volume is not None:
            self._stock_volume.reset()


class Index(Actor):
    """Says where every key is: references to our clients' values, and notes on those of stock clients.

    Stock clients call it as a TorchStore `Controller`. All endpoints are async: Monarch 0.7 refuses an actor
    that mixes two kinds, as TorchStore's does.

    Attributes:
        refs: key -> the newest value of ours under it.
    """

    def __init__(self, volume_mesh: Any, volumes: dict[str, dict[str, int]]) -> None:
        self._volume_mesh, self._volumes = volume_mesh, volumes
        self.refs: dict[str, ObjectRef] = {}
        self._stock_index: StockIndex | None = None
        self._rpc_server: RpcServer | None = None
        self._open = True

    def _stock(self) -> StockIndex:
        """Where the values of stock clients are; made when the first of them calls."""
        if self._stock_index is None:
            from neoproto.store.torchstore.stock import StockIndex

            self._stock_index = StockIndex()
        return self._stock_index

    @property
    def _stock_volumes(self) -> dict[str, Any]:
        """Key -> volumes, of what stock clients put."""
        return {} if self._stock_index is None else self._stock_index.keys_to_storage_volumes

    @endpoint
    async def identify(self) -> Address:
        """Where it is called past its endpoints."""
        if self._rpc_server is None:
            methods = (self.announce, self.locate, self.retract)
            self._rpc_server = RpcServer("index", {method.__name__: method for method in methods})
        return self._rpc_server.address

    def announce(self, packed: bytes) -> list[DeletedValue]:
        """Make values visible, in place of older ones, which are returned so that their bytes can go."""
        self._check_open()
        displaced = []
        refs: list[ObjectRef] = pickle.loads(packed)
        for ref in refs:
            displaced += self._forget(ref.key)
            self.refs[ref.key] = ref
        return displaced

    def locate(self, keys: list[str]) -> list[KeyLocation]:
        """Where keys are."""
        self._check_open()
        return [KeyLocation(ref=self.refs.get(key), stock=key in self._stock_volumes) for key in keys]

    def retract(self, keys: list[tuple[str, int | None]]) -> list[list[DeletedValue]]:
        """Make values invisible; with a generation, only if it is the newest. Returns what each key had."""
        self._check_open()
        found: list[list[DeletedValue]] = []
        for key, generation in keys:
            ref = self.refs.get(key)
            stale = generation is not None and (ref is None or ref.generation != generation)
            found.append([] if stale else self._forget(key))
        return found

    def _check_open(self) -> None:
        if not self._open:
            raise StoreClosed("the store is closed")

    def _forget(self, key: str) -> list[DeletedValue]:
        volumes = self._stock_volumes.pop(key, {})
        deleted = [DeletedValue(key=key, generation=0, volume=volume) for volume in volumes]
        if (ref := self.refs.pop(key, None)) is not None:
            deleted.append(_deleted(ref))
        return deleted

    @endpoint
    async def locate_volumes(self, key: str) -> Any:
        return self._stock().locate(key, self.refs.get(key))

    @endpoint
    async def notify_put(self, key: str, request: Any, storage_volume_id: str) -> None:
        old = self.refs.pop(key, None)
        if old is not None and old.volume != storage_volume_id:
            volume = self._volume_mesh.slice(**self._volumes[old.volume])
            await volume.forget.call_one([_deleted(old)])
        self._stock().on_put(key, request, storage_volume_id)

    @endpoint
    async def notify_delete(self, key: str, storage_volume_id: str) -> None:
        if self.refs.pop(key, None) is None:
            self._stock().on_delete(key, storage_volume_id)

    @endpoint
    async def keys(self, prefix: str | None = None) -> list[str]:
        every = [*self.refs, *self._stock_volumes]
        return [key for key in every if prefix is None or key == prefix or key.startswith(f"{prefix}.")]

    @endpoint
    async def teardown(self) -> None:
        self._open = False
        self.refs.clear()
        self._stock_index = None


def _deleted(ref: ObjectRef) -> DeletedValue:
    slot = 0 if ref.location is None else ref.location.slot
    return DeletedValue(key=ref.key, generation=ref.generation, volume=ref.volume, slot=slot)


class StoreServer:
    """The run's store, as its root sees it: starts the actors and ends them."""

    def __init__(self, spec: StoreSpec, directory: Any, index_procs: Any) -> None:
        self._spec, self._directory, self._index_procs = spec, directory, index_procs
        self._closed = False

    @classmethod
    async def start(
        cls,
        *,
        procs: Any,
        name: str,
        strategy: Strategy,
        timeout_s: float,
        host_ids: Sequence[str] | None = None,
        index_procs: Any = None,
        start_timeout_s: float | None = None,
        limit_bytes: int = 0,
        spill: bool = False,
        sharing: Literal["machine", "host", "off"] = "machine",
        remote: Remote = "auto",
    ) -> StoreServer:
        """Start volumes on `procs`, and the index in a process of its own.

        Args:
            procs: a Monarch ProcMesh, owned by the caller: one process a host for "host", one for each local
                rank of each host for "local_rank".
            name: unique to the run.
            timeout_s: for each operation, later.
            host_ids: the hosts' names, in order, as `StoreClient.attach` gets them; "0", "1", … if None.
            index_procs: a ProcMesh of one process for the index, owned by the caller; if None, one is spawned
                on the first host, and stopped by `close`.
            start_timeout_s: for starting, imports included; None is 120 s, or `timeout_s` if
                that is longer.
            limit_bytes: bound on each volume's shared memory; 0 for a part of what the host has.
            spill: whether values that shared memory has no room for go to files in the volumes' temporary
                folder, which the caller removes.
            sharing: see `StoreSpec`; "off" keeps values in the volumes' own memory.
            remote: see `StoreSpec`.

        Raises:
            StoreError: it did not start in time, or an actor failed.
            ValueError: the processes do not fit the strategy.
        """
        hosts = procs.size("hosts") if "hosts" in procs.extent else 1
        ids = volume_ids(
            strategy, [str(i) for i in range(hosts)] if host_ids is None else host_ids, len(procs)
        )
        limit = max(_START_TIMEOUT_S, timeout_s) if start_timeout_s is None else start_timeout_s
        own_index = None
        if index_procs is None:
            first = procs.slice(**dict.fromkeys(procs.extent, 0))
            index_procs = own_index = first.host_mesh.spawn_procs(per_host={"index": 1})
        try:
            async with asyncio.timeout(limit):
                options = VolumeOptions(
                    store=name,
                    shared_memory=sharing != "off",
                    limit_bytes=limit_bytes,
                    volumes_on_host=len(procs) // hosts,
                    spill=spill,
                )
                mesh = procs.spawn("volumes", Volume, ids, options)
                cards = {card.volume: (dict(point), card) for point, card in await mesh.identify.call()}
                volumes = {volume: point for volume, (point, _) in cards.items()}
                index = index_procs.spawn("index", Index, mesh, volumes)
                index = index.slice(**dict.fromkeys(index.extent, 0))
                index_address = await index.identify.call_one()
                directory = await open_directory(name, mesh, volumes, index)
        except TimeoutError as error:
            raise StoreError(f"store {name!r} did not start within {limit} s") from error
        everywhere = all(card.rdma for _, card in cards.values())
        spec = StoreSpec(
            name=name,
            strategy=strategy,
            volumes=volumes,
            memory={volume: card.prefix for volume, (_, card) in cards.items()},
            sharing=sharing,
            volume_mesh=mesh,
            index=index,
            addresses={volume: card.address for volume, (_, card) in cards.items()},
            index_address=index_address,
            remote="message" if remote == "auto" and not everywhere else remote,
            timeout_s=timeout_s,
        )
        return cls(spec, directory, own_index)

    def spec(self) -> StoreSpec:
        """What other processes attach with."""
        return self._spec

    async def close(self, timeout_s: float) -> None:
        """Forget every value and refuse new ones. Closing twice is harmless.

        The actors answer late callers until their processes end: a message to a stopped actor brings down the
        actor that sent it.

        Raises:
            StoreError: some had died, or did not answer in time; they die with their processes.
        """
        if self._closed:
            return
        self._closed = True
        index, volumes = self._spec.index, self._spec.volume_mesh
        farewells = (index.teardown, volumes.close)
        try:
            async with asyncio.timeout(timeout_s):
                outcomes = await asyncio.gather(
                    close_directory(self._spec.name, self._directory),
                    *(farewell.call().as_asyncio() for farewell in farewells),
                    return_exceptions=True,
                )
                if self._index_procs is not None:
                    await self._index_procs.stop()
        except TimeoutError as error:
            raise StoreError(f"store {self._spec.name!r} did not close within {timeout_s} s") from error
        finally:
            # What a volume that died left on this host; those of other hosts go at the next start there.
            for prefix in filter(None, self._spec.memory.values()):
                remove_files(f"{prefix}.")
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise StoreError(f"store {self._spec.name!r}: {text_of(outcome)}") from outcome
