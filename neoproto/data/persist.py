"""A batch in one file that is read without executing anything in it.

    magic, header length, header (JSON), then each column's bytes

Tensors of any dtype and arrays of numbers, text or times are stored as their bytes. Object columns and
meta_info are stored as JSON with tags for what JSON lacks: tuples, bytes, dates and times, decimals, UUIDs,
NumPy's numbers, arrays, tensors. Anything else (a user's class, a function) is refused by name when saving:
only a pickle could carry it.

Not a safetensors file, which holds no text, times, complex128 or objects: those would need a second file, and
the two would not appear at once. Tensors alone are written and read as fast by either.
"""

from __future__ import annotations

import base64
import json
import struct
from collections.abc import Callable, Mapping, Sequence
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any, BinaryIO
from uuid import UUID
from zoneinfo import ZoneInfo

import numpy as np

from neoproto.files import replace_file
from neoproto.store import ValueInfo
from neoproto.store.codec import decode, encode, is_tensor
from neoproto.text import cut, one_line

_MAGIC = b"NEOPROTO\x01"
_LENGTH = struct.Struct("<Q")
_TAG = "$"
DEEPEST = 100
"""Levels of lists and objects in one another: pickles and JSON run out of stack at a few hundred."""


def save(path: Path, columns: Mapping[str, Any], meta_info: Mapping[str, Any]) -> None:
    """Write columns and meta_info; the file appears complete or not at all.

    Raises:
        ValueError: an object column or meta_info holds something only a pickle could carry; names the place.
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
            elements = [to_plain(v, f"{name}[{i}]") for i, v in enumerate(value.reshape(-1).tolist())]
            data = json.dumps(elements).encode()
            entry.update(kind="objects", dtype="", shape=list(info.shape))
        else:
            raise ValueError(f"column {name!r}: arrays of dtype {value.dtype} cannot be saved")
        entry["nbytes"] = len(data)
        entries.append(entry)
        blobs.append(memoryview(data))
    header = json.dumps({"columns": entries, "meta_info": to_plain(dict(meta_info), "meta_info")}).encode()
    replace_file(path, _MAGIC + _LENGTH.pack(len(header)) + header, *blobs)


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
        what = "the header of the saved batch"
        try:
            header = json.loads(file.read(_LENGTH.unpack(start[len(_MAGIC) :])[0]))
            what = "the saved batch"
            return _columns(header, file), _from_json(header["meta_info"])
        except _DAMAGE as error:
            raise ValueError(f"{path}: {what} is damaged: {one_line(error)}") from error


_DAMAGE = (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError, MemoryError)
"""What a file that another program wrote, or changed, makes of reading it."""


def _columns(header: Mapping[str, Any], file: BinaryIO) -> tuple[dict[str, Any], dict[str, Any]]:
    """Tensors and arrays by name."""
    tensors: dict[str, Any] = {}
    arrays: dict[str, Any] = {}
    for entry in header["columns"]:
        data = bytearray(file.read(entry["nbytes"]))
        if len(data) != entry["nbytes"]:
            raise ValueError(f"cut short inside column {entry['name']!r}")
        target = tensors if entry["kind"] == "tensor" else arrays
        target[entry["name"]] = _column(entry, data)
    return tensors, arrays


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


def to_plain(value: Any, where: str, depth: int = 0) -> Any:
    """What JSON can say, tagged where JSON has no word for it. Equal values give equal JSON.

    Args:
        where: what the value is called, for messages.
        depth: how many lists and objects it lies in.

    Raises:
        ValueError: only a pickle could save it, or it is nested too deeply for one; names the place.
    """
    if value is None or type(value) in (bool, int, float, str):
        return value
    if depth >= DEEPEST and isinstance(value, list | tuple | dict):
        raise ValueError(f"{cut(where, 60)} is nested more than {DEEPEST} levels deep")
    if type(value) is list:
        return [to_plain(item, f"{where}[{i}]", depth + 1) for i, item in enumerate(value)]
    if type(value) is dict:
        if all(type(key) is str for key in value) and _TAG not in value:
            return {key: to_plain(item, f"{where}[{key!r}]", depth + 1) for key, item in value.items()}
        items = [
            [to_plain(k, where, depth + 1), to_plain(v, f"{where}[{k!r}]", depth + 1)]
            for k, v in value.items()
        ]
        return {_TAG: "dict", "items": items}
    if type(value) is tuple:
        items = [to_plain(item, f"{where}[{i}]", depth + 1) for i, item in enumerate(value)]
        return {_TAG: "tuple", "items": items}
    if type(value) is bytes:
        return {_TAG: "bytes", "data": base64.b64encode(value).decode()}
    if is_tensor(value) or isinstance(value, np.ndarray | np.generic):
        return _tagged_array(value, where, depth)
    if (tagged := _tagged_text(value)) is not None:
        return tagged
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    raise ValueError(f"{where} is a {kind}: only a pickle could save it, and pickles are not written")


def json_text(value: Any, where: str = "value") -> str:
    """`to_plain` as a text that does not depend on the order of keys that are texts; tuples are lists in it.

    Raises:
        ValueError: as `to_plain`.
    """
    try:
        text = json.dumps(value, sort_keys=True, default=lambda one: to_plain(one, where))
    except (TypeError, ValueError, RecursionError):  # keys of several kinds, what cannot be saved, too deep
        return json.dumps(to_plain(value, where), sort_keys=True)
    if text.count("[") + text.count("{") > DEEPEST:  # else it cannot be too deep
        to_plain(value, where)
    return text


def _tagged_text(value: Any) -> dict[str, Any] | None:
    """Dates, times, decimals and UUIDs by what Python writes them as; None for anything else.

    Subclasses that know no more than the standard's classes (pandas' without nanoseconds) are saved as these.
    """
    if getattr(value, "nanosecond", 0) or getattr(value, "nanoseconds", 0):
        return None
    if isinstance(value, datetime):
        # By its instant and the zone's name: an offset alone would lose which zone it was.
        zone = getattr(value.tzinfo, "key", None) or getattr(value.tzinfo, "zone", None)
        return {_TAG: "datetime", "text": value.isoformat(), "zone": zone}
    if isinstance(value, date):
        return {_TAG: "date", "text": value.isoformat()}
    if type(value) is time:
        return {_TAG: "time", "text": value.isoformat()}
    if isinstance(value, timedelta):
        return {_TAG: "timedelta", "text": f"{value.days} {value.seconds} {value.microseconds}"}
    if type(value) is Decimal:
        return {_TAG: "decimal", "text": str(value)}
    if type(value) is UUID:
        return {_TAG: "uuid", "text": str(value)}
    return None


def _timedelta(text: str) -> timedelta:
    days, seconds, microseconds = map(int, text.split())
    return timedelta(days, seconds, microseconds)


_OF_TEXT: Mapping[str, Callable[[str], Any]] = {
    "datetime": datetime.fromisoformat,
    "date": date.fromisoformat,
    "time": time.fromisoformat,
    "timedelta": _timedelta,
    "decimal": Decimal,
    "uuid": UUID,
}


def _tagged_array(value: Any, where: str, depth: int) -> Any:
    scalar = isinstance(value, np.generic)
    info, parts = encode(np.asarray(value) if scalar else value)
    if info.kind == "objects" or (isinstance(value, np.ndarray) and value.dtype == object):
        items = [
            to_plain(item, f"{where}[{i}]", depth + 1) for i, item in enumerate(value.reshape(-1).tolist())
        ]
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
    if tag in _OF_TEXT:
        read = _OF_TEXT[tag](value["text"])
        return read.astimezone(ZoneInfo(value["zone"])) if value.get("zone") else read
    kind = "array" if tag == "scalar" else tag
    dense = _dense(kind, value["dtype"], tuple(value["shape"]), bytearray(base64.b64decode(value["data"])))
    return dense[()] if tag == "scalar" else dense
