"""What the store does for stock TorchStore clients. The only file that imports TorchStore (0.1.2).

    stock client ─> Directory ─> StockStrategy ─> StockClient ─> Index (`StockIndex`), Volume (`StockVolume`)

What it adapts, and until when:

- `StockIndex` is TorchStore's controller as a plain object. Monarch 0.7 refuses an actor that mixes sync and
  async endpoints. Remove when TorchStore's controller has one kind.
- `torchstore.client` makes `StockClient`s, which ask the index: `get_or_spawn_controller` puts a controller
  into the program's own process. Remove when TorchStore can place it.
- `pipe.rdma_available` asks Monarch in the words of 0.7; TorchStore's own are deprecated there and warn.
  Remove when TorchStore asks `is_ibverbs_available`.
"""

# mypy: disable-error-code="misc"

from __future__ import annotations

from dataclasses import replace
from typing import Any

# First: it sets what TorchStore, when it is imported, would set itself, with a banner.
from neoproto.private_api.monarch import endpoint_method

# isort: split

import torch
from torchstore import api
from torchstore.client import LocalClient
from torchstore.controller import Controller, ObjectType, StorageInfo
from torchstore.storage_volume import InMemoryStore
from torchstore.strategy import TorchStoreStrategy
from torchstore.transport import pipe

from neoproto.store.base import ObjectRef
from neoproto.store.torchstore.client import home_volume
from neoproto.store.torchstore.rdma import available
from neoproto.store.volume import VolumeContents


class StockStrategy(TorchStoreStrategy):
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


class StockVolume(InMemoryStore):
    """A volume's values: TorchStore's own (`kv`), and those of our clients beside them."""

    def __init__(self, contents: VolumeContents) -> None:
        super().__init__()
        self.contents = contents
        contents.forget_stock = lambda key: self.kv.pop(key, None)

    async def put(self, key: str, transport_buffer: Any, request: Any) -> None:
        """A stock client's put: TorchStore's own, and ours under that key is gone."""
        await super().put(key, transport_buffer, request)
        self._drop_ours(key)

    async def get(self, key: str, transport_buffer: Any, request: Any) -> Any:
        """A stock client's get, of its own value or of one of ours."""
        if key not in self.contents.newest:
            return await super().get(key, transport_buffer, request)
        value = self.contents.value_of(key)
        if isinstance(value, torch.Tensor):
            await transport_buffer.write_from(value)
        else:
            transport_buffer.is_object, transport_buffer.objects = True, value
        return transport_buffer

    async def get_meta(self, key: str, request: Any = None) -> Any:
        if key not in self.contents.newest:
            return await super().get_meta(key, request)
        info = self.contents.info_of(key)
        return (torch.Size(info.shape), getattr(torch, info.dtype)) if info.kind == "tensor" else "obj"

    async def delete(self, key: str) -> None:
        if not self._drop_ours(key):
            await super().delete(key)

    def _drop_ours(self, key: str) -> bool:
        generation = self.contents.newest.get(key)
        if generation is not None:
            self.contents.drop(key, generation)
        return generation is not None


class StockIndex(Controller):
    """Where stock clients' values are: TorchStore's controller, its methods called directly.

    Attributes:
        keys_to_storage_volumes: key -> volume id -> what is there.
    """

    def __init__(self) -> None:
        super().__init__()
        self.keys_to_storage_volumes: dict[str, dict[str, StorageInfo]] = {}
        self.is_initialized = True

    def locate(self, key: str, ours: ObjectRef | None) -> dict[str, StorageInfo]:
        """Where a key is, in TorchStore's form.

        Args:
            ours: the value of our clients under it, which is newer than any of theirs.

        Raises:
            KeyError: it is nowhere, or some of its shards are not there yet.
        """
        if ours is not None:
            kind = ObjectType.TENSOR if ours.info.kind == "tensor" else ObjectType.OBJECT
            return {ours.volume: StorageInfo(object_type=kind, tensor_slices={None})}
        located: dict[str, StorageInfo] = endpoint_method(Controller.locate_volumes)(self, key)
        return located

    def on_put(self, key: str, request: Any, volume_id: str) -> None:
        """Something was put; unless it is a further shard, it is all there is under the key from now on."""
        known = self.keys_to_storage_volumes.get(key, {}).values()
        if request.tensor_slice is None or any(i.object_type != ObjectType.TENSOR_SLICE for i in known):
            self.keys_to_storage_volumes.pop(key, None)
        endpoint_method(Controller.notify_put)(self, key, request, volume_id)

    def on_delete(self, key: str, volume_id: str) -> None:
        """Something is deleted."""
        endpoint_method(Controller.notify_delete)(self, key, volume_id)


class StockClient(LocalClient):
    """TorchStore's client, of a store of ours or of TorchStore's own."""

    def __init__(self, controller: Any, strategy: Any) -> None:
        # `controller` is where the strategy was found. For our stores that is a directory, which answers for
        # another store once this one has closed: a client that kept it would read the wrong one.
        ours = isinstance(strategy, StockStrategy)
        super().__init__(_PayloadFree(strategy.index) if ours else controller, strategy)


class _PayloadFree:
    """The index, as a stock client calls it: objects are left out of its messages."""

    def __init__(self, index: Any) -> None:
        self._index = index
        self.notify_put = self

    def __getattr__(self, name: str) -> Any:
        return getattr(self._index, name)

    def call(self, key: str, request: Any, volume_id: str) -> Any:
        """`notify_put.call`."""
        return self._index.notify_put.call(key, replace(request, objects=None), volume_id)


def stock_client(strategy: StockStrategy) -> StockClient:
    """A TorchStore client of the store, for values that TorchStore's own API put."""
    return StockClient(strategy.index, strategy)


# Both names are looked up when they are used. A user's process imports this module when it receives a
# strategy of ours, which is before `torchstore.client` makes the client.
api.LocalClient = StockClient
pipe.rdma_available = available
