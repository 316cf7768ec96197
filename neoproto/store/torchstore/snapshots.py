"""A value that stays readable until its holder lets go, or dies.

snapshot ──lease──> volume ──(renewed by the client's loop every third of its time)──> release
                      └─ deleted meanwhile: freed when the last lease ends
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, Self

from neoproto.errors import LeaseExpired, StoreError
from neoproto.store.base import ObjectRef, Rows

if TYPE_CHECKING:
    from neoproto.store.torchstore.client import StoreClient

Renew = Callable[[float], Awaitable[None]]


class Snapshot:
    """One holder's lease on one value. Made by `StoreClient.snapshot`; a context manager.

    Attributes:
        ref: the value.
    """

    def __init__(self, store: StoreClient, ref: ObjectRef, lease: Lease) -> None:
        self.ref = ref
        self._store, self._lease = store, lease

    def get(self, *, rows: Rows | None = None) -> Any:
        """The value, or some of its rows.

        Raises:
            LeaseExpired: the lease was released, or could not be renewed in time.
        """
        if self._lease.ended:
            raise LeaseExpired(f"the lease on {self.ref.key!r} has ended")
        return self._store.get(self.ref, rows=rows)

    def release(self) -> None:
        """Let go. Releasing twice is harmless."""
        if not self._lease.ended:
            self._lease.ended = True
            self._store.run(self._lease.end())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.release()


class Lease:
    """Keeps itself alive on the client's loop."""

    def __init__(self, renew: Renew, seconds: float) -> None:
        """Args:
        renew: tells the volume for how many seconds more; 0 ends the lease.
        """
        self.ended = False
        self._renew, self._seconds = renew, seconds
        self._over = asyncio.Event()

    async def keep(self) -> None:
        """Renew until `end`; a renewal that fails ends the lease, for the volume lets it expire then."""
        try:
            while True:
                try:
                    async with asyncio.timeout(self._seconds / 3):
                        await self._over.wait()
                        return
                except TimeoutError:
                    await self._renew(self._seconds)
        except StoreError:
            self.ended = True

    async def end(self) -> None:
        """Stop renewing and tell the volume."""
        self._over.set()
        await self._renew(0.0)
