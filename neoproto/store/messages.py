"""What travels between store clients, volumes and the index."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from neoproto.errors import KeyMissing, StoreClosed, StoreError, StoreFull
from neoproto.store.base import ObjectRef, Rows, ValueInfo
from neoproto.store.codec import Parts


@dataclass(frozen=True, kw_only=True, slots=True)
class SentValue:
    """A value on its way."""

    key: str
    generation: int
    info: ValueInfo
    parts: Parts


@dataclass(frozen=True, kw_only=True, slots=True)
class ValueRequest:
    """A value, or some of its rows, asked of a volume."""

    key: str
    generation: int
    rows: Rows | None


@dataclass(frozen=True, kw_only=True, slots=True)
class RdmaOffer:
    """Parts that wait in a volume's memory, to be read by RDMA; see `neoproto.store.torchstore.rdma`.

    Attributes:
        number: names the request when it is withdrawn.
        sizes: of all parts, bytes.
        buffers: where those are that are not empty.
    """

    number: int
    sizes: tuple[int, ...]
    buffers: tuple[Any, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class ValueReply:
    """A volume's answer.

    Attributes:
        parts: the bytes, unless they are on offer.
        problem: why there is no answer: "missing", or what is wrong with the rows.
    """

    info: ValueInfo | None = None
    parts: Parts = ()
    offer: RdmaOffer | None = None
    problem: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class KeyLocation:
    """The index's answer for a key: a reference, or that a stock TorchStore client put it, or neither."""

    ref: ObjectRef | None
    stock: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class DeletedValue:
    """A value that is no longer visible and whose bytes can go; generation 0 is one of a stock client.

    Attributes:
        slot: its word in the volume's table; 0 if it is not in shared memory.
    """

    key: str
    generation: int
    volume: str
    slot: int = 0


def text_of(error: Any) -> str:
    """An exception's class and first line."""
    lines = str(error).splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"


def failure_of(what: str, store: str, error: Exception) -> StoreError:
    """What went wrong with an operation, in the store's words."""
    cause = getattr(error, "exception", error)  # an endpoint's error carries the actor's
    if isinstance(cause, StoreClosed):
        return StoreClosed(f"{what}: store {store!r} is closed")
    if isinstance(cause, StoreFull | KeyMissing):
        return type(cause)(f"{what}: {cause}")
    if isinstance(error, KeyError):  # a stock client's
        return KeyMissing(str(error))
    return StoreError(f"{what}: store {store!r} failed: {text_of(error)}")
