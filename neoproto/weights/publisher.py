"""Packs a model's tensors into byte buckets and publishes them as one version.

    named tensors ──plan──> entries, bucket sizes
          └──copy + cast──> host buckets ──put_batch──> store      manifest ──> registry ──> pullers

Host buckets are allocated once and filled again for every version: a put copies.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from neoproto.errors import WeightsInUse
from neoproto.store import KeyOrRef, ObjectStore
from neoproto.weights.manifest import Entry, Manifest, TensorLayout, dtype_name, parse_dtype
from neoproto.weights.options import WeightOptions
from neoproto.weights.registry import LeaseInfo, WeightRegistry
from neoproto.weights.sharding import is_sharded, whole_tensor
from neoproto.weights.version import WeightVersion

ALIGNMENT = 64
"""Offsets are multiples of this many bytes: every dtype can be viewed in place, on cache-line borders."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PackingPlan:
    """Where every tensor goes.

    Attributes:
        entries: one per name, in the model's order.
        sources: the entries whose bytes are written; the others share a source's.
        bucket_sizes: bytes of each bucket.
    """

    entries: tuple[Entry, ...]
    sources: tuple[Entry, ...]
    bucket_sizes: tuple[int, ...]


def plan_packing(
    named_tensors: Mapping[str, Tensor], *, bucket_bytes: int, rollout_dtype: torch.dtype | None
) -> PackingPlan:
    """Lay tensors out in buckets, in order; one larger than `bucket_bytes` gets a bucket of its own size.

    A tensor that appears under several names (tied weights) is laid out once. Of sharded tensors the global
    shape counts.

    Args:
        rollout_dtype: what float32 tensors become; others keep their dtype, `None` keeps all.
    """
    entries: list[Entry] = []
    sources: dict[object, Entry] = {}
    sizes: list[int] = []
    for name, tensor in named_tensors.items():
        identity = _identity(tensor)
        known = sources.get(identity)
        if known is None:
            dtype = rollout_dtype if rollout_dtype and tensor.dtype == torch.float32 else tensor.dtype
            nbytes = TensorLayout(dtype=dtype_name(dtype), shape=tuple(tensor.shape)).nbytes
            start = -(-sizes[-1] // ALIGNMENT) * ALIGNMENT if sizes else 0
            if not sizes or (sizes[-1] and start + nbytes > bucket_bytes):
                sizes.append(0)
                start = 0
            sizes[-1] = start + nbytes
            placed = (dtype_name(dtype), len(sizes) - 1, start)
        else:
            placed = (known.dtype, known.bucket, known.offset)
        entry = Entry(
            name=name, dtype=placed[0], shape=tuple(tensor.shape), bucket=placed[1], offset=placed[2]
        )
        entries.append(entry)
        sources.setdefault(identity, entry)
    return PackingPlan(entries=tuple(entries), sources=tuple(sources.values()), bucket_sizes=tuple(sizes))


class PublishingRegistry(Protocol):
    """What a publisher needs of a registry, blocking; see `Registry`."""

    def publish(self, manifest: Manifest) -> None: ...

    def retire(self, version: WeightVersion) -> None: ...

    def wait_reclaimed(self, version: WeightVersion, timeout: float) -> tuple[LeaseInfo, ...]: ...


class OwnRegistry:
    """A publisher's registry when nobody else reads: there are no leases to wait for."""

    def __init__(self) -> None:
        self._rules = WeightRegistry()

    def publish(self, manifest: Manifest) -> None:
        self._rules.publish(manifest)

    def retire(self, version: WeightVersion) -> None:
        self._rules.retire(version)

    def wait_reclaimed(self, version: WeightVersion, timeout: float) -> tuple[LeaseInfo, ...]:
        self._rules.reclaim(version)
        return ()


class Publisher:
    """Publishes versions of one model and deletes them again.

    Every rank that holds a part of a sharded model has one and publishes at the same time; `writes` is true
    on one of them, the others only take part in gathering.

    Args:
        store: where the buckets go. Its `put_batch` copies before it returns.
        registry: where versions are announced; None: nowhere, the manifest is handed on.
        options: see there.
        prefix: first part of the store keys; two publishers on one store need different ones.
        writes: this rank puts the bytes; the others' manifests hold keys in place of references.
    """

    def __init__(
        self,
        store: ObjectStore,
        registry: PublishingRegistry | None = None,
        options: WeightOptions | None = None,
        *,
        prefix: str = "weights",
        writes: bool = True,
    ) -> None:
        self._store, self._prefix, self._writes = store, prefix, writes
        self._registry = registry if registry is not None and writes else OwnRegistry()
        self._options = options or WeightOptions()
        dtype = self._options.rollout_dtype
        self._rollout_dtype = None if dtype is None else parse_dtype(dtype)
        self._host_buckets: list[Tensor] = []
        self._live: dict[WeightVersion, Manifest] = {}
        self._newest: WeightVersion | None = None

    @property
    def live(self) -> tuple[WeightVersion, ...]:
        """Versions published and not retired, oldest first."""
        return tuple(sorted(self._live))

    @torch.no_grad()
    def publish(
        self, version: WeightVersion, named_tensors: Mapping[str, Tensor], *, timeout: float = 60.0
    ) -> Manifest:
        """Store the tensors as `version` and announce it; every byte is readable when this returns.

        If all slots are taken, the oldest version is retired first, and deleted once nobody reads it.

        Args:
            named_tensors: plain tensors of any device, or DTensors, which all ranks gather one at a time.
            timeout: seconds to wait for leases on the oldest version.

        Raises:
            ValueError: `version` is not newer than the last one published here, or there are no tensors.
            WeightsInUse: the oldest version is still being read; names the holders. It stays retired.
            StoreError: the store refused the bytes; nothing of this version remains.
        """
        if self._newest is not None and version <= self._newest:
            raise ValueError(f"weights {version} cannot be published after {self._newest}")
        if not named_tensors:
            raise ValueError(f"weights {version} have no tensors")
        while len(self._live) >= self._options.num_slots:
            self.retire(self.live[0], timeout=timeout)
        plan = plan_packing(
            named_tensors, bucket_bytes=self._options.bucket_bytes, rollout_dtype=self._rollout_dtype
        )
        keys = [f"{self._prefix}/{version}/{index}" for index in range(len(plan.bucket_sizes))]
        buckets: list[KeyOrRef] = list(keys)
        self._fill(plan, named_tensors)
        if self._writes:
            buckets = list(self._store.put_batch(dict(zip(keys, self._host_buckets, strict=True))))
        manifest = Manifest(version=version, entries=plan.entries, buckets=tuple(buckets))
        self._registry.publish(manifest)
        self._live[version] = manifest
        self._newest = version
        return manifest

    def retire(self, version: WeightVersion, *, timeout: float = 60.0) -> None:
        """Retire a version, wait until nobody reads it, and delete its bytes.

        Raises:
            ValueError: `version` was never published here, or is deleted already.
            WeightsInUse: `timeout` seconds passed first; names the holders. It stays retired.
        """
        manifest = self._live.get(version)
        if manifest is None:
            known = ", ".join(map(str, self.live)) or "none"
            raise ValueError(f"weights {version} are not published here; published: {known}")
        self._registry.retire(version)
        holders = self._registry.wait_reclaimed(version, timeout)
        if holders:
            raise WeightsInUse(version, [str(holder) for holder in holders], timeout)
        del self._live[version]
        if self._writes:
            self._store.delete_batch(list(manifest.buckets))

    def _fill(self, plan: PackingPlan, named_tensors: Mapping[str, Tensor]) -> None:
        """Copy every source into its place, cast on the way; device copies are complete on return."""
        if self._writes and tuple(map(len, self._host_buckets)) != plan.bucket_sizes:
            self._host_buckets = [torch.empty(size, dtype=torch.uint8) for size in plan.bucket_sizes]
        for entry, tensor in self._gathered(plan, named_tensors):
            if self._writes:
                tensor_view(self._host_buckets[entry.bucket], entry).copy_(tensor)

    def _gathered(
        self, plan: PackingPlan, named_tensors: Mapping[str, Tensor]
    ) -> Iterator[tuple[Entry, Tensor]]:
        """The sources as plain tensors, in the plan's order on every rank: gathering is collective."""
        for entry in plan.sources:
            yield entry, whole_tensor(named_tensors[entry.name])


def tensor_view(bucket: Tensor, entry: Entry) -> Tensor:
    """The entry's bytes inside a uint8 bucket, as a tensor of its dtype and shape; shares memory."""
    layout = entry.layout
    if layout.nbytes == 0:
        return torch.empty(entry.shape, dtype=layout.torch_dtype)
    return bucket[entry.offset : entry.end].view(layout.torch_dtype).view(entry.shape)


def _identity(tensor: Tensor) -> object:
    """Equal for tensors that are the same memory in the same form."""
    if is_sharded(tensor) or tensor.numel() == 0:
        return id(tensor)
    return (tensor.device, tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride())
