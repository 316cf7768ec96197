"""The TorchStore engine: the run's one global store, made of Monarch actors.

    client ──put_many──> Volume (one a host, or one a local rank)      holds bytes
       └────announce───> Index (one, in a process of its own)          holds references, never bytes
    stock TorchStore client ──get_or_spawn_controller(name)──> Directory ──> the same Index and Volumes

This is the only file that imports TorchStore (0.1.2). What it adapts, and until when:

- `Index` makes every endpoint of TorchStore's controller async. Monarch 0.7 refuses an actor that mixes sync
  and async endpoints. Remove when TorchStore's controller has one kind.
- `_attach_stock_client` points a stock `LocalClient` at the index, because `get_or_spawn_controller` puts a
  controller into the program's own process. Remove when TorchStore can place it.
- `_rdma_available` asks Monarch in the words of 0.7; TorchStore's own question is deprecated there and warns.
  Remove when TorchStore asks `is_ibverbs_available`.
"""

# mypy: disable-error-code="untyped-decorator, misc"

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

# TorchStore sets this itself, with a banner, if it is not set when it is imported.
os.environ.setdefault("HYPERACTOR_CODEC_MAX_FRAME_LENGTH", "910737418240")

import torch
from monarch.actor import Actor, context, current_rank, endpoint, get_or_spawn_controller
from monarch.rdma import is_ibverbs_available
from torchstore.client import LocalClient
from torchstore.controller import Controller, ObjectType, StorageInfo
from torchstore.storage_volume import InMemoryStore, StorageVolume
from torchstore.strategy import TorchStoreStrategy
from torchstore.transport import pipe

from neoproto.errors import StoreClosed, StoreError
from neoproto.store.base import ObjectRef, Place
from neoproto.store.client import StoreClient, home_volume
from neoproto.store.pool import Grant
from neoproto.store.shm import remove_files
from neoproto.store.values import Values, VolumeOptions, volume_ids
from neoproto.store.wire import Gone, Located, Received, Sent, Wanted, text_of

__all__ = ["StoreClient", "StoreServer", "StoreSpec"]

Strategy = Literal["host", "local_rank"]

_START_TIMEOUT_S = 120.0
_LOOP_END_S = 1.0


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
        timeout_s: how long one operation may take.
    """

    name: str
    strategy: Strategy
    volumes: dict[str, dict[str, int]]
    memory: dict[str, str]
    sharing: Literal["machine", "host", "off"]
    volume_mesh: Any
    index: Any
    timeout_s: float

    def volume(self, volume_id: str) -> Any:
        """The actor of one volume."""
        return self.volume_mesh.slice(**self.volumes[volume_id])

    def stock_client(self) -> Any:
        """A TorchStore client, for values that TorchStore's own API put."""
        placement = Placement(self.volume_mesh, self.volumes, self.index)
        return LocalClient(controller=self.index, strategy=placement)


class Placement(TorchStoreStrategy):
    """Which volume a stock client puts into. Ours choose for themselves."""

    def __init__(self, volume_mesh: Any, volumes: dict[str, dict[str, int]], index: Any = None) -> None:
        super().__init__()
        self.storage_volumes = volume_mesh
        self.volume_id_to_coord = dict(volumes)
        self.index = index

    @classmethod
    def get_client_id(cls) -> str:
        return home_volume()

    def select_storage_volume(self) -> tuple[Any, str]:
        """The volume of the process's own client, or the first one if it has none."""
        volume_id = self.get_client_id()
        if volume_id not in self.volume_id_to_coord:
            volume_id = next(iter(self.volume_id_to_coord))
        return self.get_storage_volume(volume_id), volume_id


