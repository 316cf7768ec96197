"""DataProto: a batch of columns that may live in the object store.

    from_dict ──put once──> references ──select, chunk, concat, reorder…──> references ──materialize──> bytes

Operations and their results are verl's; they move index views, not bytes. `data[key]` and `materialize` read.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from neoproto.data.batch import ColumnBatch, DataProtoItem, Keys, names_of
from neoproto.data.columns import View, join_columns
from neoproto.data.display import batch_html
from neoproto.data.persist import load, save


class DataProto(ColumnBatch):
    """Columns of equal length, and `meta_info`.

    Tensors are reached through `batch`, arrays through `non_tensor_batch`, either by `data[key]`. With a
    store active (see `neoproto.store`) new columns go there, all of a call in one put, and the batch holds
    references. What is read from the store is a copy, of each row its own: to change a column, assign it.
    Columns that are not in a store are handed out themselves, as verl does.

    Attributes:
        meta_info: what concerns the whole batch. Derived batches get a deep copy.
    """

    __slots__ = ()

    def __getitem__(self, item: Any) -> Any:
        """`data["key"]`: that column's value; an int: that row; a slice, list or mask: a smaller batch.

        Raises:
            KeyError: there is no such column.
            IndexError: a row is out of range.
        """
        if isinstance(item, str):
            return self.materialize([item])[item]
        if isinstance(item, slice):
            return self.slice(item.start, item.stop, item.step)
        if isinstance(item, int | np.integer):
            return DataProtoItem(self, int(item))
        return self.select_idxs(item)

    # -- choosing rows ------------------------------------------------------------------------------------

    def slice(self, start: int | None = None, end: int | None = None, step: int | None = None) -> DataProto:
        """Rows `start:end:step`."""
        return self._taken(slice(start, end, step))

    def select_idxs(self, idxs: Any) -> DataProto:
        """The rows at `idxs`: a list, array or tensor of positions, or a boolean mask of length B.

        Raises:
            IndexError: a position is out of range.
            ValueError: a mask of another length, or something that is not one-dimensional.
        """
        return self._taken(self._index(idxs))

    def chunk(self, chunks: int) -> list[DataProto]:
        """Cut into `chunks` batches of equal length.

        Raises:
            ValueError: the length does not divide; see `pad_to_divisor`.
        """
        if chunks < 1 or len(self) % chunks:
            raise ValueError(f"cannot cut {len(self)} rows into {chunks} equal chunks")
        size = len(self) // chunks
        return [self.slice(i * size, (i + 1) * size) for i in range(chunks)]

    def split(self, split_size: int) -> list[DataProto]:
        """Cut into batches of `split_size` rows; the last may be shorter."""
        if split_size < 1:
            raise ValueError(f"split_size must be >= 1, got {split_size}")
        return [self.slice(i, i + split_size) for i in range(0, len(self), split_size)]

    def reorder(self, indices: Any) -> None:
        """Put this batch's rows into the order of `indices`, in place."""
        self._columns = self._taken_columns(self._index(indices))

    def repeat(self, repeat_times: int = 2, interleave: bool = True) -> DataProto:
        """Each row `repeat_times` times: aabb if `interleave`, else abab."""
        if repeat_times < 0:
            raise ValueError(f"repeat_times must be >= 0, got {repeat_times}")
        rows = np.arange(len(self))
        return self._taken(rows.repeat(repeat_times) if interleave else np.tile(rows, repeat_times))

    def sample_level_repeat(self, repeat_times: Any) -> DataProto:
        """Row i `repeat_times[i]` times.

        Args:
            repeat_times: B counts: a list, tuple, array or tensor.

        Raises:
            ValueError: not B counts, or a negative one.
        """
        counts = np.asarray(repeat_times)
        if counts.shape != (len(self),) or (counts < 0).any():
            raise ValueError(f"repeat_times must be {len(self)} counts >= 0, got {repeat_times!r:.80}")
        return self._taken(np.arange(len(self)).repeat(counts.astype(np.int64)))

    def pad_to_divisor(self, divisor: int) -> tuple[DataProto, int]:
        """Append the first rows again, as often as needed, until the length divides.

        Returns:
            The longer batch (this one is left alone) and the number of rows added.

        Raises:
            ValueError: there is no row to repeat.
        """
        if divisor < 1:
            raise ValueError(f"divisor must be >= 1, got {divisor}")
        padding = -len(self) % divisor
        return self._taken(np.arange(len(self) + padding) % max(1, len(self))), padding

    def unpad(self, padding: int) -> DataProto:
        """Without the last `padding` rows.

        Raises:
            ValueError: there are not that many.
        """
        if not 0 <= padding <= len(self):
            raise ValueError(f"cannot remove {padding} of {len(self)} rows")
        return self.slice(0, len(self) - padding)

    def make_iterator(
        self,
        mini_batch_size: int,
        epochs: int,
        seed: int | None = None,
        dataloader_kwargs: Mapping[str, Any] | None = None,
    ) -> Iterator[DataProto]:
        """Mini-batches of `mini_batch_size` rows, `epochs` times over.

        Args:
            seed: for shuffling.
            dataloader_kwargs: of `torch.utils.data.DataLoader`, such as `{"shuffle": True}`: the order is
                the one that a DataLoader over the rows gives.

        Raises:
            ValueError: the length does not divide.
        """
        if mini_batch_size < 1 or len(self) % mini_batch_size:
            raise ValueError(f"cannot cut {len(self)} rows into mini-batches of {mini_batch_size}")
        generator = None if seed is None else torch.Generator().manual_seed(seed)
        loader: torch.utils.data.DataLoader[int] = torch.utils.data.DataLoader(
            range(len(self)),  # type: ignore[arg-type]
            batch_size=mini_batch_size,
            collate_fn=list,
            generator=generator,
            **dict(dataloader_kwargs or {}),
        )
        return (self.select_idxs(rows) for _ in range(epochs) for rows in loader)

    # -- choosing columns ---------------------------------------------------------------------------------

    def select(
        self,
        batch_keys: Keys = None,
        non_tensor_batch_keys: Keys = None,
        meta_info_keys: Keys = None,
    ) -> DataProto:
        """Some columns; None means all of that kind.

        Raises:
            KeyError: there is no such column or entry.
        """
        names = [*names_of(batch_keys, self.batch), *names_of(non_tensor_batch_keys, self.non_tensor_batch)]
        meta = {key: self.meta_info[key] for key in names_of(meta_info_keys, self.meta_info)}
        return DataProto(self._pick(names), copy.deepcopy(meta), self._device)

    def pop(
        self,
        batch_keys: Keys = None,
        non_tensor_batch_keys: Keys = None,
        meta_info_keys: Keys = None,
    ) -> DataProto:
        """Take columns and entries out of this batch; None means none.

        Raises:
            KeyError: there is no such column or entry; nothing is taken then.
        """
        names = [
            *names_of(batch_keys, self.batch, ()),
            *names_of(non_tensor_batch_keys, self.non_tensor_batch, ()),
        ]
        meta = {key: self.meta_info[key] for key in names_of(meta_info_keys, self.meta_info, ())}
        taken = DataProto(self._pick(names), meta, self._device)
        for name in names:
            self._columns.pop(name, None)
        for name in meta:
            del self.meta_info[name]
        return taken

    def rename(self, old_keys: Keys = None, new_keys: Keys = None) -> DataProto:
        """Rename tensor columns in place; returns this batch.

        Raises:
            KeyError: there is no such column.
            ValueError: as many new names as old ones are needed, none in use.
        """
        old, new = names_of(old_keys, self.batch, ()), names_of(new_keys, None, ())
        if len(old) != len(new):
            raise ValueError(f"rename needs one new key for each old key, got {list(old)} and {list(new)}")
        names = {**{name: name for name in self._columns}, **dict(zip(old, new, strict=True))}
        if len(set(names.values())) != len(names):
            raise ValueError(f"rename {list(old)} to {list(new)}: a key would be used twice")
        self._columns = {names[name]: column for name, column in self._columns.items()}
        return self

    def union(self, other: DataProto) -> DataProto:
        """Add another batch's columns and meta_info to this one, in place; returns this batch.

        A key that both have must have equal values; they are read to be compared unless they are the same
        rows of the same stored objects.

        Raises:
            ValueError: lengths differ, or a key has two values.
        """
        if self._columns and other._columns and len(self) != len(other):
            raise ValueError(f"union of {len(self)} rows with {len(other)} rows")
        shared = [
            key
            for key, column in other._columns.items()
            if key in self._columns and not self._columns[key].identical(column)
        ]
        mine, theirs = self.materialize(shared), other.materialize(shared)
        for key in shared:
            if not _equal(mine[key], theirs[key]):
                raise ValueError(
                    f"union: column {key!r} has two values, {self._columns[key].shape} and "
                    f"{other._columns[key].shape}"
                )
        for key, value in other.meta_info.items():
            if key in self.meta_info and not _equal(self.meta_info[key], value):
                raise ValueError(
                    f"union: meta_info {key!r} is both {self.meta_info[key]!r:.80} and {value!r:.80}"
                )
        self._columns.update({k: c for k, c in other._columns.items() if k not in self._columns})
        self.meta_info.update(
            copy.deepcopy({k: v for k, v in other.meta_info.items() if k not in self.meta_info})
        )
        return self

    @staticmethod
    def concat(data: Sequence[DataProto]) -> DataProto:
        """Put batches with the same columns one after another.

        meta_info is merged: entries must agree, except "metrics" (a dictionary or a list of them), which
        becomes a dictionary of lists.

        Raises:
            ValueError: no batch; other columns, row shapes or meta_info in one of them.
        """
        if not data:
            raise ValueError("concat needs at least one batch")
        names = data[0]._columns.keys()
        for number, batch in enumerate(data):
            if batch._columns.keys() != names:
                differ = sorted(batch._columns.keys() ^ names)
                raise ValueError(f"concat: batch {number} differs from batch 0 in columns {differ}")
        memo: dict[Any, View] = {}
        columns = {name: join_columns(name, [batch._columns[name] for batch in data], memo) for name in names}
        return DataProto(columns, _merge_meta(data), data[0]._device)

    def _repr_html_(self) -> str:
        """What a notebook shows; reads the first rows only."""
        return batch_html(self)

    def save_to_disk(self, filepath: str | Path) -> None:
        """Write the batch to one file; see `neoproto.data.persist` for what is refused."""
        save(Path(filepath), self.materialize(), self.meta_info)

    @staticmethod
    def load_from_disk(filepath: str | Path) -> DataProto:
        """Read what `save_to_disk` wrote. Nothing in the file is executed.

        Raises:
            ValueError: the file is not a saved batch.
        """
        columns, meta_info = load(Path(filepath))
        return DataProto.from_dict(*columns, meta_info)


