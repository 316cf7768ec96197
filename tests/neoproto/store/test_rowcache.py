"""The cache of other hosts' rows, against reading everything anew."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from neoproto.store.base import ObjectRef
from neoproto.store.codec import decode, encode, select_rows
from neoproto.store.rowcache import RemoteRowCache


class Remote:
    """Values of another host, and how many rows of them were sent."""

    def __init__(self, limit):
        self.cache, self.sent, self.values = RemoteRowCache(limit), 0, {}

    def put(self, value):
        info, parts = encode(value)
        ref = ObjectRef(store="s", key="k", volume="v", info=info, generation=len(self.values) + 1)
        self.values[ref.generation] = (info, parts)
        return ref

    def answer(self, plan):
        info, parts = self.values[plan.ref.generation]
        if plan.fetch is not None:
            info, parts = select_rows(info, parts, plan.fetch)
        self.sent += info.shape[0]
        return info, parts

    def get(self, ref, rows=None):
        plan = self.cache.plan(ref, rows)
        return decode(*self.cache.complete(plan, *self.answer(plan)))


def test_rows_are_sent_once():
    remote = Remote(10_000)
    ref = remote.put(torch.arange(20).reshape(10, 2))
    assert remote.get(ref, np.array([3, 1, 3]))[:, 0].tolist() == [6, 2, 6]
    assert remote.get(ref, range(0, 4))[:, 0].tolist() == [0, 2, 4, 6]
    assert remote.sent == 4
    assert torch.equal(remote.get(ref), torch.arange(20).reshape(10, 2))
    assert remote.sent == 10
    assert (remote.cache.hits, remote.cache.misses, remote.cache.nbytes) == (6, 10, 160)
    remote.get(ref)[:] = 0
    assert remote.get(ref, range(1, 2)).tolist() == [[2, 3]]


def test_the_bound_holds_and_large_values_pass_by():
    remote = Remote(200)
    refs = [remote.put(torch.full((10,), i)) for i in range(4)]
    for _ in range(2):
        assert [int(remote.get(ref).sum()) for ref in refs] == [0, 10, 20, 30]
        assert remote.cache.nbytes <= 200
    big = remote.put(torch.arange(100))
    assert remote.get(big).tolist() == list(range(100))
    assert remote.cache.nbytes <= 200
    objects = remote.put(np.array([{"a": 1}, None], dtype=object))
    assert remote.get(objects)[0] == {"a": 1}


def test_rows_counted_on_survive_eviction_between_asking_and_answering():
    remote = Remote(200)
    ref, other = remote.put(torch.arange(10)), remote.put(torch.arange(10) + 100)
    remote.get(ref, range(0, 5))
    plan = remote.cache.plan(ref, range(0, 6))
    assert list(plan.fetch) == [5]
    for value in (other, remote.put(torch.arange(12)), remote.put(torch.arange(12))):
        remote.get(value)
    assert decode(*remote.cache.complete(plan, *remote.answer(plan))).tolist() == [0, 1, 2, 3, 4, 5]
    assert remote.cache.nbytes <= 200
    remote.cache.forget(ref.generation)
    for left in list(remote.values):
        remote.cache.forget(left)
    assert remote.cache.nbytes == 0


@given(st.lists(st.tuples(st.integers(0, 3), st.lists(st.integers(0, 9), max_size=12)), max_size=12))
def test_cached_reads_equal_plain_ones(reads):
    remote = Remote(300)
    values = [torch.arange(10 * (width + 1)).reshape(10, -1) + 1000 * width for width in range(4)]
    refs = [remote.put(value) for value in values]
    for which, rows in reads:
        index = np.array(rows, dtype=np.int64)
        assert torch.equal(remote.get(refs[which], index), values[which][torch.from_numpy(index)])
        assert remote.cache.nbytes <= 300
