"""Where the tensors of a version go: which rank writes what, into which bucket, at which byte.

    each rank: named tensors ──describe──> RankLayout ─┐
                                   (gathered: small) ──┴──plan──> entries, buckets, every rank's writes

The plan is computed alike on every rank and kept while the layouts stay the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from neoproto.weights.manifest import Box, Entry, Piece, TensorLayout, check_layout, dtype_name
from neoproto.weights.sharding import is_sharded, local_box

ALIGNMENT = 64
"""Offsets are multiples of this many bytes: every dtype can be viewed in place, on cache-line borders."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """One tensor as a rank has it; tied names share it.

    Attributes:
        layout: of the whole tensor, as it will be stored.
        box: the part that this rank holds; None if it holds no rectangular part, so that the tensor has to be
            gathered.
    """

    layout: TensorLayout
    box: Box | None


@dataclass(frozen=True, kw_only=True, slots=True)
class RankLayout:
    """What one rank has to publish.

    Attributes:
        domain: memory domain; ranks of one domain can write into the same memory.
        names: name -> index into `sources`, in the model's order.
        sources: the tensors, tied ones once.
    """

    domain: str
    names: tuple[tuple[str, int], ...]
    sources: tuple[Source, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Bucket:
    """Bytes that lie together, in one memory domain."""

    domain: str
    nbytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardWrite:
    """What a rank writes: its box of source number `source`, as `dtype`, into a piece."""

    source: int
    dtype: str
    box: Box
    piece: Piece


@dataclass(frozen=True, kw_only=True, slots=True)
class PackingPlan:
    """Where everything goes.

    Attributes:
        names: the first name of each source.
        entries: one per name, in the model's order.
        buckets: by index.
        gathered: sources that every rank takes part in gathering, in this order.
        writes: of each rank, in the order of sources.
        domains: of each rank.
    """

    names: tuple[str, ...]
    entries: tuple[Entry, ...]
    buckets: tuple[Bucket, ...]
    gathered: tuple[int, ...]
    writes: tuple[tuple[ShardWrite, ...], ...]
    domains: tuple[str, ...]


def describe(
    named_tensors: Mapping[str, Tensor], *, rollout_dtype: torch.dtype | None, domain: str
) -> RankLayout:
    """What this rank has. Of sharded tensors the global shape counts.

    Args:
        rollout_dtype: what float32 tensors become; others keep their dtype, `None` keeps all.
    """
    names: list[tuple[str, int]] = []
    sources: list[Source] = []
    known: dict[object, int] = {}
    for name, tensor in named_tensors.items():
        index = known.setdefault(_identity(tensor), len(sources))
        names.append((name, index))
        if index == len(sources):
            dtype = rollout_dtype if rollout_dtype and tensor.dtype == torch.float32 else tensor.dtype
            layout = TensorLayout(dtype=dtype_name(dtype), shape=tuple(tensor.shape))
            sources.append(Source(layout=layout, box=local_box(tensor)))
    return RankLayout(domain=domain, names=tuple(names), sources=tuple(sources))


def plan_packing(ranks: Sequence[RankLayout], *, bucket_bytes: int) -> PackingPlan:
    """Lay the ranks' tensors out in buckets, in order; a piece larger than `bucket_bytes` gets its own.

    What several ranks have is written by one of them, so that each writes about as much. The parts that the
    ranks of one domain write of a tensor become one piece where they fit together.

    Raises:
        WeightMismatch: the ranks' models are not the same; names what differs.
    """
    first = ranks[0]
    for rank, other in enumerate(ranks[1:], 1):
        if other.names != first.names or any(
            a.layout != b.layout for a, b in zip(other.sources, first.sources, strict=True)
        ):
            check_layout(_layout(other), _layout(first), what=f"the weights of rank {rank}")
    builder = _Builder(ranks, bucket_bytes)
    pieces = [builder.lay_out(index) for index in range(len(first.sources))]
    names: dict[int, str] = {}
    for name, index in first.names:
        names.setdefault(index, name)
    return PackingPlan(
        names=tuple(names[index] for index in range(len(first.sources))),
        entries=tuple(
            Entry(
                name=name,
                dtype=first.sources[index].layout.dtype,
                shape=first.sources[index].layout.shape,
                pieces=pieces[index],
            )
            for name, index in first.names
        ),
        buckets=tuple(Bucket(domain=domain, nbytes=nbytes) for domain, nbytes in builder.buckets),
        gathered=tuple(builder.gathered),
        writes=tuple(map(tuple, builder.writes)),
        domains=tuple(rank.domain for rank in ranks),
    )


class _Builder:
    def __init__(self, ranks: Sequence[RankLayout], bucket_bytes: int) -> None:
        self._ranks, self._bucket_bytes = ranks, bucket_bytes
        self.buckets: list[tuple[str, int]] = []
        self.gathered: list[int] = []
        self.writes: list[list[ShardWrite]] = [[] for _ in ranks]
        self._open: dict[str, int] = {}  # domain -> the bucket that is being filled
        self._written = [0] * len(ranks)

    def lay_out(self, index: int) -> tuple[Piece, ...]:
        """Place one source; returns its pieces."""
        layout = self._ranks[0].sources[index].layout
        boxes = [rank.sources[index].box for rank in self._ranks]
        if any(box is None for box in boxes):
            self.gathered.append(index)
            boxes = [Box.whole(layout.shape)] * len(boxes)
        owners: dict[Box, int] = {}
        for rank, box in enumerate(boxes):
            assert box is not None
            if box.numel and (box not in owners or self._written[rank] < self._written[owners[box]]):
                owners[box] = rank
        by_domain: dict[str, dict[Box, int]] = {}
        for box, rank in owners.items():
            by_domain.setdefault(self._ranks[rank].domain, {})[box] = rank
        itemsize = layout.torch_dtype.itemsize
        pieces: list[Piece] = []
        for domain, parts in by_domain.items():
            for outer, inner in _merged(parts):
                piece = self._put(domain, outer, itemsize)
                pieces.append(piece)
                for box, rank in inner.items():
                    self.writes[rank].append(
                        ShardWrite(source=index, dtype=layout.dtype, box=box, piece=piece)
                    )
                    self._written[rank] += box.numel * itemsize
        return tuple(pieces)

    def _put(self, domain: str, box: Box, itemsize: int) -> Piece:
        nbytes = box.numel * itemsize
        bucket = self._open.get(domain)
        start = 0 if bucket is None else -(-self.buckets[bucket][1] // ALIGNMENT) * ALIGNMENT
        if bucket is None or start + nbytes > self._bucket_bytes:
            bucket, start = len(self.buckets), 0
            self.buckets.append((domain, 0))
            self._open[domain] = bucket
        self.buckets[bucket] = (domain, start + nbytes)
        return Piece(box=box, bucket=bucket, offset=start)


def _merged(parts: Mapping[Box, int]) -> list[tuple[Box, dict[Box, int]]]:
    """One box around all parts if they fill it, else each its own. Parts of one tensor never overlap."""
    starts = [box.start for box in parts]
    ends = [tuple(a + b for a, b in zip(box.start, box.shape, strict=True)) for box in parts]
    start, end = tuple(map(min, zip(*starts, strict=True))), tuple(map(max, zip(*ends, strict=True)))
    outer = Box(start=start, shape=tuple(b - a for a, b in zip(start, end, strict=True)))
    if sum(box.numel for box in parts) == outer.numel:
        return [(outer, dict(parts))]
    return [(box, {box: rank}) for box, rank in parts.items()]


def _layout(rank: RankLayout) -> dict[str, TensorLayout]:
    return {name: rank.sources[index].layout for name, index in rank.names}


def _identity(tensor: Tensor) -> object:
    """Equal for tensors that are the same memory in the same form."""
    if is_sharded(tensor) or tensor.numel() == 0:
        return id(tensor)
    return (tensor.device, tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride())
