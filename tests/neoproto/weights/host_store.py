"""Stores of one process on which several ranks publish: real shared memory, without actors; and the ranks."""

from __future__ import annotations

import asyncio
import pickle
import threading
import uuid
from collections.abc import Callable
from typing import Any

import torch

from neoproto.errors import KeyMissing
from neoproto.store.counters import REPORTED, ClientCounters
from neoproto.store.shm import SharedVolume
from neoproto.store.torchstore.in_place import InPlaceWriter
from neoproto.store.volume import VolumeContents, VolumeOptions


class HostStore:
    """A volume's shared memory and nothing else: keys are not looked up, references are.

    Attributes:
        values: the volume.
        mapped: what `maps` says; False reads by ranges of bytes, as from another host.
        neighbours: stores of other hosts, whose values can be read and deleted too.
    """

    def __init__(self, volume: str = "0", *, limit_bytes: int = 1 << 30, mapped: bool = True) -> None:
        self.name, self.volume, self.mapped = f"test-{uuid.uuid4().hex[:8]}", volume, mapped
        self.values = VolumeContents(
            VolumeOptions(store=self.name, shared_memory=True, limit_bytes=limit_bytes, volumes_on_host=1)
        )
        self.memory = SharedVolume.open(self.values.prefix)
        self.counters = ClientCounters()
        self.bytes_read = 0
        self.neighbours: list[HostStore] = []
        self.lock = threading.RLock()
        self.loop = asyncio.new_event_loop()

    def close(self) -> None:
        self.values.close()
        self.loop.close()

    # what `InPlaceWriter` needs of a client

    def in_place(self) -> InPlaceWriter:
        return InPlaceWriter(self, self.memory)

    def run(self, work: Any) -> Any:
        with self.lock:
            return self.loop.run_until_complete(work)

    async def reserve(self, what: str, wanted: Any) -> Any:
        return await self.values.reserve(wanted)

    async def retire(self, tokens: Any) -> None:
        await self.values.reserve([], tokens)

    async def publish(self, what: str, refs: Any, tokens: Any) -> None:
        self.values.commit(tokens, pickle.dumps(refs), ("a client", dict.fromkeys(REPORTED, 0)))

    async def free(self, deleted: Any) -> None:
        self.values.delete(deleted)

    # what weights need of a store

    def maps(self, ref: Any) -> bool:
        return self.mapped

    def get(self, ref: Any, *, rows: Any = None) -> torch.Tensor:
        owner = next(one for one in [self, *self.neighbours] if one.name == ref.store)
        value = owner.memory.read(ref, rows)
        self.bytes_read += value.numel()
        return value

    def get_batch(self, refs: Any, *, rows: Any = None) -> list[torch.Tensor]:
        return [self.get(ref, rows=part) for ref, part in zip(refs, rows or [None] * len(refs), strict=True)]

    def delete_batch(self, refs: Any, *, missing_ok: bool = False) -> None:
        for ref in refs:
            owner = next(one for one in [self, *self.neighbours] if one.name == ref.store)
            with owner.lock:
                if owner.values.newest.get(ref.key) != ref.generation and not missing_ok:
                    raise KeyMissing(ref.key)
                owner.values.drop(ref.key, ref.generation)

    def stats(self) -> dict[str, int]:
        with self.lock:
            return self.values.stats()


class Ranks:
    """`world_size` threads that exchange values."""

    def __init__(self, world_size: int) -> None:
        self._barrier = threading.Barrier(world_size)
        self._values: list[Any] = [None] * world_size
        self.world_size = world_size

    def run(self, work: Callable[[Peer], Any]) -> list[Any]:
        """Run `work` as every rank; results or exceptions by rank."""
        results: list[Any] = [None] * self.world_size

        def one(rank: int) -> None:
            try:
                results[rank] = work(Peer(self, rank))
            except Exception as error:  # noqa: BLE001 - compared by the test
                results[rank] = error

        threads = [threading.Thread(target=one, args=(rank,)) for rank in range(self.world_size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return results


class Peer:
    def __init__(self, ranks: Ranks, rank: int) -> None:
        self._ranks, self.rank, self.world_size = ranks, rank, ranks.world_size

    def exchange(self, value: Any) -> list[Any]:
        self._ranks._values[self.rank] = value
        self._ranks._barrier.wait(10)
        values = list(self._ranks._values)
        self._ranks._barrier.wait(10)
        return values


class Shard:
    """A placement as DTensors have it."""

    def __init__(self, dim: int) -> None:
        self.dim = dim

    def is_replicate(self) -> bool:
        return False


class Strided(Shard):
    """One that is no plain shard."""


class Replicate:
    def is_replicate(self) -> bool:
        return True


class Mesh:
    def __init__(self, shape: tuple[int, ...], coordinate: tuple[int, ...]) -> None:
        self._shape, self._coordinate = shape, coordinate

    def size(self, dim: int) -> int:
        return self._shape[dim]

    def get_local_rank(self, dim: int) -> int:
        return self._coordinate[dim]


class FakeDTensor:
    """What of a DTensor is used; cut with `torch.chunk`, as torch does it."""

    def __init__(self, whole: torch.Tensor, placements: tuple[Any, ...], mesh: Mesh) -> None:
        self._whole, self.placements, self.device_mesh = whole, placements, mesh
        self.shape, self.dtype = whole.shape, whole.dtype
        self.gathered = 0

    def numel(self) -> int:
        return self._whole.numel()

    def full_tensor(self) -> torch.Tensor:
        self.gathered += 1
        return self._whole

    def to_local(self) -> torch.Tensor:
        part = self._whole
        for dim, placement in enumerate(self.placements):
            if not placement.is_replicate():
                chunks = part.chunk(self.device_mesh.size(dim), placement.dim)
                at = self.device_mesh.get_local_rank(dim)
                part = chunks[at] if at < len(chunks) else part.narrow(placement.dim, 0, 0)
        return part
