"""What travels between store clients, volumes and the index."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from neoproto.store.base import ObjectRef, Rows, ValueInfo
from neoproto.store.codec import Parts

Blob = npt.NDArray[np.uint8]


@dataclass(frozen=True, kw_only=True, slots=True)
class Sent:
    """A value on its way: Monarch sends arrays much faster than it sends tensors."""

    key: str
    generation: int
    info: ValueInfo
    blobs: tuple[Blob, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Wanted:
    """A value, or some of its rows, asked of a volume."""

    key: str
    generation: int
    rows: Rows | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Received:
    """A volume's answer. `problem` says why there is none: "missing", or what is wrong with the rows."""

    info: ValueInfo | None = None
    blobs: tuple[Blob, ...] = ()
    problem: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Located:
    """The index's answer for a key: a reference, or that a stock TorchStore client put it, or neither."""

    ref: ObjectRef | None
    stock: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Gone:
    """A value that is no longer visible and whose bytes can go; generation 0 is one of a stock client.

    Attributes:
        slot: its word in the volume's table; 0 if it is not in shared memory.
    """

    key: str
    generation: int
    volume: str
    slot: int = 0


def pack(refs: Sequence[ObjectRef]) -> bytes:
    """References in one piece: Monarch's own pickling calls Python for every object in a message."""
    return pickle.dumps(refs)


def unpack(refs: bytes) -> list[ObjectRef]:
    """What `pack` took."""
    found: list[ObjectRef] = pickle.loads(refs)
    return found


def to_blobs(parts: Parts) -> tuple[Blob, ...]:
    """Parts as arrays, sharing memory."""
    return tuple(part.numpy() for part in parts)


def to_parts(blobs: tuple[Blob, ...]) -> Parts:
    """Arrays as parts, sharing memory; a read-only one (as unpickling may give) is copied."""
    return tuple(
        torch.from_numpy(blob if blob.flags.writeable else blob.copy())
        if blob.size
        else torch.empty(0, dtype=torch.uint8)
        for blob in blobs
    )


def text_of(error: Any) -> str:
    """An exception's class and first line."""
    lines = str(error).splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"