def pad_dataproto_to_divisor(data: DataProto, size_divisor: int) -> tuple[DataProto, int]:
    """verl's name for `DataProto.pad_to_divisor`."""
    return data.pad_to_divisor(size_divisor)


def unpad_dataproto(data: DataProto, pad_size: int) -> DataProto:
    """verl's name for `DataProto.unpad`."""
    return data.unpad(pad_size)


def _equal(a: Any, b: Any) -> bool:
    """Equality of columns and meta_info entries, arrays and tensors inside them included; NaN equals NaN."""
    if type(a) is not type(b):
        return bool(a == b) if np.isscalar(a) and np.isscalar(b) else False
    if isinstance(a, torch.Tensor):
        return a.shape == b.shape and a.dtype == b.dtype and _equal_bits(a, b)
    if isinstance(a, np.ndarray):
        if a.shape != b.shape or a.dtype != b.dtype:
            return False
        if a.dtype == object:
            return all(_equal(x, y) for x, y in zip(a.reshape(-1), b.reshape(-1), strict=True))
        return bool(np.array_equal(a, b, equal_nan=a.dtype.kind in "fcmM"))
    if isinstance(a, Mapping):
        return a.keys() == b.keys() and all(_equal(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(_equal(x, y) for x, y in zip(a, b, strict=True))
    return bool(a == b) or (isinstance(a, float) and a != a and b != b)


def _equal_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.is_floating_point() or a.is_complex():
        b = b.to(a.device)
        wide = torch.complex128 if a.is_complex() else torch.float64
        return torch.allclose(a.to(wide), b.to(wide), rtol=0.0, atol=0.0, equal_nan=True)
    return torch.equal(a, b.to(a.device))


def _merge_meta(data: Sequence[DataProto]) -> dict[str, Any]:
    merged: dict[str, Any] = {}
    metrics: list[Mapping[str, Any]] = []
    for number, batch in enumerate(data):
        for key, value in batch.meta_info.items():
            if key == "metrics":
                metrics.extend(value if isinstance(value, list) else [] if value is None else [value])
            elif key not in merged:
                merged[key] = copy.deepcopy(value)
            elif not _equal(merged[key], value):
                raise ValueError(
                    f"concat: meta_info {key!r} is {value!r:.80} in batch {number}, "
                    f"{merged[key]!r:.80} in an earlier one"
                )
    if metrics:
        names = dict.fromkeys(name for entry in metrics for name in entry)
        merged["metrics"] = {name: [entry[name] for entry in metrics if name in entry] for name in names}
    return merged
