"""What a notebook shows of a batch: its columns, where they lie, and its first rows.

Only the rows that are shown are read, and of a column only if they are small: a look at a batch must neither
move what the batch refers to nor take long.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from neoproto.data.columns import Column
from neoproto.errors import StoreError
from neoproto.store import ObjectRef
from neoproto.tables import MOST_COLUMNS, short, table_html, text_html

if TYPE_CHECKING:
    from neoproto.data.proto import DataProto

FIRST_ROWS = 5
LARGEST_ROW = 64 * 1024
"""Bytes of one row of a column; larger ones are not read."""
_FIRST_NUMBERS = 4


def batch_html(batch: DataProto) -> str:
    """A table of the columns, and one of the first rows of those that can be read at a small cost."""
    columns = batch.columns
    about = [
        (name, column.kind, _dtype(column), list(column.shape), _place(column))
        for name, column in columns.items()
    ]
    title = f"{type(batch).__name__}: {len(batch):,} rows, {len(columns)} columns"
    whole = table_html(title, ("column", "kind", "dtype", "shape", "where it lies"), about)
    if batch.meta_info:
        whole += table_html("meta_info", (), sorted(batch.meta_info.items(), key=lambda item: str(item[0])))
    return whole + _rows_html(batch)


def _rows_html(batch: DataProto) -> str:
    names = [name for name, column in batch.columns.items() if _row_bytes(column) <= LARGEST_ROW]
    large = len(batch.columns) - len(names)
    names = names[: MOST_COLUMNS - 1]
    if not len(batch) or not names:
        return ""
    try:
        read = batch.slice(0, FIRST_ROWS).materialize(names)
    except StoreError as error:
        return f"<div>Its rows cannot be read: {text_html(short(str(error)))}</div>"
    shown = min(len(batch), FIRST_ROWS)
    rows = [[row, *(_cell(read[name][row]) for name in names)] for row in range(shown)]
    title = "first rows" + (f", without {large} column(s) of large rows" if large else "")
    return table_html(title, ("row", *names), rows, total=len(batch))


def _cell(value: Any) -> str:
    """One value of one row; of numbers the first few."""
    if not isinstance(value, torch.Tensor | np.ndarray):
        return short(value.item() if isinstance(value, np.generic) else value)
    flat = value.reshape(-1)
    first = flat[:_FIRST_NUMBERS].tolist()
    numbers = ", ".join(f"{one:.4g}" if isinstance(one, float) else short(one) for one in first)
    return numbers if value.ndim == 0 else f"[{numbers}{', …' if len(flat) > len(first) else ''}]"


def _dtype(column: Column) -> str:
    return str(column.dtype).removeprefix("torch.")


def _row_bytes(column: Column) -> float:
    """Bytes that one row is, about. Of objects only what is stored is known; inline ones are here already."""
    stored = [ref.info for ref in column.refs]
    if any(info.kind == "objects" for info in stored):
        return max(info.nbytes / max(1, info.shape[0]) for info in stored)
    return float(np.prod(column.row_shape, dtype=np.float64) * column.dtype.itemsize)


def _place(column: Column) -> str:
    stored = column.refs
    inline = len(column.sources) - len(stored)
    if not stored:
        devices = {str(one.device) for one in column.sources if isinstance(one, torch.Tensor)}
        return f"inline ({', '.join(sorted(devices))})" if devices else "inline"
    size = sum(ref.info.nbytes for ref in dict.fromkeys(stored))
    what = "stored" if len(stored) == 1 else f"{len(stored):,} stored objects"
    more = f", {inline:,} inline" if inline else ""
    return f"{what}, {_size(size)}{more} ({_volumes(stored)})"


def _volumes(stored: tuple[ObjectRef, ...]) -> str:
    names = sorted({ref.volume for ref in stored})
    return f"volume {names[0]}" if len(names) == 1 else f"{len(names):,} volumes"


def _size(nbytes: int) -> str:
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if nbytes >= size:
            return f"{nbytes / size:.1f} {unit}"
    return f"{nbytes} B"
