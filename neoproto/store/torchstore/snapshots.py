"""A value that stays readable until its holder releases it, or dies.

snapshot ──lease──> volume ──(renewed by the client's loop every third of its time)──> release
                      └─ deleted meanwhile: freed when the last lease ends
"""

from __future__ import annotations

import asyncio
import uuid
from typing import TYPE_CHECKING, Any, Self

from neoproto.errors import LeaseExpired, StoreError
from neoproto.store.base import ObjectRef, Rows

if TYPE_CHECKING:
    from neoproto.store.torchstore.client import StoreClient


class Snapshot:
    """One holder's lease on one value. Made by `StoreClient.snapshot`; a context manager.

    Attributes:
        ref: the value.
    """

    def __init__(self, client: StoreClient, ref: ObjectRef, seconds: float) -> None:
        self.ref = ref
        self._client, self._seconds = client, seconds
        self._holder = uuid.uuid4().hex
        self._ended = False
        self._released = asyncio.Event()

    def get(self, *, rows: Rows | None = None) -> Any:
        """The value, or some of its rows.

        Raises:
            LeaseExpired: the lease was released, or could not be renewed in time.
        """
        if self._ended:
            raise LeaseExpired(f"the lease on {self.ref.key!r} has ended")
        return self._client.get(self.ref, rows=rows)

    def release(self) -> None:
        """End the lease. Releasing twice is harmless."""
        if not self._ended:
            self._ended = True
            self._client.run(self._release())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.release()

    # -- on the client's loop ------------------------------------------------------------------------------

    async def renew(self) -> None:
        """Take the lease, or have it last for its whole time again."""
        await self._client.lease(self.ref, self._holder, self._seconds)

    async def keep(self) -> None:
        """Renew until the release. A renewal that fails ends the lease: the volume lets it expire then."""
        try:
            while True:
                try:
                    # A third of the time: two renewals may be late before the volume's clock runs out.
                    async with asyncio.timeout(self._seconds / 3):
                        await self._released.wait()
                        return
                except TimeoutError:
                    await self.renew()
        except StoreError:
            self._ended = True

    async def _release(self) -> None:
        # In this order: a renewal after the end would take the lease again.
        self._released.set()
        await self._client.lease(self.ref, self._holder, 0.0)
