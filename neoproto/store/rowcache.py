"""Rows of values of other hosts, kept in this process: a row that was read before is not sent again.

Values never change, so rows are never stale. Whether the value is still there is asked of its volume each
time, in the message that fetches the missing rows; a deleted value is missing here, too.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from neoproto.store.base import ObjectRef, Rows, ValueInfo
from neoproto.store.codec import Parts, check_rows


@dataclass(slots=True, eq=False)
class _Entry:
    data: npt.NDArray[np.uint8]  # [rows, bytes of a row]; memory is used only by rows that are there
    there: npt.NDArray[np.bool_]  # [rows]
    nbytes: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class CachedRead:
    """One read.

    Attributes:
        ref: of what.
        rows: which the reader wants; None for all.
        fetch: which of them to ask the volume for; None for all.
        entry: where the others are; None if the value is not one to be cached.
    """

    ref: ObjectRef
    rows: Rows | None
    fetch: Rows | None
    entry: _Entry | None


class RemoteRowCache:
    """Used from one thread. What was used last stays longest.

    Attributes:
        limit_bytes: bound on the rows kept.
        hits, misses: rows asked for that were there, and that were not.
        nbytes: of the rows kept.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.hits = self.misses = self.nbytes = 0
        self._entries: OrderedDict[int, _Entry] = OrderedDict()

    def plan(self, ref: ObjectRef, rows: Rows | None) -> CachedRead:
        """What to fetch for a read of `rows`.

        Raises:
            ValueError: rows that the value does not have.
        """
        if not self._caches(ref.info, rows):
            return CachedRead(ref, rows, rows, None)
        count, width = ref.info.shape[0], ref.info.nbytes // ref.info.shape[0]
        every = range(count) if rows is None else check_rows(ref.info, rows, ref.key)
        wanted = np.unique(np.asarray(every, dtype=np.int64))
        entry = self._entries.get(ref.generation)
        if entry is None:
            entry = _Entry(np.empty((count, width), np.uint8), np.zeros(count, np.bool_))
        absent = wanted[~entry.there[wanted]]
        self.misses += len(absent)
        self.hits += len(wanted) - len(absent)
        return CachedRead(ref, every, None if len(absent) == count else absent, entry)

    def complete(self, plan: CachedRead, info: ValueInfo, parts: Parts) -> tuple[ValueInfo, Parts]:
        """All rows asked for: of those fetched just now, in `parts`, and those kept."""
        entry, ref = plan.entry, plan.ref
        if entry is None:
            return info, parts
        new = np.asarray(range(len(entry.there)) if plan.fetch is None else plan.fetch, dtype=np.int64)
        # The plan keeps its entry, so that rows counted on are there even if they were evicted meanwhile.
        if self._entries.setdefault(ref.generation, entry) is entry and not entry.nbytes:
            entry.nbytes = int(entry.there.sum()) * entry.data.shape[1]
            self.nbytes += entry.nbytes
        known = self._entries[ref.generation] is entry
        entry.data[new] = parts[0].reshape(len(new), entry.data.shape[1])
        if known:
            self._entries.move_to_end(ref.generation)
            added = int((~entry.there[new]).sum()) * entry.data.shape[1]
            entry.nbytes += added
            self.nbytes += added
        entry.there[new] = True
        index = np.asarray(plan.rows, dtype=np.int64)
        chosen = entry.data[index].reshape(-1)
        self._shrink()
        shape = (len(index), *ref.info.shape[1:])
        return replace(ref.info, shape=shape, nbytes=chosen.size), (chosen,)

    def forget(self, generation: int) -> None:
        """Drop the rows of a value that is gone."""
        entry = self._entries.pop(generation, None)
        if entry is not None:
            self.nbytes -= entry.nbytes
            entry.nbytes = 0

    def _caches(self, info: ValueInfo, rows: Rows | None) -> bool:
        if info.kind not in ("tensor", "array") or not info.shape or not info.nbytes:
            return False
        share = 1.0 if rows is None else len(rows) / info.shape[0]
        return share > 0 and info.nbytes * share <= self.limit_bytes // 2

    def _shrink(self) -> None:
        while self.nbytes > self.limit_bytes and self._entries:
            self.forget(next(iter(self._entries)))
