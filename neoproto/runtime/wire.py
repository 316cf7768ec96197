"""What crosses between a caller and a container, and how exceptions survive the trip.

Arguments and results are pickled here, by value where a class cannot be imported on the other side
(`__main__`, notebooks), and travel as bytes: the header around them always unpickles.
"""

from __future__ import annotations

import pickle
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import cloudpickle  # type: ignore[import-untyped]

from neoproto.errors import RemoteError

INIT = "__init__"
"""The method name under which a worker is built: the first sync call of every rank."""
CANCEL = "__cancel__"
"""Not a call: the async one with this id is to be cancelled."""
LAST = "__last__"
"""Not a call: no more calls come; those before it are to be drained."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupRef:
    """What names a worker group in any process of its run.

    Attributes:
        key: unique within the run.
        name: its name in messages.
        world_size: its ranks.
    """

    key: str
    name: str
    world_size: int


@dataclass(frozen=True, kw_only=True, slots=True)
class MethodCall:
    """A method to run on some ranks of a group.

    Attributes:
        role, method: what to run; role "" is a group's only worker.
        sends: (ranks, pickled arguments): each payload goes to its ranks.
        is_async: the method is a coroutine function.
    """

    role: str
    method: str
    sends: Sequence[tuple[Sequence[int], bytes]]
    is_async: bool

    @property
    def ranks(self) -> tuple[int, ...]:
        """All ranks it goes to, in the order of `sends`."""
        return tuple(rank for ranks, _ in self.sends for rank in ranks)


@dataclass(frozen=True, kw_only=True, slots=True)
class CallHeader:
    """Travels before the arguments.

    Attributes:
        call_id: the call's number, unique across processes.
        role, method: what to run; role "" is a group's only worker.
        sequence: the turn of a sync call in every rank's order, one number for all ranks or one per rank of
            `ranks`; None for async methods.
        ranks: the ranks addressed, if `sequence` has one number per rank.
        budget_s: seconds left at sending; None without a deadline.
    """

    call_id: int
    role: str
    method: str
    sequence: int | tuple[int, ...] | None = None
    ranks: tuple[int, ...] | None = None
    budget_s: float | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        # Travels with every call: a plain call pickles several times faster than a slotted dataclass does.
        values = (self.call_id, self.role, self.method, self.sequence, self.ranks, self.budget_s)
        return _header, values

    def turn(self, rank: int) -> int | None:
        """The number of this call in `rank`'s order."""
        if isinstance(self.sequence, tuple):
            assert self.ranks is not None
            return self.sequence[self.ranks.index(rank)]
        return self.sequence


def _header(
    call_id: int,
    role: str,
    method: str,
    sequence: int | tuple[int, ...] | None,
    ranks: tuple[int, ...] | None,
    budget_s: float | None,
) -> CallHeader:
    return CallHeader(
        call_id=call_id, role=role, method=method, sequence=sequence, ranks=ranks, budget_s=budget_s
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class RemoteFailure:
    """An exception on its way home.

    Attributes:
        pickled: (the exception, its cause) as far as they survive pickling in the process it was raised in.
        type_name, message, traceback: for when it does not, or cannot be rebuilt by the receiver.
        broken: the group refuses calls because a sync method overran.
    """

    pickled: bytes | None
    type_name: str
    message: str
    traceback: str
    broken: bool = False


def encode(value: Any) -> bytes:
    """Pickle arguments or a result, by value where needed."""
    if _is_plain(value):
        return pickle.dumps(value)  # the same bytes, without the cost of a pickler written in Python
    pickled: bytes = cloudpickle.dumps(value)
    return pickled


def decode(payload: bytes) -> Any:
    """Undo `encode`."""
    return pickle.loads(payload)


def encode_failure(
    error: BaseException, where: str, *, broken: bool = False, with_traceback: bool = True
) -> RemoteFailure:
    """Prepare an exception for travel; checks here that it can be rebuilt at all.

    Args:
        where: "actor[0] on host", quoted in the remote traceback.
    """
    text = ""
    if with_traceback:
        text = f"--- traceback of {where} ---\n" + "".join(traceback.format_exception(error)).rstrip()
    pickled = _pickled(error, error.__cause__) or _pickled(error, None)
    name = f"{type(error).__module__}.{type(error).__qualname__}".removeprefix("builtins.")
    return RemoteFailure(
        pickled=pickled, type_name=name, message=_text_of(error), traceback=text, broken=broken
    )


def decode_failure(failure: RemoteFailure) -> BaseException:
    """Rebuild a worker's exception as itself, or as `RemoteError` where that cannot be.

    The remote traceback is among its notes, so that it prints below the local one.
    """
    if failure.pickled is not None:
        try:
            error, cause = pickle.loads(failure.pickled)
        except BaseException:  # noqa: BLE001 - the class may not import here; its text is kept
            error = cause = None
        if isinstance(error, Exception):
            error.__cause__ = cause
            if failure.traceback:
                error.add_note(failure.traceback)
            return error
    return RemoteError(failure.type_name, failure.message, failure.traceback)


_PLAIN = frozenset({type(None), bool, int, float, str, bytes})


def _is_plain(value: Any, depth: int = 2) -> bool:
    """Whether a value is built of a few things that every process knows."""
    kind = type(value)
    if kind in _PLAIN:
        return True
    if not depth or kind not in (tuple, dict) or len(value) > 8:
        return False
    parts = value.values() if kind is dict else value
    return all(_is_plain(part, depth - 1) for part in parts) and (
        kind is tuple or all(type(key) is str for key in value)
    )


def _pickled(error: BaseException, cause: BaseException | None) -> bytes | None:
    try:
        pickled: bytes = cloudpickle.dumps((error, cause))
        pickle.loads(pickled)
    except BaseException:  # noqa: BLE001 - a user's exception may fail to pickle in any way; its text travels
        return None
    return pickled


def _text_of(error: BaseException) -> str:
    try:
        return str(error)
    except BaseException:  # noqa: BLE001 - a user's __str__ may itself be broken
        return "<no text: its __str__ raised>"