class Storage(InMemoryStore):
    """A volume's values: TorchStore's own (`kv`), and those of our clients beside them."""

    def __init__(self, values: Values) -> None:
        super().__init__()
        self.values = values

    async def put(self, key: str, transport_buffer: Any, request: Any) -> None:
        """A stock client's put: TorchStore's own, and ours under that key is gone."""
        await super().put(key, transport_buffer, request)
        self._drop_ours(key)

    async def get(self, key: str, transport_buffer: Any, request: Any) -> Any:
        """A stock client's get, of its own value or of one of ours."""
        if key not in self.values.newest:
            return await super().get(key, transport_buffer, request)
        value = self.values.value_of(key)
        if isinstance(value, torch.Tensor):
            await transport_buffer.write_from(value)
        else:
            transport_buffer.is_object, transport_buffer.objects = True, value
        return transport_buffer

    async def get_meta(self, key: str, request: Any = None) -> Any:
        if key not in self.values.newest:
            return await super().get_meta(key, request)
        info = self.values.info_of(key)
        return (torch.Size(info.shape), getattr(torch, info.dtype)) if info.kind == "tensor" else "obj"

    async def delete(self, key: str) -> None:
        if not self._drop_ours(key):
            await super().delete(key)

    def reset(self) -> None:
        super().reset()
        self.values.reset()

    def _drop_ours(self, key: str) -> bool:
        generation = self.values.newest.get(key)
        if generation is not None:
            self.values.drop(key, generation)
        return generation is not None


class Volume(StorageVolume):
    """Holds the bytes of one host, or of one local rank."""

    def __init__(self, ids: Sequence[str], options: VolumeOptions) -> None:
        point = current_rank()
        super().__init__(lambda: ids[point.rank])
        self.values = Values(options)
        self.store = Storage(self.values)
        self.closed = False

    def _check_open(self) -> None:
        if self.closed:
            raise StoreClosed("the store is closed")

    @endpoint
    async def identify(self) -> tuple[str, str]:
        """Its id, and how the names of its files in shared memory begin ("" if it has none)."""
        return self.volume_id, self.values.prefix

    @endpoint
    async def close(self) -> None:
        """Forget every value and refuse new ones."""
        self.closed = True
        self.store.reset()
        self.values.close()

    @endpoint
    async def reserve(self, wanted: list[tuple[int, int]], retired: list[int]) -> list[Grant]:
        """See `Values.reserve`; StoreClosed after `close`, as from all below."""
        self._check_open()
        return await self.values.reserve(wanted, retired)

    @endpoint
    async def commit(self, tokens: list[int], refs: list[ObjectRef]) -> None:
        """See `Values.commit`."""
        self._check_open()
        self.values.commit(tokens, refs)
        for ref in refs:
            self.store.kv.pop(ref.key, None)

    @endpoint
    async def put_many(self, sent: list[Sent]) -> list[Place | None]:
        """Keep values. They become visible when the index is told. Returns where each is."""
        self._check_open()
        places = await self.values.keep(sent)
        for value in sent:
            self.store.kv.pop(value.key, None)
        return places

    @endpoint
    async def get_many(self, wanted: list[Wanted]) -> list[Received]:
        """Read values, or of each some rows."""
        self._check_open()
        return [self.values.read(item) for item in wanted]

    @endpoint
    async def delete_many(self, gone: list[tuple[str, int, int]]) -> None:
        """Forget values; those that are gone already are ignored."""
        for key, generation, slot in gone:
            if generation == 0:
                self.store.kv.pop(key, None)
            else:
                self.values.drop(key, generation, slot)

    @endpoint
    async def lease(self, key: str, generation: int, holder: str, seconds: float) -> None:
        """See `Values.lease`; 0 seconds end it."""
        self._check_open()
        if seconds > 0:
            self.values.lease(key, generation, holder, seconds)
        else:
            self.values.end_lease(key, generation, holder)

    @endpoint
    async def stats(self) -> dict[str, int]:
        """See `Values.stats`; TorchStore's own values are not counted."""
        return self.values.stats()


