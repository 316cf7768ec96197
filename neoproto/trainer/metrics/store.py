"""What the object store holds and has moved, as metrics."""

from __future__ import annotations

import asyncio

from neoproto.store import active_store


async def store_metrics() -> dict[str, float]:
    """`store/*` of the run and `store/controller/*` of this process; nothing where no store is active.

    One message to each of the store's volumes. What worker processes read counts as of their last put.

    Raises:
        StoreError: the store is gone.
    """
    store = active_store()
    if store is None:
        return {}
    whole = await asyncio.to_thread(store.stats, run=True)
    metrics = {f"store/{name}": float(value) for name, value in whole.items()}
    return metrics | {f"store/controller/{name}": float(value) for name, value in store.stats().items()}
