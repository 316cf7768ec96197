"""How calls are spread over the ranks of our workers, and what comes back.

REPLICATED, SPLIT   ranks reduce among themselves, so every rank has the same result; rank 0's is returned
SPREAD              rows are independent: each rank answers its own, and the answers are joined
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from neoproto.data import DataProto, split_for_ranks
from neoproto.data.dispatch import join_rows, share_rows
from neoproto.runtime import custom_dispatch


class _Group(Protocol):
    @property
    def world_size(self) -> int: ...


def replicate(group: _Group, *args: Any, **kwargs: Any) -> tuple[tuple[list[Any], ...], dict[str, list[Any]]]:
    """Every argument to every rank."""
    size = group.world_size
    return tuple([arg] * size for arg in args), {name: [arg] * size for name, arg in kwargs.items()}


def split_batch(group: _Group, batch: DataProto) -> tuple[tuple[list[DataProto]], dict[str, list[Any]]]:
    """Equal shares of the batch, never padded: a row that is there twice would count twice in the loss.

    Raises:
        ValueError: the batch does not divide by the number of ranks.
    """
    return (list(split_for_ranks(batch, group.world_size, pad=False).chunks),), {}


def first_result(group: _Group, results: Sequence[Any]) -> Any:
    """Rank 0's result."""
    return results[0]


def spread_batch(group: _Group, batch: DataProto) -> tuple[tuple[list[DataProto]], dict[str, list[Any]]]:
    """Nearly equal shares of the batch, none padded: no row is answered to be thrown away."""
    return (share_rows(batch, group.world_size),), {}


def joined(group: _Group, results: Sequence[DataProto]) -> DataProto:
    """All ranks' answers, in the order of the rows."""
    return join_rows(results)


REPLICATED = custom_dispatch(replicate, first_result)
SPLIT = custom_dispatch(split_batch, first_result)
SPREAD = custom_dispatch(spread_batch, joined)
