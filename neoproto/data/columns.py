"""A column: sources that hold bytes, and a view that names the rows it consists of.

    sources   A: stored [4096, 512]      B: inline [64, 512]
    view      (A, 7) (A, 7) (B, 0) …     one (source, row) pair per row of the column

Every operation on a batch makes new views and leaves the sources alone. Columns put together share a view, so
one batch operation computes each distinct view once.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch

from neoproto.store import ObjectRef, Rows, store_of

Array = np.ndarray[Any, Any]
Value = torch.Tensor | Array
Source = torch.Tensor | Array | ObjectRef
Index = slice | npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class View:
    """Which rows, of which sources.

    Attributes:
        rows: row in its source, for each row of the column.
        parts: number of the source, int32, for each row; None where all rows are in source 0.
    """

    rows: Rows
    parts: npt.NDArray[np.int32] | None = None

    def __len__(self) -> int:
        return len(self.rows)

    def take(self, index: Index) -> View:
        """The rows at `index`: a slice, or int64 positions that are in range."""
        if isinstance(index, slice):
            rows, parts = self.rows[index], None if self.parts is None else self.parts[index]
            # A backward slice of an array has negative strides, which torch does not take as an index.
            rows = rows if isinstance(rows, range) else rows.copy()
            return View(rows, parts)
        parts = None if self.parts is None else self.parts[index]
        if isinstance(self.rows, range):
            # Not written out first: a few rows of a large batch must not cost what the batch has.
            return View(self.rows.start + self.rows.step * index, parts)
        return View(self.rows[index], parts)

    def same(self, other: View) -> bool:
        """Whether both name the same rows in the same order."""
        if self is other:
            return True
        if (self.parts is None) != (other.parts is None) or len(self) != len(other):
            return False
        same_parts = self.parts is None or np.array_equal(self.parts, other.parts)  # type: ignore[arg-type]
        return same_parts and np.array_equal(self.rows, other.rows)

    def by_source(self, count: int) -> list[tuple[int, Rows, npt.NDArray[np.int64] | None]]:
        """For each source in use: its number, its rows, and where they go in the column (None: all)."""
        if self.parts is None:
            return [(0, self.rows, None)]
        rows = np.asarray(self.rows, dtype=np.int64)
        # Sorted once: a batch of many small chunks has about as many sources as rows, and a look at all rows
        # for each of them would take the square of that.
        order = np.argsort(self.parts, kind="stable")
        ends = np.searchsorted(self.parts[order], np.arange(count + 1))
        found: list[tuple[int, Rows, npt.NDArray[np.int64] | None]] = []
        for part, (start, end) in enumerate(itertools.pairwise(ends.tolist())):
            where = order[start:end]
            if where.size:
                found.append((part, rows[where], where.astype(np.int64, copy=False)))
        return found


@dataclass(frozen=True, slots=True, eq=False)
class Column:
    """One column of a batch.

    Attributes:
        kind: what it materializes to.
        dtype: torch's or NumPy's.
        row_shape: shape without the batch dimension.
        sources, view: where its rows are. A source has the column's row shape; its dtype may be narrower.
    """

    kind: Literal["tensor", "array"]
    dtype: Any
    row_shape: tuple[int, ...]
    sources: tuple[Source, ...]
    view: View

    @property
    def shape(self) -> tuple[int, ...]:
        return (len(self.view), *self.row_shape)

    @property
    def refs(self) -> tuple[ObjectRef, ...]:
        """The stored objects it reads from."""
        return tuple(source for source in self.sources if isinstance(source, ObjectRef))

    def identical(self, other: Column) -> bool:
        """Whether both are the same rows of the same sources, found without reading any."""
        if len(self.sources) != len(other.sources) or self.dtype != other.dtype:
            return False
        pairs = zip(self.sources, other.sources, strict=True)
        same = all(a is b or (isinstance(a, ObjectRef) and a == b) for a, b in pairs)
        return same and self.view.same(other.view)

    def with_view(self, view: View) -> Column:
        return Column(self.kind, self.dtype, self.row_shape, self.sources, view)

    def packed(self) -> Column:
        """The same rows with nothing else attached: unused sources dropped, inline rows gathered."""
        if not len(self.view):
            return replace(self, sources=(_empty(self),), view=View(range(0)))
        sources: list[Source] = []
        rows = np.asarray(self.view.rows, dtype=np.int64).copy()
        parts = np.zeros(len(self.view), dtype=np.int32)
        for part, wanted, where in self.view.by_source(len(self.sources)):
            source = self.sources[part]
            at = slice(None) if where is None else where
            parts[at] = len(sources)
            if not isinstance(source, ObjectRef):
                source = _own(_gather(source, wanted))
                rows[at] = np.arange(len(wanted))
            sources.append(source)
        if len(sources) == 1:
            return replace(self, sources=tuple(sources), view=View(_as_range(rows)))
        return replace(self, sources=tuple(sources), view=View(rows, parts))

    def moved(self, device: torch.device) -> Column:
        """The same column with inline tensors on `device`."""
        if self.kind != "tensor":
            return self
        sources = tuple(s.to(device) if isinstance(s, torch.Tensor) else s for s in self.sources)
        return replace(self, sources=sources)


def column_of(name: str, value: Value | ObjectRef, view: View | None = None) -> Column:
    """Make a column of a whole tensor, array or stored one.

    Raises:
        ValueError: it has no batch dimension, or is not one of these.
    """
    if isinstance(value, ObjectRef):
        if not value.info.has_rows:
            raise ValueError(f"column {name!r}: a stored {value.info.kind} has no rows")
        tensor, shape = value.info.kind == "tensor", value.info.shape
        dtype = getattr(torch, value.info.dtype) if tensor else np.dtype(value.info.dtype or object)
    elif isinstance(value, torch.Tensor) and not value.is_nested and value.layout == torch.strided:
        tensor, shape, dtype = True, tuple(value.shape), value.dtype
    elif isinstance(value, np.ndarray):
        tensor, shape, dtype = False, value.shape, value.dtype
    else:
        raise ValueError(f"column {name!r} must be a dense tensor or an array, got {_kind_of(value)}")
    if not shape:
        raise ValueError(f"column {name!r} has no batch dimension: shape ()")
    kind: Literal["tensor", "array"] = "tensor" if tensor else "array"
    return Column(kind, dtype, shape[1:], (value,), view or View(range(shape[0])))


def _kind_of(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return type(value).__name__
    if value.is_nested:
        return "a nested tensor: pad it, or give its rows as a non-tensor, list(value.unbind())"
    return f"a tensor of layout {value.layout}"


def join_columns(name: str, columns: Sequence[Column], memo: dict[Any, View]) -> Column:
    """Put columns one after another; dtypes are promoted as `torch.cat` and `np.concatenate` do.

    Args:
        memo: views already joined for another column of the same batches.

    Raises:
        ValueError: they differ in row shape, or some are tensors and some arrays.
    """
    first = columns[0]
    if len(columns) == 1:
        return first
    if any(c.kind != first.kind or c.row_shape != first.row_shape for c in columns):
        found = ", ".join(f"{c.kind} {c.shape}" for c in columns)
        raise ValueError(f"cannot concat column {name!r}: {found}")
    sources: list[Source] = []
    numbers: list[tuple[int, ...]] = []
    seen: dict[Any, int] = {}
    for column in columns:
        places = []
        for source in column.sources:
            place = seen.setdefault(source if isinstance(source, ObjectRef) else id(source), len(sources))
            if place == len(sources):
                sources.append(source)
            places.append(place)
        numbers.append(tuple(places))
    key = tuple((id(column.view), number) for column, number in zip(columns, numbers, strict=True))
    if key not in memo:
        memo[key] = _join_views([column.view for column in columns], numbers)
    dtype = first.dtype
    for column in columns[1:]:
        if column.dtype != dtype:
            join = torch.promote_types if first.kind == "tensor" else np.promote_types
            dtype = join(dtype, column.dtype)
    return Column(first.kind, dtype, first.row_shape, tuple(sources), memo[key])


def materialize(columns: Mapping[str, Column], device: torch.device | None = None) -> dict[str, Value]:
    """Read columns: one batched get per store, and of each stored value the rows in use only.

    Args:
        device: where tensors go; None leaves inline ones where they are and puts stored ones on the CPU.

    Returns:
        Tensors and arrays, by name. A whole inline column is returned itself, not copied.
    """
    wanted: dict[str, list[tuple[str, int, ObjectRef, Rows | None, Any]]] = {}
    for name, column in columns.items():
        if not len(column.view):
            continue
        for part, rows, _ in column.view.by_source(len(column.sources)):
            source = column.sources[part]
            if isinstance(source, ObjectRef):
                unique, spread = _distinct(rows, source.info.shape[0])
                wanted.setdefault(source.store, []).append((name, part, source, unique, spread))
    read: dict[tuple[str, int], Value] = {}
    for requests in wanted.values():
        store = store_of(requests[0][2])
        values = store.get_batch([request[2] for request in requests], rows=[r[3] for r in requests])
        for (name, part, _, _, spread), value in zip(requests, values, strict=True):
            read[name, part] = value if spread is None else _repeated(value, spread)
    return {name: _assemble(name, column, read, device) for name, column in columns.items()}


def _assemble(
    name: str, column: Column, read: Mapping[tuple[str, int], Value], device: torch.device | None
) -> Value:
    if not len(column.view):
        empty = _empty(column)
        return empty.to(device) if isinstance(empty, torch.Tensor) else empty
    pieces: list[tuple[Value, Any]] = []
    for part, rows, where in column.view.by_source(len(column.sources)):
        source = column.sources[part]
        value = read[name, part] if isinstance(source, ObjectRef) else _gather(source, rows)
        pieces.append((value, where))
    if len(pieces) == 1:
        value = pieces[0][0]
    else:
        # Joined, then put in order at once: a batch of thousands of chunks has as many pieces a column.
        if column.kind == "tensor":
            found = [
                torch.as_tensor(piece) if isinstance(piece, np.ndarray) else piece for piece, _ in pieces
            ]
            target = device or found[0].device
            value = torch.cat([one if one.device == target else one.to(target) for one in found])
        else:
            value = np.concatenate([piece for piece, _ in pieces], dtype=column.dtype, casting="unsafe")
        places = np.concatenate([where for _, where in pieces])
        if not isinstance(_as_range(places), range):
            order = np.empty_like(places)
            order[places] = np.arange(len(places))
            value = _gather(value, order)
    if isinstance(value, torch.Tensor):
        return value.to(device=device, dtype=column.dtype)
    return value if value.dtype == column.dtype else value.astype(column.dtype)


def _gather(value: Value, rows: Rows) -> Value:
    if isinstance(rows, range):
        if rows == range(value.shape[0]):
            return value
        if rows.step > 0:
            return value[rows.start : rows.stop : rows.step]
    index = np.asarray(rows, dtype=np.int64)
    if isinstance(value, torch.Tensor):
        return value[torch.as_tensor(index, device=value.device)]
    return value[index]


def _repeated(value: Value, rows: Rows) -> Value:
    """`value[rows]`, where rows that occur again are copies: changing one changes no other."""
    chosen = _gather(value, rows)
    if isinstance(chosen, np.ndarray) and chosen.dtype == object:
        seen: set[int] = set()
        for at, row in enumerate(np.asarray(rows).tolist()):
            if row in seen:
                chosen[at] = copy.deepcopy(chosen[at])
            seen.add(row)
    return chosen


def _empty(column: Column) -> Value:
    shape = (0, *column.row_shape)
    return (
        torch.empty(shape, dtype=column.dtype) if column.kind == "tensor" else np.empty(shape, column.dtype)
    )


def _own(value: Value) -> Value:
    """The value without the rest of the memory it is a part of, which would be pickled along."""
    if isinstance(value, torch.Tensor):
        value = value.detach()
        return value.clone() if value.untyped_storage().nbytes() > value.nbytes else value
    return value


def _distinct(rows: Rows, total: int) -> tuple[Rows | None, Rows | None]:
    """What to ask a store for (None: everything), and how to spread it over the rows (None: as it comes)."""
    if isinstance(rows, range):
        return (None if rows == range(total) else rows), None
    unique, spread = np.unique(rows, return_inverse=True)
    if len(unique) == len(rows):
        return rows, None
    return _as_range(unique), spread.reshape(-1)


def _as_range(rows: npt.NDArray[np.int64]) -> Rows:
    if rows.size and (rows.size == 1 or bool(np.all(np.diff(rows) == 1))):
        return range(int(rows[0]), int(rows[0]) + rows.size)
    return rows


def _join_views(views: Sequence[View], numbers: Sequence[tuple[int, ...]]) -> View:
    """One view over renumbered sources; `numbers[i][p]` is the new number of source p of view i."""
    whole = _joined_range(views)
    rows: Rows
    rows = whole if whole is not None else np.concatenate([np.asarray(v.rows, dtype=np.int64) for v in views])
    if all(view.parts is None and set(number) == {0} for view, number in zip(views, numbers, strict=True)):
        return View(rows)
    parts = [
        np.full(len(view), number[0], dtype=np.int32)
        if view.parts is None
        else np.asarray(number, dtype=np.int32)[view.parts]
        for view, number in zip(views, numbers, strict=True)
    ]
    return View(rows, np.concatenate(parts))


def _joined_range(views: Sequence[View]) -> range | None:
    """The range that consecutive ranges make up, if they do."""
    start = stop = None
    for view in views:
        if not isinstance(view.rows, range) or view.rows.step != 1:
            return None
        if stop is None:
            start = view.rows.start
        elif view.rows.start != stop:
            return None
        stop = view.rows.stop
    return None if start is None or stop is None else range(start, max(start, stop))
