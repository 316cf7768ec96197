"""What an object store promises, and which one is active.

    put ──> ObjectRef (picklable, a few hundred bytes) ──> get, anywhere a client of that store is attached

A stored value never changes. Overwriting a key makes a new value under it and deletes the old one: references
to the old one are missing from then on, they never read the new one.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import threading
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar, overload

import numpy as np
import numpy.typing as npt

from neoproto.errors import StoreClosed

if TYPE_CHECKING:
    import torch

T = TypeVar("T")

Bytes = npt.NDArray[np.uint8]
"""[n] uint8."""

Rows = range | npt.NDArray[np.int64]
"""Which rows of a value's first dimension: a range, or int64 positions in any order, with repeats."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ValueInfo:
    """What a stored value is, known without reading it.

    Attributes:
        kind: "tensor" (a dense torch tensor), "array" (a NumPy array without Python objects), "objects" (a
            NumPy object array, stored element by element) or "object" (anything else that pickles).
        dtype: torch's name without the prefix ("bfloat16"), NumPy's `dtype.str` ("<i8"), or "" for objects.
        shape: () for "object".
        nbytes: size of the stored form in bytes.
    """

    kind: Literal["tensor", "array", "objects", "object"]
    dtype: str
    shape: tuple[int, ...]
    nbytes: int

    @property
    def has_rows(self) -> bool:
        """Whether single rows can be read."""
        return self.kind != "object" and len(self.shape) > 0

    def __reduce__(self) -> Any:
        # Plain calls pickle several times faster than what slotted dataclasses do by themselves; a batch
        # travels as many of these.
        return _make_info, (self.kind, self.dtype, self.shape, self.nbytes)


@dataclass(frozen=True, kw_only=True, slots=True)
class Location:
    """Where on its volume's host a value's bytes are; for the store's own use.

    Attributes:
        segment: name of the file.
        offset: of the first part in it, bytes.
        slot: the value's word in the volume's table.
        sizes: of the value's parts, bytes.
    """

    segment: str
    offset: int
    slot: int
    sizes: tuple[int, ...]

    def __reduce__(self) -> Any:
        return _make_location, (self.segment, self.offset, self.slot, self.sizes)


@dataclass(frozen=True, kw_only=True, slots=True)
class ObjectRef:
    """Names one stored value.

    Attributes:
        store: the store's name.
        key: the key, also for a stock TorchStore client.
        volume: which storage volume holds it.
        info: what it is.
        generation: tells this value from an earlier or later one under the same key.
        location: where processes of the volume's host find it without asking; None if they have to ask.
    """

    store: str
    key: str
    volume: str
    info: ValueInfo
    generation: int
    location: Location | None = field(default=None, repr=False)

    def __reduce__(self) -> Any:
        return _make_ref, (self.store, self.key, self.volume, self.info, self.generation, self.location)


def _make_info(kind: Any, dtype: str, shape: tuple[int, ...], nbytes: int) -> ValueInfo:
    return ValueInfo(kind=kind, dtype=dtype, shape=shape, nbytes=nbytes)


def _make_location(segment: str, offset: int, slot: int, sizes: tuple[int, ...]) -> Location:
    return Location(segment=segment, offset=offset, slot=slot, sizes=sizes)


def _make_ref(
    store: str, key: str, volume: str, info: ValueInfo, generation: int, location: Location | None
) -> ObjectRef:
    return ObjectRef(store=store, key=key, volume=volume, info=info, generation=generation, location=location)


KeyOrRef = str | ObjectRef


class StoreFuture(concurrent.futures.Future[T]):
    """A store operation under way: a future of `concurrent.futures` that any event loop can await, too.

    The operation continues when a `result(timeout)` was not waited for to the end.
    """

    def __await__(self) -> Generator[Any, None, T]:
        return asyncio.wrap_future(self).__await__()


class OpenValues(Protocol):
    """Memory of values that are being written."""

    @property
    def buffers(self) -> list[torch.Tensor]:
        """One a value, uint8 [nbytes], on the CPU. Not to be used after `close`."""
        ...

    def close(self) -> None:
        """Release the memory. Closing twice is harmless."""
        ...


class UnsealedValues(OpenValues, Protocol):
    """Values that are written and cannot be read yet. Ends with `seal` or `abort`."""

    @property
    def handles(self) -> Sequence[Any]:
        """What other processes that share the memory open the values with, picklable."""
        ...

    def seal(self) -> list[ObjectRef]:
        """Make the values readable, all of them or none. Nothing may be written into them from now on.

        Raises:
            StoreError: the store could not keep them; nothing of them remains.
        """
        ...

    def abort(self) -> None:
        """Give the memory back."""
        ...


