"""Workers without a model for the live test of weights; in a module, so that they travel by name."""

from __future__ import annotations

import contextlib
import os
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from actors.training.torch_worker import TorchOptions, TorchWorker
from actors.weight_registry import GroupRegistry
from neoproto.errors import NeoProtoError
from neoproto.runtime import Worker
from neoproto.store import active_store
from neoproto.weights import Publisher, Puller, WeightOptions, WeightVersion
from neoproto.weights.puller import Slice

OPTIONS = WeightOptions(num_slots=2, rollout_dtype="bfloat16", bucket_bytes=1 << 18)


def version(n: int) -> WeightVersion:
    return WeightVersion(epoch=0, n=n)


def weights_of(n: int) -> dict[str, torch.Tensor]:
    """The same values in every process; one tensor larger than a bucket, two tied names."""
    generator = torch.Generator().manual_seed(n)
    embed = torch.randn(301, 500, generator=generator)
    layers = {f"layers.{i}.w": torch.randn(100, 201, generator=generator) for i in range(6)}
    return {"embed": embed, **layers, "steps": torch.tensor(n), "head": embed}


def wrong_ones(found: dict[str, torch.Tensor], n: int) -> list[str]:
    """Names whose values are not those of version n, bit for bit."""
    expected = weights_of(n)
    for name, tensor in expected.items():
        if tensor.dtype == torch.float32:
            expected[name] = tensor.to(torch.bfloat16)
    return [name for name in expected.keys() | found.keys() if not torch.equal(found[name], expected[name])]


class Trainer(TorchWorker):
    """Publishes weights that its ranks hold sharded."""

    def __init__(self, registry: Any) -> None:
        super().__init__(TorchOptions(device_type="cpu", num_threads=1, collective_timeout_s=60))
        self._mesh = init_device_mesh("cpu", (self.world_size,))
        store = active_store()
        assert store is not None
        self._publisher = Publisher(store, GroupRegistry(registry), OPTIONS, peers=self.ranks)

    def publish(self, n: int, timeout: float) -> tuple[str, int]:
        """The error, if any, and how many pieces the largest weight has."""
        shards: dict[str, torch.Tensor] = {}
        whole = weights_of(n)
        for name, tensor in whole.items():
            if name != "head":
                how = [Shard(0)] if tensor.dim() else [Replicate()]
                shards[name] = distribute_tensor(tensor, self._mesh, how)
        shards["head"] = shards["embed"]
        try:
            manifest = self._publisher.publish(version(n), shards, timeout=timeout)
        except NeoProtoError as error:
            return f"{type(error).__name__}: {error}", 0
        return "", len(manifest.entries[0].pieces)


class Replica(Worker):
    """Pulls, under its rank's name."""

    def __init__(self, registry: Any) -> None:
        store = active_store()
        assert store is not None
        self._registry = GroupRegistry(registry)
        self._store, self._name = store, f"replica/{self.rank}"
        self._puller = Puller(store, self._registry, self._name, 60.0)
        self._held = contextlib.AsyncExitStack()

    async def follow(self, last: int) -> tuple[list[int], list[str]]:
        """Pull whatever is newest until version `last` was pulled: the versions, and what was wrong."""
        seen: list[int] = []
        wrong: list[str] = []
        newest = None
        while newest is None or newest.n < last:
            assert await self._registry.wait_newer(newest, 30.0) is not None
            async with self._puller.pull() as pulled:
                wrong += wrong_ones(pulled.tensors, pulled.version.n)
                await pulled.check()
                newest = pulled.version
            seen.append(newest.n)
            await self._registry.report_serving(self._name, newest)
        return seen, wrong

    async def pull_share(self) -> list[str]:
        """Pull this rank's columns of a weight, as tensor parallelism cuts it, and a layer; what is wrong."""
        columns = Slice(dim=1, start=67 * self.rank, stop=67 * (self.rank + 1))
        async with self._puller.pull(select={"layers.2.w": columns, "layers.4.w": None}) as pulled:
            expected = weights_of(pulled.version.n)
            expected["layers.2.w"] = expected["layers.2.w"][:, columns.start : columns.stop]
            return [
                name
                for name, found in pulled.tensors.items()
                if not torch.equal(found, expected[name].to(torch.bfloat16))
            ]

    async def hold(self, ttl: float) -> tuple[int, int]:
        """Pull the latest and keep its lease: the version, and this process."""
        puller = Puller(self._store, self._registry, self._name, ttl)
        pulled = await self._held.enter_async_context(puller.pull())
        return pulled.version.n, os.getpid()

    async def let_go(self) -> None:
        await self._held.aclose()
