"""Values to bytes and back, the large parts out of band.

    value ──encode──> (ValueInfo, parts) ──> … ──> decode ──> value
                          │
                          └─ select_rows: only the wanted rows' bytes

A part is a one-dimensional uint8 array. Dense tensors and arrays are one part: their bytes, row-major.
Object arrays are two: offsets [n + 1] and one pickle per element, so that single elements can be read.
Everything else is a pickle (protocol 5) followed by the tensors and arrays inside it, which are not pickled.

Bytes can be moved without torch, which takes seconds to import: only the tensors themselves need it.
"""

from __future__ import annotations

import io
import math
import pickle
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeGuard

import cloudpickle  # type: ignore[import-untyped]
import numpy as np

from neoproto.store.base import Bytes, Rows, ValueInfo

if TYPE_CHECKING:
    import torch

Parts = tuple[Bytes, ...]

_OFFSET = np.dtype(np.int64)


def encode(value: Any) -> tuple[ValueInfo, Parts]:
    """Turn a value into parts. Parts may share the value's memory: copy them before it can change.

    Tensors on other devices are copied to the CPU; gradients and autograd history are not stored.

    Raises:
        TypeError, pickle.PicklingError: the value cannot be pickled.
    """
    if is_tensor(value) and _is_dense(value):
        data = _tensor_bytes(value)
        return _info("tensor", _dtype_name(value.dtype), tuple(value.shape), (data,)), (data,)
    if type(value) is np.ndarray and value.dtype == object and value.ndim > 0:
        parts = _encode_elements(value)
        return _info("objects", "", value.shape, parts), parts
    if type(value) is np.ndarray and _is_plain(value.dtype):
        data = _array_bytes(value)
        return _info("array", value.dtype.str, value.shape, (data,)), (data,)
    parts = _encode_pickled(value)
    return _info("object", "", (), parts), parts


def decode(info: ValueInfo, parts: Parts) -> Any:
    """Rebuild a value. Tensors and arrays share the parts' memory; read-only parts are copied first."""
    parts = tuple(part if part.flags.writeable else part.copy() for part in parts)
    if info.kind == "tensor":
        return _tensor_of(parts[0], info.dtype, info.shape)
    if info.kind == "array":
        return np.frombuffer(_buffer(parts[0]), dtype=np.dtype(info.dtype)).reshape(info.shape)
    if info.kind == "objects":
        return _decode_elements(info, parts)
    return pickle.loads(_buffer(parts[0]), buffers=[_buffer(part) for part in parts[1:]])


def check_rows(info: ValueInfo, rows: Rows, name: str = "value") -> Rows:
    """Return `rows` as a range or int64 positions that exist in the value.

    Raises:
        ValueError: the value has no rows, or some of these are outside it.
    """
    if not info.has_rows:
        raise ValueError(f"{name}: cannot select rows of a {info.kind} of shape {info.shape}")
    if not isinstance(rows, range):
        rows = np.asarray(rows)
        if rows.ndim != 1 or (rows.size and not np.issubdtype(rows.dtype, np.integer)):
            raise ValueError(f"{name}: rows must be one-dimensional integers, got {rows.dtype} {rows.shape}")
        rows = rows.astype(np.int64, copy=False)
    if len(rows):
        low, high = (min(rows), max(rows)) if isinstance(rows, range) else (rows.min(), rows.max())
        if low < 0 or high >= info.shape[0]:
            raise ValueError(f"{name}: rows {low}..{high} are outside its {info.shape[0]} rows")
    return rows


def select_rows(info: ValueInfo, parts: Parts, rows: Rows) -> tuple[ValueInfo, Parts]:
    """Copy the bytes of some rows, and no others, into new parts.

    Args:
        rows: as returned by `check_rows`.
    """
    shape = (len(rows), *info.shape[1:])
    if info.kind == "objects":
        chosen = _select_elements(info, parts, rows)
        return _info("objects", "", shape, chosen), chosen
    data = parts[0]
    if info.shape[0] == 0 or data.size == 0:
        return _info(info.kind, info.dtype, shape, (data,)), (data.copy(),)
    table = data.reshape(info.shape[0], -1)
    if isinstance(rows, range) and rows.step == 1:
        picked = table[rows.start : rows.stop].copy()
    else:
        picked = table.take(np.asarray(rows, dtype=np.int64), axis=0)
    flat = picked.reshape(-1)
    return _info(info.kind, info.dtype, shape, (flat,)), (flat,)


def _info(kind: Any, dtype: str, shape: Sequence[int], parts: Parts) -> ValueInfo:
    return ValueInfo(kind=kind, dtype=dtype, shape=tuple(shape), nbytes=sum(part.size for part in parts))


