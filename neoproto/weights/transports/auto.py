"""Weights in the store's shared memory where there is some, else put into the store: the default."""

from __future__ import annotations

from neoproto.weights.transports import TransportChoice
from neoproto.weights.transports.store import StoreTransport

CHOICE = TransportChoice(
    name="auto",
    about="shared memory on one host, the store's own way between hosts",
    make=StoreTransport,
    in_store=True,
)
