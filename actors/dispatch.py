"""How calls of the torch workers are spread over ranks where one value comes back for all of them.

The ranks reduce among themselves, so every rank has the same result; rank 0's is handed out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from neoproto.data import DataProto, split_for_ranks
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


REPLICATED = custom_dispatch(replicate, first_result)
SPLIT = custom_dispatch(split_batch, first_result)
