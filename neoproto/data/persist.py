"""A batch in one file that is read without executing anything in it.

    magic, header length, header (JSON), then each column's bytes

Tensors of any dtype and arrays of numbers, text or times are stored as their bytes. Object columns and
meta_info are stored as JSON with tags for what JSON lacks: tuples, bytes, NumPy's numbers, arrays, tensors.
Anything else (a user's class, a function) is refused by name when saving: only a pickle could carry it.
"""

from __future__ import annotations

import base64
import json
import os
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from neoproto.store import ValueInfo
from neoproto.store.codec import decode, encode

_MAGIC = b"NEOPROTO\x01"
_LENGTH = struct.Struct("<Q")
_TAG = "$"


def save(path: Path, columns: Mapping[str, Any], meta_info: Mapping[str, Any]) -> None:
    """Write columns and meta_info; the file appears complete or not at all.

    Raises:
        ValueError: an object column or meta_info holds something only a pickle could carry; says where.
    """
    entries: list[dict[str, Any]] = []
    blobs: list[memoryview] = []
    for name, value in columns.items():
        entry: dict[str, Any] = {"name": name}
        info, parts = encode(value)
        if info.kind in ("tensor", "array"):
            data: Any = parts[0]
            entry.update(kind=info.kind, dtype=info.dtype, shape=list(info.shape))
        elif info.kind == "objects":
            elements = [_to_json(v, f"{name}[{i}]") for i, v in enumerate(value.reshape(-1).tolist())]
            data = json.dumps(elements).encode()
            entry.update(kind="objects", dtype="", shape=list(info.shape))
        else:
            raise ValueError(f"column {name!r}: arrays of dtype {value.dtype} cannot be saved")
        entry["nbytes"] = len(data)
        entries.append(entry)
        blobs.append(memoryview(data))
    header = json.dumps({"columns": entries, "meta_info": _to_json(dict(meta_info), "meta_info")}).encode()
    scratch = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        with scratch.open("wb") as file:
            file.write(_MAGIC + _LENGTH.pack(len(header)) + header)
            for blob in blobs:
                file.write(blob)
        scratch.replace(path)
    finally:
        scratch.unlink(missing_ok=True)


def load(path: Path) -> tuple[tuple[dict[str, Any], dict[str, Any]], dict[str, Any]]:
    """Read what `save` wrote.

    Returns:
        (tensors, arrays) by name, and meta_info.

    Raises:
        ValueError: the file is not a saved batch, or is cut short.
    """
    with path.open("rb") as file:
        start = file.read(len(_MAGIC) + _LENGTH.size)
        if len(start) < len(_MAGIC) + _LENGTH.size or not start.startswith(_MAGIC):
            raise ValueError(f"{path} is not a saved batch")
        text = file.read(_LENGTH.unpack(start[len(_MAGIC) :])[0])
        try:
            header = json.loads(text)
        except ValueError as error:
            raise ValueError(f"{path}: the header of the saved batch is damaged") from error
        tensors: dict[str, Any] = {}
        arrays: dict[str, Any] = {}
        for entry in header["columns"]:
            data = bytearray(file.read(entry["nbytes"]))
            if len(data) != entry["nbytes"]:
                raise ValueError(f"{path}: cut short inside column {entry['name']!r}")
            target = tensors if entry["kind"] == "tensor" else arrays
            target[entry["name"]] = _column(entry, data)
    return (tensors, arrays), _from_json(header["meta_info"])


def _column(entry: Mapping[str, Any], data: bytearray) -> Any:
    shape = tuple(entry["shape"])
    if entry["kind"] != "objects":
        return _dense(entry["kind"], entry["dtype"], shape, data)
    return _elements(json.loads(data), shape)


def _elements(elements: list[Any], shape: Sequence[int]) -> np.ndarray[Any, Any]:
    array = np.empty(len(elements), dtype=object)
    for i, element in enumerate(elements):
        array[i] = _from_json(element)
    return array.reshape(shape)


def _dense(kind: Any, dtype: str, shape: tuple[int, ...], data: bytearray) -> Any:
    info = ValueInfo(kind=kind, dtype=dtype, shape=shape, nbytes=len(data))
    return decode(info, (np.frombuffer(data, dtype=np.uint8),))


def _to_json(value: Any, where: str) -> Any:
    """What JSON can say, tagged where JSON has no word for it."""
    if value is None or type(value) in (bool, int, float, str):
        return value
    if type(value) is list:
        return [_to_json(item, f"{where}[{i}]") for i, item in enumerate(value)]
    if type(value) is dict:
        if all(type(key) is str for key in value) and _TAG not in value:
            return {key: _to_json(item, f"{where}[{key!r}]") for key, item in value.items()}
        items = [[_to_json(k, where), _to_json(v, f"{where}[{k!r}]")] for k, v in value.items()]
        return {_TAG: "dict", "items": items}
    if type(value) is tuple:
        return {_TAG: "tuple", "items": [_to_json(item, f"{where}[{i}]") for i, item in enumerate(value)]}
    if type(value) is bytes:
        return {_TAG: "bytes", "data": base64.b64encode(value).decode()}
    if isinstance(value, torch.Tensor | np.ndarray | np.generic):
        return _tagged_array(value, where)
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    raise ValueError(f"{where} is a {kind}: only a pickle could save it, and pickles are not written")


def _tagged_array(value: Any, where: str) -> Any:
    scalar = isinstance(value, np.generic)
    info, parts = encode(np.asarray(value) if scalar else value)
    if info.kind == "objects" or (isinstance(value, np.ndarray) and value.dtype == object):
        items = [_to_json(item, f"{where}[{i}]") for i, item in enumerate(value.reshape(-1).tolist())]
        return {_TAG: "objects", "shape": list(value.shape), "items": items}
    if info.kind == "object":
        raise ValueError(f"{where}: a {type(value).__name__} of this dtype or layout cannot be saved")
    return {
        _TAG: "scalar" if scalar else info.kind,
        "dtype": info.dtype,
        "shape": list(info.shape),
        "data": base64.b64encode(parts[0].tobytes()).decode(),
    }


def _from_json(value: Any) -> Any:
    if isinstance(value, list):
        return [_from_json(item) for item in value]
    if not isinstance(value, dict):
        return value
    tag = value.get(_TAG)
    if tag is None:
        return {key: _from_json(item) for key, item in value.items()}
    if tag == "dict":
        return {_from_json(key): _from_json(item) for key, item in value["items"]}
    if tag == "tuple":
        return tuple(_from_json(item) for item in value["items"])
    if tag == "bytes":
        return base64.b64decode(value["data"])
    if tag == "objects":
        return _elements(value["items"], value["shape"])
    kind = "array" if tag == "scalar" else tag
    dense = _dense(kind, value["dtype"], tuple(value["shape"]), bytearray(base64.b64decode(value["data"])))
    return dense[()] if tag == "scalar" else dense