class InPlaceWriter(Protocol):
    """Makes values in the store's own memory, which saves the copy of a put: create, write, seal."""

    @property
    def volume(self) -> str:
        """The volume whose host's processes can open the values."""
        ...

    def create(self, sizes: Mapping[str, int]) -> UnsealedValues:
        """Reserve memory for values, tensors of bytes: key -> bytes, each > 0.

        Raises:
            StoreFull: they do not fit; nothing is reserved.
        """
        ...

    def open(self, handles: Sequence[Any]) -> OpenValues:
        """Open what another process of the host created.

        Raises:
            StoreError: it was taken back meanwhile.
        """
        ...


class ObjectStore(Protocol):
    """put, get and delete, one or many; with `blocking=False` each returns a `StoreFuture` of its result.

    All methods may be called from any thread, with or without a running event loop.

    Raises (all methods):
        KeyMissing: the key was never put, or was deleted.
        StoreFull: the value does not fit into the store's memory.
        StoreClosed: the store, or this client of it, is closed.
        StoreError: a volume died or did not answer in time.
        ValueError: rows out of range, or rows of a value that has none.
    """

    @property
    def name(self) -> str:
        """The store's name, unique to the run."""
        ...

    @overload
    def put(self, value: Any, *, key: str | None = None, blocking: Literal[True] = True) -> ObjectRef: ...
    @overload
    def put(
        self, value: Any, *, key: str | None = None, blocking: Literal[False]
    ) -> StoreFuture[ObjectRef]: ...
    def put(
        self, value: Any, *, key: str | None = None, blocking: bool = True
    ) -> ObjectRef | StoreFuture[ObjectRef]:
        """Store a tensor, an array, or anything that pickles.

        Args:
            key: its name; a fresh one if None. An existing key gets the new value.
        """
        ...

    @overload
    def get(self, key: KeyOrRef, *, rows: Rows | None = None, blocking: Literal[True] = True) -> Any: ...
    @overload
    def get(
        self, key: KeyOrRef, *, rows: Rows | None = None, blocking: Literal[False]
    ) -> StoreFuture[Any]: ...
    def get(
        self, key: KeyOrRef, *, rows: Rows | None = None, blocking: bool = True
    ) -> Any | StoreFuture[Any]:
        """Read a value, or some of its rows. What is returned is the caller's own to change."""
        ...

    @overload
    def delete(self, key: KeyOrRef, *, missing_ok: bool = False, blocking: Literal[True] = True) -> None: ...
    @overload
    def delete(
        self, key: KeyOrRef, *, missing_ok: bool = False, blocking: Literal[False]
    ) -> StoreFuture[None]: ...
    def delete(
        self, key: KeyOrRef, *, missing_ok: bool = False, blocking: bool = True
    ) -> StoreFuture[None] | None:
        """Delete a value. A reference deletes only the value it names, not a later one under its key."""
        ...

    @overload
    def put_batch(
        self, values: Mapping[str, Any] | Sequence[Any], *, blocking: Literal[True] = True
    ) -> list[ObjectRef]: ...
    @overload
    def put_batch(
        self, values: Mapping[str, Any] | Sequence[Any], *, blocking: Literal[False]
    ) -> StoreFuture[list[ObjectRef]]: ...
    def put_batch(
        self, values: Mapping[str, Any] | Sequence[Any], *, blocking: bool = True
    ) -> list[ObjectRef] | StoreFuture[list[ObjectRef]]:
        """Store many values in one round trip: by key, or under fresh keys. References in the order given."""
        ...

    @overload
    def get_batch(
        self,
        keys: Sequence[KeyOrRef],
        *,
        rows: Sequence[Rows | None] | None = None,
        blocking: Literal[True] = True,
    ) -> list[Any]: ...
    @overload
    def get_batch(
        self,
        keys: Sequence[KeyOrRef],
        *,
        rows: Sequence[Rows | None] | None = None,
        blocking: Literal[False],
    ) -> StoreFuture[list[Any]]: ...
    def get_batch(
        self, keys: Sequence[KeyOrRef], *, rows: Sequence[Rows | None] | None = None, blocking: bool = True
    ) -> list[Any] | StoreFuture[list[Any]]:
        """Read many values in one round trip a volume; `rows[i]` selects from `keys[i]`."""
        ...

    @overload
    def delete_batch(
        self, keys: Sequence[KeyOrRef], *, missing_ok: bool = False, blocking: Literal[True] = True
    ) -> None: ...
    @overload
    def delete_batch(
        self, keys: Sequence[KeyOrRef], *, missing_ok: bool = False, blocking: Literal[False]
    ) -> StoreFuture[None]: ...
    def delete_batch(
        self, keys: Sequence[KeyOrRef], *, missing_ok: bool = False, blocking: bool = True
    ) -> StoreFuture[None] | None:
        """Delete many values. All that exist are deleted even if one is missing."""
        ...

    def in_place(self) -> InPlaceWriter | None:
        """What writes values in place; None if this process cannot write to the store's memory."""
        ...

    def maps(self, ref: ObjectRef) -> bool:
        """Whether the value lies in memory that this process can map: getting it copies nothing."""
        ...

    def stats(self, *, run: bool = False) -> dict[str, int]:
        """Counters by name: what this process did; with `run`, what the store holds and all processes did."""
        ...


