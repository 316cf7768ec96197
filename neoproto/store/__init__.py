"""The object store: its contract, and the active store of a context.

The TorchStore engine is `neoproto.store.torchstore.engine`; it is imported where a run starts, not here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from neoproto.store.base import (
    KeyOrRef,
    ObjectRef,
    ObjectStore,
    Rows,
    StoreFuture,
    ValueInfo,
    active_store,
    set_process_store,
    store_of,
    use_store,
)

if TYPE_CHECKING:
    from neoproto.store.memory import MemoryStore

__all__ = [
    "KeyOrRef",
    "MemoryStore",
    "ObjectRef",
    "ObjectStore",
    "Rows",
    "StoreFuture",
    "ValueInfo",
    "active_store",
    "set_process_store",
    "store_of",
    "use_store",
]


def __getattr__(name: str) -> Any:
    # Imported when used: it needs torch, and worker processes that touch no store do not.
    if name != "MemoryStore":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from neoproto.store.memory import MemoryStore

    return MemoryStore
