"""What the prompt queue and the replay buffer have in common: batches with many owners, and waiting."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress

from neoproto.data import DataProto


class CountedBatch:
    """A batch whose stored columns are released when the last of its parts is done with.

    Parts are cut from a batch without copying, so deleting the columns of one would delete those of all.

    Args:
        batch: handed over; nobody else may release it.
        parts: how many there are, >= 1.

    Raises:
        ValueError: no part.
    """

    __slots__ = ("_bare", "_left", "batch")

    def __init__(self, batch: DataProto, parts: int) -> None:
        if parts < 1:
            raise ValueError(f"a batch has at least one part, got {parts}")
        self.batch, self._left = batch, parts
        self._bare = batch.select(meta_info_keys=[])

    def rows(self, places: Sequence[int]) -> DataProto:
        """The rows at these places, without meta_info; it owns nothing."""
        return self._bare.select_idxs(places)

    @property
    def parts_left(self) -> int:
        """Parts not yet done with, holds included; 0 once the columns are released."""
        return self._left

    def hold(self) -> None:
        """Keep the columns until one `done` more, whatever becomes of the parts meanwhile.

        Raises:
            ValueError: they are released already.
        """
        if not self._left:
            raise ValueError("a batch that is released cannot be held")
        self._left += 1

    def done(self, parts: int = 1) -> None:
        """So many parts are done with.

        Raises:
            ValueError: there are not that many left.
        """
        if not 1 <= parts <= self._left:
            raise ValueError(f"{parts} parts of a batch are done with, {self._left} are left")
        self._left -= parts
        if not self._left:
            self.batch.release()


class Changes:
    """Lets tasks of one event loop wait for a change of what they look at.

    Look, then wait, with no other await between the two: then no change is missed.
    """

    __slots__ = ("_next",)

    def __init__(self) -> None:
        self._next = asyncio.Event()

    def notify(self) -> None:
        """Something changed: wake everybody who waits now."""
        self._next.set()
        self._next = asyncio.Event()

    async def wait(self, timeout: float) -> None:
        """Return at the next change, or after `timeout` seconds."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                await self._next.wait()
