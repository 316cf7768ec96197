"""The inside of a batch: its columns, how they are made and read.

`DataProto` (in `proto.py`) adds the operations that choose, order and join rows and columns.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from typing import Any, Literal, Self

import numpy as np
import numpy.typing as npt
import torch

from neoproto.data.columns import Column, Index, Value, View, column_of, materialize
from neoproto.errors import StoreClosed
from neoproto.store import ObjectRef, ObjectStore, active_store, store_of

Keys = Sequence[str] | str | None


class ColumnBatch:
    """Columns of equal length, and `meta_info`. See `DataProto`."""

    __slots__ = ("_columns", "_device", "meta_info")

    def __init__(
        self,
        columns: Mapping[str, Column] | None = None,
        meta_info: Mapping[str, Any] | None = None,
        device: torch.device | None = None,
    ) -> None:
        self._columns: dict[str, Column] = dict(columns or {})
        self._device = device
        self.meta_info: dict[str, Any] = dict(meta_info or {})

    # -- making -------------------------------------------------------------------------------------------

    @classmethod
    def from_dict(
        cls,
        tensors: Mapping[str, torch.Tensor] | None = None,
        non_tensors: Mapping[str, Any] | None = None,
        meta_info: Mapping[str, Any] | None = None,
    ) -> Self:
        """Make a batch.

        Args:
            tensors: each [B, …].
            non_tensors: arrays [B, …], or sequences of length B, which become object arrays.
            meta_info: copied one level deep.

        Raises:
            ValueError: a column has no batch dimension, or another length than the rest.
        """
        values: dict[str, Value] = {}
        for key, tensor in (tensors or {}).items():
            if not isinstance(tensor, torch.Tensor):
                raise ValueError(f"column {key!r} must be a tensor, got {type(tensor).__name__}")
            values[key] = tensor
        for key, value in (non_tensors or {}).items():
            if key in values:
                raise ValueError(f"column {key!r} is given both as a tensor and as a non-tensor")
            values[key] = as_array(key, value)
        batch = cls(meta_info=meta_info)
        batch._add(values)
        return batch

    @classmethod
    def from_single_dict(cls, data: Mapping[str, Any], meta_info: Mapping[str, Any] | None = None) -> Self:
        """Make a batch of a dictionary that mixes tensors and arrays.

        Raises:
            ValueError: a value is neither, or has another length than the rest.
        """
        tensors = {key: value for key, value in data.items() if isinstance(value, torch.Tensor)}
        others = {key: value for key, value in data.items() if key not in tensors}
        for key, value in others.items():
            if not isinstance(value, np.ndarray):
                raise ValueError(f"column {key!r} must be a tensor or an array, got {type(value).__name__}")
        return cls.from_dict(tensors, others, meta_info)

    @classmethod
    def from_refs(cls, refs: Mapping[str, ObjectRef], meta_info: Mapping[str, Any] | None = None) -> Self:
        """Make a batch of values that are in a store already, each with B rows."""
        batch = cls(meta_info=meta_info)
        batch._add_columns({key: column_of(key, ref) for key, ref in refs.items()})
        return batch

    # -- reading ------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return next((len(column.view) for column in self._columns.values()), 0)

    def __contains__(self, key: object) -> bool:
        return key in self._columns

    def __iter__(self) -> Iterator[DataProtoItem]:
        """Rows, one at a time, read from the store in one go."""
        local = self.inline()
        return (DataProtoItem(local, row) for row in range(len(self)))

    def __repr__(self) -> str:
        columns = ", ".join(
            f"{key}: {str(c.dtype).removeprefix('torch.')}{list(c.shape)}{' (stored)' if c.refs else ''}"
            for key, c in self._columns.items()
        )
        return f"{type(self).__name__}({len(self)} rows; {columns}; meta_info: {sorted(self.meta_info)})"

    @property
    def batch(self) -> ColumnsView:
        """The tensor columns, as a mapping that reads on access and can be assigned to."""
        return ColumnsView(self, "tensor")

    @property
    def non_tensor_batch(self) -> ColumnsView:
        """The array columns, likewise."""
        return ColumnsView(self, "array")

    @property
    def columns(self) -> Mapping[str, Column]:
        """What the batch consists of, for code that moves it without reading it."""
        return dict(self._columns)

    @property
    def refs(self) -> list[ObjectRef]:
        """Every stored object the batch refers to, once."""
        return list(dict.fromkeys(ref for column in self._columns.values() for ref in column.refs))

    def materialize(
        self, keys: Keys = None, device: torch.device | str | None = None
    ) -> dict[str, torch.Tensor | npt.NDArray[Any]]:
        """Read columns, in one round trip per store; of each only the rows this batch has.

        Args:
            keys: which columns; None for all.
            device: where tensors go; None for what `to` said, else the CPU (inline tensors stay put).

        Raises:
            KeyError: there is no such column.
            StoreClosed, KeyMissing: the store, or the column in it, is gone.
        """
        target = torch.device(device) if device is not None else self._device
        return dict(materialize(self._pick(names_of(keys, self._columns)), target))

    def inline(self) -> Self:
        """The same batch with every byte read into this process, holding no references."""
        values = self.materialize()
        columns = {key: column_of(key, value) for key, value in values.items()}
        return type(self)(columns, self._meta(), self._device)

    # -- where the bytes are ------------------------------------------------------------------------------

    def to(self, device: torch.device | str) -> Self:
        """Put inline tensors on `device`, and have stored ones read to it; in place, returns this batch."""
        self._device = torch.device(device)
        self._columns = {name: column.moved(self._device) for name, column in self._columns.items()}
        return self

    def stored(self, store: ObjectStore | None = None) -> Self:
        """The same batch with every inline column put into `store`, in one go.

        Args:
            store: None for the active one; if there is none either, the batch comes back as it is.
        """
        store = store or active_store()
        inline = [name for name, column in self._columns.items() if len(column.refs) < len(column.sources)]
        columns = dict(self._columns)
        if store is not None and inline:
            refs = store.put_batch(list(self.materialize(inline).values()))
            columns.update({name: column_of(name, ref) for name, ref in zip(inline, refs, strict=True)})
        return type(self)(columns, self._meta(), self._device)

    def release(self) -> None:
        """Delete the stored objects this batch refers to, also for every other batch that refers to them.

        Idempotent; objects of a store that is closed are gone already.
        """
        by_store: dict[str, list[ObjectRef]] = {}
        for ref in self.refs:
            by_store.setdefault(ref.store, []).append(ref)
        for refs in by_store.values():
            try:
                store_of(refs[0]).delete_batch(refs, missing_ok=True)
            except StoreClosed:
                continue

    def __reduce__(self) -> Any:
        columns = {name: column.packed() for name, column in self._columns.items()}
        return type(self), (columns, self.meta_info, self._device)

    # -- inside -------------------------------------------------------------------------------------------

    def _add(self, values: Mapping[str, Value]) -> None:
        """Add or replace columns: one put if a store is active."""
        whole = {key: column_of(key, value) for key, value in values.items()}
        self._check_lengths(whole)
        store = active_store()
        if store is not None and values:
            refs = store.put_batch(list(values.values()))
            whole = {key: column_of(key, ref) for key, ref in zip(values, refs, strict=True)}
        elif self._device is not None:
            whole = {key: column.moved(self._device) for key, column in whole.items()}
        self._add_columns(whole)

    def _add_columns(self, columns: Mapping[str, Column]) -> None:
        """Add columns, giving those that read from row 0 on a common view."""
        self._check_lengths(columns)
        view = View(range(next((len(c.view) for c in columns.values()), 0)))
        for key, column in columns.items():
            self._columns[key] = column.with_view(view) if column.view.same(view) else column

    def _check_lengths(self, columns: Mapping[str, Column]) -> None:
        kept = {key: column for key, column in self._columns.items() if key not in columns}
        everything = {**kept, **columns}
        first = next(iter(everything), None)
        for key, column in everything.items():
            if len(column.view) != len(everything[first].view):  # type: ignore[index]
                raise ValueError(
                    f"column {key!r} has shape {column.shape}, column {first!r} has "
                    f"{everything[first].shape}: batch dimensions differ"  # type: ignore[index]
                )

    def _pick(self, names: Sequence[str]) -> dict[str, Column]:
        return {name: self._columns[name] for name in names}

    def _meta(self) -> dict[str, Any]:
        return copy.deepcopy(self.meta_info)

    def _index(self, idxs: Any) -> npt.NDArray[np.int64]:
        index = idxs.cpu().numpy() if isinstance(idxs, torch.Tensor) else np.asarray(idxs)
        if index.ndim != 1:
            raise ValueError(f"row selection must be one-dimensional, got shape {index.shape}")
        if index.dtype == bool:
            if len(index) != len(self):
                raise ValueError(f"mask has {len(index)} entries for {len(self)} rows")
            return np.flatnonzero(index).astype(np.int64, copy=False)
        if index.size and index.dtype.kind not in "iu":
            raise ValueError(f"row selection must be integers or booleans, got {index.dtype}")
        rows = index.astype(np.int64)
        outside = rows[(rows < -len(self)) | (rows >= len(self))]
        if outside.size:
            raise IndexError(f"row {outside[0]} is out of range for a batch of {len(self)} rows")
        return np.where(rows < 0, rows + len(self), rows)

    def _taken_columns(self, index: Index) -> dict[str, Column]:
        memo: dict[int, View] = {}
        columns = {}
        for name, column in self._columns.items():
            if id(column.view) not in memo:
                memo[id(column.view)] = column.view.take(index)
            columns[name] = column.with_view(memo[id(column.view)])
        return columns

    def _taken(self, index: Index) -> Self:
        return type(self)(self._taken_columns(index), self._meta(), self._device)


class ColumnsView(MutableMapping[str, Any]):
    """The columns of one kind, by name. Reading one reads its bytes; assigning adds or replaces it."""

    def __init__(self, owner: ColumnBatch, kind: Literal["tensor", "array"]) -> None:
        self._owner, self._kind = owner, kind

    def __getitem__(self, key: str) -> Any:
        if key not in self:
            raise KeyError(f"no {self._kind} column {key!r}; there are {sorted(self)}")
        return self._owner.materialize([key])[key]

    def __setitem__(self, key: str, value: Any) -> None:
        if (self._kind == "tensor") != isinstance(value, torch.Tensor):
            raise ValueError(f"column {key!r}: a {type(value).__name__} is no {self._kind} column")
        self._owner._add({key: value if self._kind == "tensor" else as_array(key, value)})

    def __delitem__(self, key: str) -> None:
        if key not in self:
            raise KeyError(f"no {self._kind} column {key!r}; there are {sorted(self)}")
        del self._owner._columns[key]

    def __contains__(self, key: object) -> bool:
        column = self._owner._columns.get(key)  # type: ignore[call-overload]
        return column is not None and column.kind == self._kind

    def __iter__(self) -> Iterator[str]:
        return (key for key, column in self._owner._columns.items() if column.kind == self._kind)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __repr__(self) -> str:
        return f"{{{', '.join(f'{key}: {self._owner._columns[key].shape}' for key in self)}}}"

    @property
    def batch_size(self) -> torch.Size:
        """[B]."""
        return torch.Size([len(self._owner)])


class DataProtoItem:
    """One row of a batch.

    Attributes:
        meta_info: a copy of the batch's.
    """

    __slots__ = ("_row", "meta_info")

    def __init__(self, batch: ColumnBatch, row: int) -> None:
        if not -len(batch) <= row < len(batch):
            raise IndexError(f"row {row} is out of range for a batch of {len(batch)} rows")
        row += len(batch) if row < 0 else 0
        self._row = batch._taken(slice(row, row + 1))
        self.meta_info = self._row.meta_info

    def __getitem__(self, key: str) -> Any:
        return self._row.materialize([key])[key][0]

    @property
    def batch(self) -> dict[str, torch.Tensor]:
        """The row's tensors."""
        return {key: value[0] for key, value in self._row.materialize(list(self._row.batch)).items()}

    @property
    def non_tensor_batch(self) -> dict[str, Any]:
        """The row's other values."""
        return {
            key: value[0] for key, value in self._row.materialize(list(self._row.non_tensor_batch)).items()
        }


def names_of(keys: Keys, known: Mapping[str, Any] | None, default: Sequence[str] | None = None) -> list[str]:
    """A list of keys, each once.

    Args:
        known: where they must be; None accepts any.
        default: what None stands for; all that are known if left out.

    Raises:
        KeyError: a key is not known.
    """
    if keys is None:
        return list(default if default is not None else known or ())
    names = list(dict.fromkeys([keys] if isinstance(keys, str) else keys))
    for name in names:
        if known is not None and name not in known:
            raise KeyError(f"no {name!r}; there are {sorted(known)}")
    return names


def as_array(key: str, value: Any) -> npt.NDArray[Any]:
    """An array as it is, a sequence as an object array with one element per entry.

    Raises:
        ValueError: it is neither.
    """
    if isinstance(value, np.ndarray):
        return value
    if isinstance(value, str | bytes) or not isinstance(value, Sequence):
        raise ValueError(f"column {key!r} must be an array or a sequence, got {type(value).__name__}")
    array = np.empty(len(value), dtype=object)
    for row, element in enumerate(value):
        array[row] = element
    return array
