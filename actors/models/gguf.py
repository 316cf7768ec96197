"""Reading GGUF, the one-file model format of llama.cpp: metadata, and tensors back to float32.

    magic, version, counts │ key-value pairs │ names, shapes, types, offsets │ (aligned) tensor data

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. The types that a Q4_1 file has are read; in
the quantised ones a block of 32 numbers shares a scale, and in Q4_1 a minimum.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

__all__ = ["Gguf", "GgufError", "read_gguf"]

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
Floats = np.ndarray[Any, np.dtype[np.float32]]

_MAGIC = b"GGUF"
_ALIGNMENT = 32
_STRING, _ARRAY = 8, 9
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""Of metadata: GGUF's number for a type, and `struct`'s letter."""


class GgufError(ValueError):
    """The file is not one that can be read; says what is wrong with it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Gguf:
    """A file's contents.

    Attributes:
        metadata: key to number, text or list.
        tensors: name to float32 tensor, in torch's order of dimensions (GGUF's reversed).
    """

    metadata: Mapping[str, Any]
    tensors: Mapping[str, Tensor]


def read_gguf(path: Path) -> Gguf:
    """Read a whole file.

    Raises:
        OSError: it cannot be read.
        GgufError: not GGUF, another version than 2 or 3, cut off or damaged, or a tensor of a type not known
            here.
    """
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _read(_Reader(data))
    except struct.error as error:
        raise GgufError(f"{path} is cut off: {error}") from error
    except GgufError as error:
        raise GgufError(f"{path}: {error}") from error
    except (ValueError, TypeError, ArithmeticError, RecursionError) as error:
        # An empty file, a text that is not UTF-8, an alignment of 0 or by a text, lists in lists without end.
        raise GgufError(f"{path} is damaged: {error}") from error


class _Reader:
    """A position in the bytes of a file."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data, self.at = data, 0

    def number(self, letter: str) -> Any:
        (value,) = struct.unpack_from(f"<{letter}", self.data, self.at)
        self.at += struct.calcsize(letter)
        return value

    def text(self) -> str:
        return self.bytes(self.number("Q")).decode()

    def bytes(self, count: int) -> bytes:
        if self.at + count > len(self.data):
            raise struct.error(f"{count} bytes are wanted at {self.at} of {len(self.data)}")
        self.at += count
        return self.data[self.at - count : self.at]

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.text()
        if kind == _ARRAY:
            inner, count = self.number("I"), self.number("Q")
            return [self.value(inner) for _ in range(count)]
        if kind not in _NUMBERS:
            raise GgufError(f"metadata of type {kind} are not known")
        return self.number(_NUMBERS[kind])


def _read(reader: _Reader) -> Gguf:
    if reader.bytes(4) != _MAGIC:
        raise GgufError("this is no GGUF file")
    version = reader.number("I")
    if version not in (2, 3):
        raise GgufError(f"version 2 or 3 is needed, got {version}")
    tensor_count, pair_count = reader.number("Q"), reader.number("Q")
    metadata = {reader.text(): reader.value(reader.number("I")) for _ in range(pair_count)}
    infos = []
    for _ in range(tensor_count):
        name = reader.text()
        shape = tuple(reader.number("Q") for _ in range(reader.number("I")))[::-1]
        infos.append((name, shape, reader.number("I"), reader.number("Q")))
    alignment = metadata.get("general.alignment", _ALIGNMENT)
    start = -(-reader.at // alignment) * alignment
    tensors = {}
    for name, shape, kind, offset in infos:
        reader.at = start + offset
        tensors[name] = _tensor(reader, name, shape, kind)
    return Gguf(metadata=metadata, tensors=tensors)


@dataclass(frozen=True, slots=True)
class _Kind:
    """A tensor type: `block` numbers in `size` bytes, and what turns [blocks, size] into [blocks, block]."""

    block: int
    size: int
    decode: Callable[[Bytes], Floats]


def _half(blocks: Bytes, at: int) -> Floats:
    """The float16 at a byte of each block, [blocks, 1] float32."""
    return blocks[:, at : at + 2].copy().view(np.float16).astype(np.float32)


def _q4_1(blocks: Bytes) -> Floats:
    low, high = blocks[:, 4:] & 15, blocks[:, 4:] >> 4
    quants: Floats = np.concatenate([low, high], axis=1).astype(np.float32)
    return quants * _half(blocks, 0) + _half(blocks, 2)


def _q8_0(blocks: Bytes) -> Floats:
    return blocks[:, 2:].view(np.int8).astype(np.float32) * _half(blocks, 0)


_KINDS = {
    0: _Kind(1, 4, lambda blocks: blocks.copy().view(np.float32)),
    1: _Kind(1, 2, lambda blocks: _half(blocks, 0)),
    3: _Kind(32, 20, _q4_1),
    8: _Kind(32, 34, _q8_0),
}
"""F32, F16, Q4_1, Q8_0."""


def _tensor(reader: _Reader, name: str, shape: tuple[int, ...], kind: int) -> Tensor:
    if kind not in _KINDS:
        raise GgufError(f"{name} is of type {kind}; known are F32, F16, Q4_1 and Q8_0 (0, 1, 3, 8)")
    form = _KINDS[kind]
    if not shape or shape[-1] % form.block:
        raise GgufError(f"{name} of shape {shape} does not divide into blocks of {form.block}")
    raw = reader.bytes(math.prod(shape) // form.block * form.size)
    blocks = np.frombuffer(raw, dtype=np.uint8).reshape(-1, form.size)
    return torch.from_numpy(form.decode(blocks)).reshape(shape)
