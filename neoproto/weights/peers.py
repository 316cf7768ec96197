"""The ranks that publish one model together, and how they agree."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

T = TypeVar("T")


class Peers(Protocol):
    """This rank among those that publish together; `actors.training.ranks.Ranks` is one."""

    @property
    def rank(self) -> int: ...

    @property
    def world_size(self) -> int: ...

    def exchange(self, value: Any) -> list[Any]:
        """Every rank's value, by rank, on every rank; collective. Values pickle and are small."""
        ...


class Alone:
    """The only rank."""

    rank, world_size = 0, 1

    def exchange(self, value: Any) -> list[Any]:
        return [value]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Outcome:
    value: Any
    error: Exception | None


def on_all_ranks(peers: Peers, work: Callable[[], T]) -> list[T]:
    """Do something on every rank; all get all results, or all raise what the first rank that failed raised.

    Collective: all ranks enter the next collective or none does, so no rank waits there for one that failed.
    """
    try:
        own = _Outcome(value=work(), error=None)
    except Exception as error:  # noqa: BLE001 - raised below, on every rank
        own = _Outcome(value=None, error=error)
    outcomes: list[_Outcome] = peers.exchange(own)
    for rank, outcome in enumerate(outcomes):
        if outcome.error is not None:
            raise own.error if rank == peers.rank and own.error is not None else outcome.error
    values: list[T] = [outcome.value for outcome in outcomes]
    return values
