"""Large values between hosts by Monarch's RDMA: the client reads them out of the volume's memory.

client ──get_many──> volume: parts stay where they are, `RdmaOffers` keeps them
       <──RdmaOffer────
client reads ──withdraw──> the offer ends             a client that died: the offer ends when it is old
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from monarch.rdma import RDMABuffer, is_ibverbs_available

from neoproto.store.codec import Parts
from neoproto.store.messages import RdmaOffer, ValueReply

OFFER_BYTES = 1 << 20
"""Values of at least this size are offered, smaller ones are sent: registering memory costs a message too."""
_LIFE_S = 120.0


def available() -> bool:
    """Whether this process can use RDMA: there is hardware, and TorchStore's switch does not forbid it."""
    return os.environ.get("TORCHSTORE_RDMA_ENABLED", "1") == "1" and bool(is_ibverbs_available())


@dataclass(frozen=True, slots=True)
class _Kept:
    parts: Parts
    buffers: tuple[RDMABuffer, ...]
    since: float


class RdmaOffers:
    """What a volume has on offer. All methods run on its event loop.

    Attributes:
        made: how many offers so far.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._kept: dict[int, _Kept] = {}
        self.made = 0

    def __len__(self) -> int:
        return len(self._kept)

    async def instead(self, answer: ValueReply) -> ValueReply:
        """The answer with an offer in place of its bytes, if it is large."""
        await self.withdraw([number for number, kept in self._kept.items() if self._is_old(kept)])
        if sum(part.size for part in answer.parts) < OFFER_BYTES:
            return answer
        buffers = tuple(RDMABuffer(_memory(part)) for part in answer.parts if part.size)
        self.made += 1
        self._kept[self.made] = _Kept(answer.parts, buffers, self._clock())
        sizes = tuple(part.size for part in answer.parts)
        return replace(answer, parts=(), offer=RdmaOffer(number=self.made, sizes=sizes, buffers=buffers))

    async def withdraw(self, numbers: Sequence[int]) -> None:
        """End offers; those that have ended already are ignored."""
        for number in numbers:
            kept = self._kept.pop(number, None)
            for buffer in kept.buffers if kept is not None else ():
                await buffer.drop()

    def _is_old(self, kept: _Kept) -> bool:
        return self._clock() > kept.since + _LIFE_S


async def fetch(answer: ValueReply) -> ValueReply:
    """The answer with its bytes, read from where they are on offer."""
    if answer.offer is None:
        return answer
    parts = tuple(np.empty(size, dtype=np.uint8) for size in answer.offer.sizes)
    filled = [part for part in parts if part.size]
    for buffer, part in zip(answer.offer.buffers, filled, strict=True):
        await buffer.read_into(_memory(part))
    return replace(answer, parts=parts)


def _memory(part: Any) -> memoryview:
    return memoryview(part)
