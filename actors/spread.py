"""How calls whose rows are independent are spread over ranks: nearly equal shares, in order, nothing twice.

Unlike padding to equal shares, this neither generates nor scores a row that is thrown away afterwards, and a
rank may answer a row with several.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, Protocol

from neoproto.data import DataProto
from neoproto.runtime import custom_dispatch


class _Group(Protocol):
    @property
    def world_size(self) -> int: ...


def share_rows(group: _Group, batch: DataProto) -> tuple[tuple[list[DataProto]], dict[str, list[Any]]]:
    """Contiguous shares whose sizes differ by one row at most; a share may be empty."""
    stored, size = batch.stored(), group.world_size
    bounds = [len(batch) * rank // size for rank in range(size + 1)]
    shares = [stored.slice(start, end) for start, end in itertools.pairwise(bounds)]
    return (shares,), {}


def join_rows(group: _Group, results: Sequence[DataProto]) -> DataProto:
    """The ranks' answers, in the order of the rows."""
    return DataProto.concat([result for result in results if len(result)] or list(results[:1]))


SPREAD = custom_dispatch(share_rows, join_rows)
