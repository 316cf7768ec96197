"""What a published weight version consists of: where each tensor lies, and in which form."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

from neoproto.errors import WeightMismatch
from neoproto.weights.version import WeightVersion

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from neoproto.store import KeyOrRef

_MOST_NAMED = 8


def dtype_name(dtype: torch.dtype) -> str:
    """The dtype as a manifest writes it, for example `"bfloat16"`."""
    return str(dtype).removeprefix("torch.")


def parse_dtype(name: str) -> torch.dtype:
    """The dtype called `name` (`"bfloat16"`, `"float32"`, also `"bf16"`, `"fp16"`, `"fp32"`).

    Raises:
        ValueError: torch has no such dtype.
    """
    import torch  # late: the registry has manifests, and no torch

    short = {"bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32", "float": "float32"}
    dtype = getattr(torch, short.get(name, name), None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"unknown dtype {name!r}; for example 'float32' or 'bfloat16'")
    return dtype


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorLayout:
    """Form of one tensor: dtype name and shape."""

    dtype: str
    shape: tuple[int, ...]

    @classmethod
    def of(cls, tensor: Tensor) -> TensorLayout:
        return cls(dtype=dtype_name(tensor.dtype), shape=tuple(tensor.shape))

    @property
    def torch_dtype(self) -> torch.dtype:
        return parse_dtype(self.dtype)

    @property
    def nbytes(self) -> int:
        bits = re.search(r"\d+", self.dtype)  # dtypes are named by their bits
        return math.prod(self.shape) * (max(1, int(bits[0]) // 8) if bits else 1)

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Box:
    """A rectangular part of a tensor: where it begins in each dimension, and how far it goes."""

    start: tuple[int, ...]
    shape: tuple[int, ...]

    @classmethod
    def whole(cls, shape: tuple[int, ...]) -> Box:
        return cls(start=(0,) * len(shape), shape=shape)

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def overlap(self, other: Box) -> Box | None:
        """What both contain, in the coordinates of the tensor; None if that is nothing."""
        start = tuple(map(max, self.start, other.start))
        ends = map(min, self._ends(), other._ends())
        shape = tuple(end - begin for begin, end in zip(start, ends, strict=True))
        return None if any(size <= 0 for size in shape) else Box(start=start, shape=shape)

    def inside(self, outer: Box) -> Box:
        """The same part in the coordinates of a box that contains it."""
        start = tuple(a - b for a, b in zip(self.start, outer.start, strict=True))
        return Box(start=start, shape=self.shape)

    def of(self, tensor: Tensor) -> Tensor:
        """This part of a tensor, as a view."""
        for dim, (begin, size) in enumerate(zip(self.start, self.shape, strict=True)):
            if size != tensor.shape[dim]:
                tensor = tensor.narrow(dim, begin, size)
        return tensor

    def _ends(self) -> tuple[int, ...]:
        return tuple(begin + size for begin, size in zip(self.start, self.shape, strict=True))


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """Where one part of a tensor lies, row-major.

    Attributes:
        box: which part.
        bucket: index into `Manifest.buckets`.
        offset: first byte inside that bucket; aligned for every dtype.
    """

    box: Box
    bucket: int
    offset: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """One named tensor of a version.

    Attributes:
        name: the parameter's name in the Hugging Face model.
        dtype, shape: its form as stored.
        pieces: its parts, which tile it; one where all its writers share a host, none if it is empty.

    Entries with the same pieces share their bytes (tied weights).
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]

    @property
    def layout(self) -> TensorLayout:
        return TensorLayout(dtype=self.dtype, shape=self.shape)


@dataclass(frozen=True, kw_only=True, slots=True)
class RemoteMemory:
    """A bucket in a process's own memory, which NIXL agents read; see `neoproto.weights.transports.nixl`.

    Attributes:
        agent, metadata: whose memory, and how to reach it.
        key: its name, in messages.
        address, nbytes: where it is there.
    """

    agent: str
    metadata: bytes = field(repr=False)
    key: str
    address: int
    nbytes: int


BucketRef: TypeAlias = "KeyOrRef | RemoteMemory"
"""Where a bucket is: in the object store, or in a process's memory."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """A published version: its tensors, and where the byte buckets are that they lie in.

    Attributes:
        buckets: where they are; references are read without asking the store's index (keys do as well).
        bucket_bytes: the size of each.
    """

    version: WeightVersion
    entries: tuple[Entry, ...]
    buckets: tuple[BucketRef, ...]
    bucket_bytes: tuple[int, ...]

    def __iter__(self) -> Iterator[Entry]:
        return iter(self.entries)

    @property
    def nbytes(self) -> int:
        """Bytes of weights, shared ones counted once, without padding."""
        return sum({entry.pieces: entry.layout.nbytes for entry in self.entries if entry.pieces}.values())

    def layout(self) -> dict[str, TensorLayout]:
        return {entry.name: entry.layout for entry in self.entries}


def piece_view(bucket: Tensor, dtype: torch.dtype, piece: Piece) -> Tensor:
    """The piece's bytes inside a uint8 bucket, as a tensor of its dtype and shape; shares memory."""
    end = piece.offset + piece.box.numel * dtype.itemsize
    return bucket[piece.offset : end].view(dtype).view(piece.box.shape)


def check_layout(
    found: Mapping[str, TensorLayout], expected: Mapping[str, TensorLayout], *, what: str
) -> None:
    """Refuse weights whose names, shapes or dtypes are not those expected.

    Args:
        found: layout of the weights that should be loaded.
        expected: layout of the model that should load them.
        what: the weights, in words, for the message.

    Raises:
        WeightMismatch: names up to 8 differing tensors of each kind, and how many there are.
    """
    problems = [
        _listed("missing", sorted(expected.keys() - found.keys())),
        _listed("unexpected", sorted(found.keys() - expected.keys())),
        _listed(
            "different",
            [
                f"{name} is {found[name]}, not {expected[name]}"
                for name in sorted(found.keys() & expected.keys())
                if found[name] != expected[name]
            ],
        ),
    ]
    if any(problems):
        raise WeightMismatch(f"{what} do not fit the model: " + "; ".join(filter(None, problems)))


def _listed(kind: str, names: list[str]) -> str:
    if not names:
        return ""
    more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    return f"{len(names)} {kind}: {', '.join(names[:_MOST_NAMED])}{more}"
