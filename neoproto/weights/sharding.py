"""Sharded tensors (DTensors), without importing them: that takes most of a second."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from neoproto.weights.manifest import Box


def is_sharded(tensor: Tensor) -> bool:
    """Whether ranks hold parts of the tensor."""
    return hasattr(tensor, "full_tensor")


def whole_tensor(tensor: Tensor) -> Tensor:
    """A sharded tensor gathered on every rank (collective), any other as it is."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def local_tensor(tensor: Tensor) -> Tensor:
    """What this rank holds of the tensor."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def local_box(tensor: Any) -> Box | None:
    """Which part of the tensor this rank holds: all of a plain one; None if it is no rectangular part.

    Sharding cuts a dimension into equal parts, the last ones shorter or empty, mesh dimension by mesh
    dimension; what is sharded in another way (strided shards, partial sums) has to be gathered.
    """
    shape = list(tensor.shape)
    start = [0] * len(shape)
    if not is_sharded(tensor):
        return Box(start=tuple(start), shape=tuple(shape))
    for mesh_dim, placement in enumerate(tensor.placements):
        if placement.is_replicate():
            continue
        if type(placement).__name__ != "Shard":
            return None
        dim, size = placement.dim, tensor.device_mesh.size(mesh_dim)
        chunk = -(-shape[dim] // size)
        begin = min(tensor.device_mesh.get_local_rank(mesh_dim) * chunk, shape[dim])
        start[dim] += begin
        shape[dim] = min(chunk, shape[dim] - begin)
    return Box(start=tuple(start), shape=tuple(shape))
