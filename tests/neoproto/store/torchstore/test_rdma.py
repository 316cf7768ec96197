"""RdmaOffers, without RDMA: a buffer here is the memory itself."""

import asyncio

import numpy as np
import pytest

from neoproto.store.messages import ValueReply
from neoproto.store.torchstore import rdma
from neoproto.store.torchstore.rdma import OFFER_BYTES, RdmaOffers, fetch


class Buffer:
    dropped = 0

    def __init__(self, memory):
        self.memory = memory

    async def read_into(self, target):
        target[:] = self.memory

    async def drop(self):
        Buffer.dropped += 1


@pytest.fixture
def now(monkeypatch):
    monkeypatch.setattr(rdma, "RDMABuffer", Buffer)
    Buffer.dropped = 0
    return [0.0]


def parts(*sizes):
    return tuple(np.full(size, number, dtype=np.uint8) for number, size in enumerate(sizes))


def test_large_answers_are_offered_and_fetched_and_small_ones_sent(now):
    offers = RdmaOffers(lambda: now[0])
    small, large = ValueReply(parts=parts(10)), ValueReply(parts=parts(5, 0, OFFER_BYTES))
    assert asyncio.run(offers.instead(small)) is small
    offered = asyncio.run(offers.instead(large))
    assert (offered.parts, offered.offer.sizes, len(offered.offer.buffers)) == ((), (5, 0, OFFER_BYTES), 2)
    got = asyncio.run(fetch(offered)).parts
    assert all(np.array_equal(a, b) for a, b in zip(got, large.parts, strict=True))
    assert not any(np.shares_memory(a, b) for a, b in zip(got, large.parts, strict=True))
    assert (len(offers), offers.made) == (1, 1)
    asyncio.run(offers.withdraw([offered.offer.number, 77]))
    assert (len(offers), Buffer.dropped) == (0, 2)
    missing = ValueReply(problem="missing")
    assert asyncio.run(fetch(asyncio.run(offers.instead(missing)))) is missing


def test_the_offer_of_a_client_that_died_is_withdrawn_when_it_is_old(now):
    offers = RdmaOffers(lambda: now[0])
    for seconds, left in [(0.0, 1), (119.0, 2), (121.0, 2), (1000.0, 1)]:
        now[0] = seconds
        asyncio.run(offers.instead(ValueReply(parts=parts(OFFER_BYTES))))
        assert len(offers) == left


def test_it_can_be_switched_off(monkeypatch):
    monkeypatch.setattr(rdma, "is_ibverbs_available", lambda: True)
    monkeypatch.delenv("TORCHSTORE_RDMA_ENABLED", raising=False)
    assert rdma.available()
    monkeypatch.setenv("TORCHSTORE_RDMA_ENABLED", "0")
    assert not rdma.available()
