"""What the prompt queue and the replay buffer have in common: batches with many owners, and waiting."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence

from neoproto.data import DataProto


class CountedBatch:
    """A batch whose stored columns are released when the last of its parts is done with.

    Parts are cut from a batch without copying, so deleting the columns of one would delete those of all.

    Args:
        batch: handed over; no other owner may release it.
        parts: how many there are, >= 1.

    Raises:
        ValueError: no part.
    """

    __slots__ = ("_bare", "_left", "batch")

    def __init__(self, batch: DataProto, parts: int) -> None:
        if parts < 1:
            raise ValueError(f"a batch has at least one part, got {parts}")
        self.batch, self._left = batch, parts
        self._bare = DataProto(batch.columns)

    def rows(self, places: Sequence[int]) -> DataProto:
        """The rows at these places, one at least, without meta_info; it owns nothing."""
        whole = range(places[0], places[-1] + 1)
        if list(places) == list(whole):  # neighbours are a view without a list of positions
            return self._bare.slice(whole.start, whole.stop)
        return self._bare.select_idxs(places)

    @property
    def whole(self) -> DataProto:
        """All rows, without meta_info; it owns nothing."""
        return self._bare

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
        if self._less(parts):
            self.batch.release()

    @staticmethod
    def all_done(batches: Iterable[CountedBatch]) -> None:
        """One part of each is done with; a batch may be named several times.

        Raises:
            ValueError: a batch has no part left.
        """
        free = [batch for batch in batches if batch._less(1)]
        columns = (column for batch in free for column in batch.batch.columns.values())
        # As one batch, so that the store is asked once and not once for each.
        DataProto({str(number): column for number, column in enumerate(columns)}).release()

    def _less(self, parts: int) -> bool:
        """Count parts off; whether none is left."""
        if not 1 <= parts <= self._left:
            raise ValueError(f"{parts} parts of a batch are done with, {self._left} are left")
        self._left -= parts
        return not self._left


class Changes:
    """Lets tasks of one event loop wait for a change of what they look at.

    Look, then wait, with no other await between the two: then no change is missed.
    """

    __slots__ = ("_waiting",)

    def __init__(self) -> None:
        self._waiting: set[asyncio.Future[None]] = set()

    def notify(self) -> None:
        """Wake all that wait now: something changed."""
        for woken in self._waiting:
            _wake(woken)
        self._waiting.clear()

    async def wait(self, timeout: float) -> None:
        """Return at the next change, or after `timeout` seconds."""
        loop = asyncio.get_running_loop()
        woken = loop.create_future()
        self._waiting.add(woken)
        timer = loop.call_later(timeout, _wake, woken)
        try:
            await woken
        finally:
            timer.cancel()
            self._waiting.discard(woken)


def _wake(woken: asyncio.Future[None]) -> None:
    if not woken.done():  # it was cancelled, or its time was up in the same turn of the loop
        woken.set_result(None)
