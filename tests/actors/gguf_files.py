"""Small GGUF files, written as the format's description says."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

F32, F16, Q4_1, Q8_0 = 0, 1, 3, 8


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def value(item: Any) -> bytes:
    """A metadata value with its type: bool, int (u32), float (f32), text, or a list of one of them."""
    if isinstance(item, list):
        inner = [value(one) for one in item]
        return (
            struct.pack("<I", 9)
            + inner[0][:4]
            + struct.pack("<Q", len(item))
            + b"".join(i[4:] for i in inner)
        )
    if isinstance(item, bool):
        return struct.pack("<I?", 7, item)
    if isinstance(item, int):
        return struct.pack("<II", 4, item)
    return struct.pack("<If", 6, item) if isinstance(item, float) else struct.pack("<I", 8) + text(item)


def quantised(rows: np.ndarray, kind: int) -> bytes:
    """The array in a tensor type; its numbers must be ones that the type can hold."""
    if kind in (F32, F16):
        return rows.astype(np.float32 if kind == F32 else np.float16).tobytes()
    out = b""
    for block in rows.reshape(-1, 32):
        if kind == Q8_0:
            out += np.float16(0.5).tobytes() + (block / 0.5).astype(np.int8).tobytes()
        else:
            quants = ((block + 4) / 0.5).astype(np.uint8)
            out += np.float16(0.5).tobytes() + np.float16(-4).tobytes()
            out += (quants[:16] | quants[16:] << 4).tobytes()
    return out


def write_gguf(
    path: Path,
    metadata: Mapping[str, Any],
    tensors: Sequence[tuple[str, np.ndarray, int]],
    *,
    version: int = 3,
) -> Path:
    """A file of these pairs and tensors (name, array, type)."""
    head = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(metadata))
    head += b"".join(text(key) + value(item) for key, item in metadata.items())
    alignment, data = metadata.get("general.alignment", 32), b""
    for name, array, kind in tensors:
        head += text(name) + struct.pack("<I", array.ndim)
        head += b"".join(struct.pack("<Q", size) for size in array.shape[::-1])
        head += struct.pack("<IQ", kind, len(data))
        raw = quantised(array, kind)
        data += raw + b"\0" * (-len(raw) % alignment)
    path.write_bytes(head + b"\0" * (-len(head) % alignment) + data)
    return path


def metadata_only(metadata: Mapping[str, Any], *, lists: int) -> bytes:
    """A file of these pairs and, if `lists`, one more: lists of one list each, so many levels deep."""
    head = b"GGUF" + struct.pack("<IQQ", 3, 0, len(metadata) + bool(lists))
    head += b"".join(text(key) + value(item) for key, item in metadata.items())
    if lists:
        head += text("lists") + struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * lists
    return head
