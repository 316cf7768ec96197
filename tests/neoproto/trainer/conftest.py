from __future__ import annotations

from collections.abc import Iterator

import pytest

from neoproto.store import MemoryStore, use_store


@pytest.fixture
def store() -> Iterator[MemoryStore]:
    """The active store; batches made in the test go there, and their references resolve."""
    store = MemoryStore()
    with use_store(store):
        yield store
    store.close()