class Index(Controller):
    """Says where every key is. Holds references to our clients' values and TorchStore's notes on its own.

    The endpoints TorchStore's clients call keep their names and meaning; they are all async here.

    Attributes:
        refs: key -> the newest value of ours under it.
    """

    def __init__(self, placement: Placement) -> None:
        super().__init__()
        self.strategy, self.storage_volumes = placement, placement.storage_volumes
        self.num_storage_volumes = len(placement.volume_id_to_coord)
        self.keys_to_storage_volumes: dict[str, dict[str, StorageInfo]] = {}
        self.refs: dict[str, ObjectRef] = {}
        self.is_initialized = True

    @endpoint
    async def announce(self, refs: list[ObjectRef]) -> list[Gone]:
        """Make values visible, in place of older ones, which are returned so that their bytes can go."""
        self._check_open()
        displaced = []
        for ref in refs:
            displaced += self._forget(ref.key)
            self.refs[ref.key] = ref
        return displaced

    @endpoint
    async def locate(self, keys: list[str]) -> list[Located]:
        """Where keys are."""
        self._check_open()
        return [Located(ref=self.refs.get(key), stock=key in self.keys_to_storage_volumes) for key in keys]

    @endpoint
    async def retract(self, keys: list[tuple[str, int | None]]) -> list[list[Gone]]:
        """Make values invisible; with a generation, only if it is the newest. Returns what each key had."""
        self._check_open()
        found: list[list[Gone]] = []
        for key, generation in keys:
            ref = self.refs.get(key)
            stale = generation is not None and (ref is None or ref.generation != generation)
            found.append([] if stale else self._forget(key))
        return found

    def _check_open(self) -> None:
        if not self.is_initialized:
            raise StoreClosed("the store is closed")

    def _forget(self, key: str) -> list[Gone]:
        gone = [
            Gone(key=key, generation=0, volume=volume) for volume in self.keys_to_storage_volumes.pop(key, {})
        ]
        if (ref := self.refs.pop(key, None)) is not None:
            slot = 0 if ref.place is None else ref.place.slot
            gone.append(Gone(key=key, generation=ref.generation, volume=ref.volume, slot=slot))
        return gone

    @endpoint
    async def get_controller_strategy(self) -> TorchStoreStrategy:
        return self.strategy

    @endpoint
    async def locate_volumes(self, key: str) -> dict[str, StorageInfo]:
        ref = self.refs.get(key)
        if ref is not None:
            kind = ObjectType.TENSOR if ref.info.kind == "tensor" else ObjectType.OBJECT
            return {ref.volume: StorageInfo(object_type=kind, tensor_slices={None})}
        located: dict[str, StorageInfo] = Controller.locate_volumes._method(self, key)
        return located

    @endpoint
    async def notify_put(self, key: str, request: Any, storage_volume_id: str) -> None:
        old = self.refs.pop(key, None)
        if old is not None and old.volume != storage_volume_id:
            volume = self.strategy.get_storage_volume(old.volume)
            await volume.delete_many.call_one([(key, old.generation, old.place.slot if old.place else 0)])
        noted = self.keys_to_storage_volumes.get(key, {}).values()
        if request.tensor_slice is None or any(i.object_type != ObjectType.TENSOR_SLICE for i in noted):
            self.keys_to_storage_volumes.pop(key, None)
        Controller.notify_put._method(self, key, request, storage_volume_id)

    @endpoint
    async def notify_delete(self, key: str, storage_volume_id: str) -> None:
        if self.refs.pop(key, None) is None:
            Controller.notify_delete._method(self, key, storage_volume_id)

    @endpoint
    async def keys(self, prefix: str | None = None) -> list[str]:
        every = [*self.refs, *self.keys_to_storage_volumes]
        return [key for key in every if prefix is None or key == prefix or key.startswith(f"{prefix}.")]

    @endpoint
    async def teardown(self) -> None:
        self.is_initialized = False
        self.refs.clear()
        self.keys_to_storage_volumes.clear()


_directory_loops: dict[str, asyncio.AbstractEventLoop] = {}
"""Of this process's directories, by the store's name. Monarch 0.7 ends an actor's loop without closing it."""


