"""`put`, `get`, `delete` and their batch forms on the active object store."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from neoproto.errors import StoreClosed

if TYPE_CHECKING:
    from neoproto.store import ObjectStore


def _store() -> ObjectStore:
    from neoproto.store import active_store  # keeps `import neoproto.runtime` light

    store = active_store()
    if store is None:
        raise StoreClosed("there is no object store: no Runtime is open in this process")
    return store


def put(value: Any, *, key: str | None = None, blocking: bool = True) -> Any:
    """Store a tensor, an array, or anything that pickles; returns a reference."""
    store: Any = _store()
    return store.put(value, key=key, blocking=blocking)


def get(key: Any, *, rows: Any = None, blocking: bool = True) -> Any:
    """Read what a key or a reference names, or some rows of it."""
    store: Any = _store()
    return store.get(key, rows=rows, blocking=blocking)


def delete(key: Any, *, missing_ok: bool = False, blocking: bool = True) -> Any:
    """Delete what a key or a reference names."""
    store: Any = _store()
    return store.delete(key, missing_ok=missing_ok, blocking=blocking)


def put_batch(values: Mapping[str, Any] | Sequence[Any], *, blocking: bool = True) -> Any:
    """Store many values in one round trip; returns references in the order given."""
    store: Any = _store()
    return store.put_batch(values, blocking=blocking)


def get_batch(keys: Sequence[Any], *, rows: Sequence[Any] | None = None, blocking: bool = True) -> Any:
    """Read many values; `rows[i]` selects from `keys[i]`."""
    store: Any = _store()
    return store.get_batch(keys, rows=rows, blocking=blocking)


def delete_batch(keys: Sequence[Any], *, missing_ok: bool = False, blocking: bool = True) -> Any:
    """Delete many values."""
    store: Any = _store()
    return store.delete_batch(keys, missing_ok=missing_ok, blocking=blocking)
