from __future__ import annotations

import asyncio

import torch

from neoproto.store import MemoryStore
from neoproto.trainer.metrics.store import store_metrics


def test_what_the_store_holds_and_moved(store: MemoryStore) -> None:
    ref = store.put(torch.zeros(4))
    store.get(ref)
    metrics = asyncio.run(store_metrics())
    assert metrics["store/objects"] == 1.0
    assert (metrics["store/bytes_in"], metrics["store/controller/bytes_out"]) == (16.0, 16.0)
    assert all(type(value) is float for value in metrics.values())
    store.delete(ref)
    assert asyncio.run(store_metrics())["store/object_bytes"] == 0.0


def test_without_a_store_there_are_none() -> None:
    assert asyncio.run(store_metrics()) == {}