async def _close_directory_loop(name: str) -> None:
    loop = _directory_loops.pop(name, None)
    until = time.monotonic() + _LOOP_END_S
    while loop is not None and loop.is_running() and time.monotonic() < until:  # noqa: ASYNC110 - not ours
        await asyncio.sleep(0.005)
    if loop is not None and not loop.is_running():
        loop.close()


class Directory(Actor):
    """Answers, under the store's name, where stock TorchStore clients look for a controller."""

    def __init__(self, name: str, placement: Placement) -> None:
        self._name = name
        self._placement: Placement | None = placement

    @endpoint
    async def get_controller_strategy(self) -> TorchStoreStrategy:
        """The placement, which carries the index."""
        if self._placement is None:
            raise StoreClosed(f"store {self._name!r} is closed")
        return self._placement

    @endpoint
    async def close(self) -> None:
        """End: the actor would keep a thread and descriptors of the program. Monarch keeps the name."""
        self._placement = None
        _directory_loops[self._name] = asyncio.get_running_loop()
        context().actor_instance.stop("the store is closed")


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
        sharing: Literal["machine", "host", "off"] = "machine",
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
            sharing: see `StoreSpec`; "off" keeps values in the volumes' own memory.

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
                )
                mesh = procs.spawn("volumes", Volume, ids, options)
                found = [(dict(point), *told) for point, told in await mesh.identify.call()]
                volumes = {volume: point for point, volume, _ in found}
                placement = Placement(mesh, volumes)
                index = index_procs.spawn("index", Index, placement)
                await index.keys.call()  # its process is up
                placement = Placement(mesh, volumes, index)
                directory = await get_or_spawn_controller(name, Directory, name, placement)
        except TimeoutError as error:
            raise StoreError(f"store {name!r} did not start within {limit} s") from error
        spec = StoreSpec(
            name=name,
            strategy=strategy,
            volumes=volumes,
            memory={volume: prefix for _, volume, prefix in found},
            sharing=sharing,
            volume_mesh=mesh,
            index=index.slice(**dict.fromkeys(index.extent, 0)),
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
        farewells = (self._directory.close, index.teardown, volumes.close)
        try:
            async with asyncio.timeout(timeout_s):
                told = await asyncio.gather(
                    *(farewell.call().as_asyncio() for farewell in farewells), return_exceptions=True
                )
                await _close_directory_loop(self._spec.name)
                if self._index_procs is not None:
                    await self._index_procs.stop()
        except TimeoutError as error:
            raise StoreError(f"store {self._spec.name!r} did not close within {timeout_s} s") from error
        finally:
            # What a volume that died left on this host; those of other hosts go at the next start there.
            for prefix in filter(None, self._spec.memory.values()):
                remove_files(f"{prefix}.")
        for outcome in told:
            if isinstance(outcome, BaseException):
                raise StoreError(f"store {self._spec.name!r}: {text_of(outcome)}") from outcome


class _PayloadFree:
    """The index, as a stock client calls it: objects are left out of what it is told."""

    def __init__(self, index: Any) -> None:
        self._index = index
        self.notify_put = self

    def __getattr__(self, name: str) -> Any:
        return getattr(self._index, name)

    def call(self, key: str, request: Any, volume_id: str) -> Any:
        """`notify_put.call`."""
        return self._index.notify_put.call(key, replace(request, objects=None), volume_id)


def _rdma_available() -> bool:
    return os.environ.get("TORCHSTORE_RDMA_ENABLED", "1") == "1" and bool(is_ibverbs_available())


def _attach_stock_client() -> None:
    original = LocalClient.__init__

    def attach(self: Any, controller: Any, strategy: Any) -> None:
        ours = isinstance(strategy, Placement)
        original(self, _PayloadFree(strategy.index) if ours else controller, strategy)

    LocalClient.__init__ = attach


_attach_stock_client()
pipe.rdma_available = _rdma_available
