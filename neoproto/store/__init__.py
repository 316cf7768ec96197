"""The object store: its contract, and the active store of a context.

The TorchStore engine is `neoproto.store.engine`; it is imported where a run starts, not here.
"""

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
