"""`put`, `get`, `delete` and their batch forms on the active object store: the methods of `ObjectStore`."""

from __future__ import annotations

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


if TYPE_CHECKING:
    # Typed as the methods are.
    put, get, delete = _store().put, _store().get, _store().delete
    put_batch, get_batch, delete_batch = _store().put_batch, _store().get_batch, _store().delete_batch
else:

    def put(value: Any, *, key: str | None = None, blocking: bool = True) -> Any:
        """Store a tensor, an array, or anything that pickles; returns a reference."""
        return _store().put(value, key=key, blocking=blocking)

    def get(key: Any, *, rows: Any = None, blocking: bool = True) -> Any:
        """Read what a key or a reference names, or some rows of it."""
        return _store().get(key, rows=rows, blocking=blocking)

    def delete(key: Any, *, missing_ok: bool = False, blocking: bool = True) -> Any:
        """Delete what a key or a reference names."""
        return _store().delete(key, missing_ok=missing_ok, blocking=blocking)

    def put_batch(values: Any, *, blocking: bool = True) -> Any:
        """Store many values in one round trip; returns references in the order given."""
        return _store().put_batch(values, blocking=blocking)

    def get_batch(keys: Any, *, rows: Any = None, blocking: bool = True) -> Any:
        """Read many values; `rows[i]` selects from `keys[i]`."""
        return _store().get_batch(keys, rows=rows, blocking=blocking)

    def delete_batch(keys: Any, *, missing_ok: bool = False, blocking: bool = True) -> Any:
        """Delete many values."""
        return _store().delete_batch(keys, missing_ok=missing_ok, blocking=blocking)
