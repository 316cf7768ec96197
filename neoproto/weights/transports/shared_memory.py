"""Weights in the store's shared memory, or not at all."""

from __future__ import annotations

from typing import TYPE_CHECKING

from neoproto.errors import StoreError
from neoproto.weights.transports import TransportChoice
from neoproto.weights.transports.store import StoreTransport

if TYPE_CHECKING:
    from neoproto.store import ObjectStore


def shared_memory(store: ObjectStore) -> StoreTransport:
    """`auto`, which puts nothing.

    Raises:
        StoreError: the store has no shared memory in this process.
    """
    transport = StoreTransport(store)
    if not transport.domain:
        raise StoreError("weights cannot be written in place: the store has no shared memory in this process")
    return transport


CHOICE = TransportChoice(
    name="shared_memory",
    about="as auto, but refused where the store has no shared memory",
    make=shared_memory,
    in_store=True,
)