def is_tensor(value: Any) -> TypeGuard[torch.Tensor]:
    """Whether it is a tensor; there is none in a process that has not imported torch."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def _is_dense(tensor: torch.Tensor) -> bool:
    import torch

    plain = type(tensor) in (torch.Tensor, torch.nn.Parameter)
    return plain and tensor.layout == torch.strided and not tensor.is_quantized and not tensor.is_nested


def _is_plain(dtype: np.dtype[Any]) -> bool:
    return not dtype.hasobject and dtype.fields is None and dtype.subdtype is None and dtype.kind != "V"


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _tensor_bytes(tensor: torch.Tensor) -> Bytes:
    import torch

    tensor = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    data: Bytes = tensor.reshape(-1).view(torch.uint8).numpy()
    return data


def _tensor_of(data: Bytes, dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
    import torch

    # An empty array may have a stride of 0, which keeps its tensor from being viewed as another dtype.
    whole = torch.from_numpy(data) if data.size else torch.empty(0, dtype=torch.uint8)
    return whole.view(getattr(torch, dtype)).reshape(shape)


def _array_bytes(array: np.ndarray[Any, Any]) -> Bytes:
    flat = np.ascontiguousarray(array).reshape(-1)
    return flat.view(np.uint8) if flat.nbytes else np.empty(0, dtype=np.uint8)


def _from_buffer(data: Any) -> Bytes:
    return np.frombuffer(data, dtype=np.uint8)


def _buffer(part: Bytes) -> memoryview:
    data: Any = part
    return memoryview(data)


def _encode_elements(array: np.ndarray[Any, Any]) -> Parts:
    blobs = [cloudpickle.dumps(element) for element in array.reshape(-1)]
    offsets = np.zeros(len(blobs) + 1, dtype=_OFFSET)
    np.cumsum([len(blob) for blob in blobs], out=offsets[1:])
    return _array_bytes(offsets), _from_buffer(b"".join(blobs))


def _decode_elements(info: ValueInfo, parts: Parts) -> np.ndarray[Any, Any]:
    offsets = parts[0].view(_OFFSET)
    blob = _buffer(parts[1])
    array = np.empty(math.prod(info.shape), dtype=object)
    for i in range(array.size):
        array[i] = pickle.loads(blob[offsets[i] : offsets[i + 1]])
    return array.reshape(info.shape)


def _select_elements(info: ValueInfo, parts: Parts, rows: Rows) -> Parts:
    offsets = parts[0].view(_OFFSET)
    width = math.prod(info.shape[1:])
    starts = np.asarray(rows, dtype=np.int64) * width
    pieces = [parts[1][offsets[start] : offsets[start + width]] for start in starts]
    lengths = [np.diff(offsets[start : start + width + 1]) for start in starts]
    chosen = np.zeros(len(starts) * width + 1, dtype=_OFFSET)
    if len(starts):
        np.cumsum(np.concatenate(lengths), out=chosen[1:])
    blob = np.concatenate(pieces) if pieces else np.empty(0, dtype=np.uint8)
    return _array_bytes(chosen), blob


def _encode_pickled(value: Any) -> Parts:
    stream = io.BytesIO()
    leaves: list[Bytes] = []

    def take(leaf: pickle.PickleBuffer) -> None:
        leaves.append(_from_buffer(leaf.raw()))

    _Pickler(stream, take).dump(value)
    return (_from_buffer(stream.getbuffer()), *leaves)


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Pickles by value what lives in `__main__`, and hands tensors' bytes over out of band."""

    def __init__(self, stream: io.BytesIO, take: Callable[[pickle.PickleBuffer], object]) -> None:
        super().__init__(stream, protocol=5, buffer_callback=take)

    def reducer_override(self, obj: Any) -> Any:
        if is_tensor(obj):
            import torch

            if _is_dense(obj):
                data = pickle.PickleBuffer(_buffer(_tensor_bytes(obj)))
                return _rebuild_dense, (data, _dtype_name(obj.dtype), tuple(obj.shape))
            if obj.is_nested and obj.layout == torch.jagged:
                jagged: Any = obj
                parts = (jagged.values(), jagged.offsets(), jagged.lengths(), jagged._ragged_idx)
                return _rebuild_jagged, parts
        return super().reducer_override(obj)


def _rebuild_dense(data: Any, dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
    return _tensor_of(_from_buffer(data), dtype, shape)


def _rebuild_jagged(
    values: torch.Tensor, offsets: torch.Tensor, lengths: torch.Tensor | None, ragged_dim: int
) -> torch.Tensor:
    import torch

    return torch.nested.nested_tensor_from_jagged(values, offsets, lengths, jagged_dim=ragged_dim)