_UNSET: Any = object()
_active: ContextVar[ObjectStore | None] = ContextVar("neoproto_active_store", default=_UNSET)
_process_store: ObjectStore | Callable[[], ObjectStore] | None = None
_attached: dict[str, ObjectStore] = {}
_attached_lock = threading.Lock()


def active_store() -> ObjectStore | None:
    """The store new batches go to: of `use_store` if inside one, else the process's; None means inline."""
    store = _active.get()
    if store is not _UNSET:
        return store
    return _process_store() if callable(_process_store) else _process_store


@contextmanager
def use_store(store: ObjectStore | None) -> Iterator[None]:
    """Make `store` the active one within the block, in this context only; None keeps new batches inline."""
    token = _active.set(store)
    try:
        yield
    finally:
        _active.reset(token)


def set_process_store(store: ObjectStore | Callable[[], ObjectStore] | None) -> None:
    """Set the store that is active wherever no `use_store` is, on every thread; None forgets it.

    A function is asked for it whenever the store is: it may attach when the store is first used.
    """
    global _process_store
    _process_store = store


def register_client(store: ObjectStore) -> None:
    """Let references into `store` be resolved in this process. Called by clients when they attach."""
    with _attached_lock:
        _attached[store.name] = store


def forget_client(store: ObjectStore) -> None:
    """Undo `register_client`; a later client of the same store is left alone."""
    with _attached_lock:
        if _attached.get(store.name) is store:
            del _attached[store.name]


def store_of(ref: ObjectRef) -> ObjectStore:
    """The attached client that can read `ref`.

    Raises:
        StoreClosed: this process has no client of that store (any more).
    """
    with _attached_lock:
        store = _attached.get(ref.store)
    if store is None and callable(_process_store):
        _process_store()  # attaches
        with _attached_lock:
            store = _attached.get(ref.store)
    if store is None:
        raise StoreClosed(f"{ref.key!r} is in store {ref.store!r}, to which this process is not attached")
    return store


def new_generation() -> int:
    """A number that no other value has: 63 random bits, never 0 for all practical purposes."""
    return int.from_bytes(os.urandom(8)) >> 1


def fresh_key(prefix: str = "object") -> str:
    """A key that is not used yet: 16 random bytes."""
    return f"{prefix}/{os.urandom(16).hex()}"


def pair_rows(
    keys: Sequence[KeyOrRef], rows: Sequence[Rows | None] | None
) -> list[tuple[KeyOrRef, Rows | None]]:
    """Match `get_batch`'s two arguments.

    Raises:
        ValueError: they have different lengths.
    """
    if rows is None:
        return [(key, None) for key in keys]
    if len(rows) != len(keys):
        raise ValueError(f"rows has {len(rows)} entries for {len(keys)} keys")
    return list(zip(keys, rows, strict=True))


def named_values(values: Mapping[str, Any] | Sequence[Any]) -> list[tuple[str, Any]]:
    """`put_batch`'s argument as (key, value) pairs, keys made up where none were given.

    Raises:
        TypeError: a key is not text, or the argument is neither a mapping nor a sequence.
    """
    if isinstance(values, Mapping):
        for key in values:
            check_key(key)
        return list(values.items())
    if isinstance(values, str | bytes) or not isinstance(values, Sequence):
        raise TypeError(f"put_batch takes a mapping or a sequence of values, got {type(values).__name__}")
    return [(fresh_key(), value) for value in values]


def check_key(key: object) -> str:
    """Return the key if it is non-empty text.

    Raises:
        TypeError: it is not.
    """
    if not isinstance(key, str) or not key:
        raise TypeError(f"a key must be non-empty text, got {key!r:.80}")
    return key
