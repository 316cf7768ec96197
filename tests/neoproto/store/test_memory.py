import asyncio

import numpy as np
import pytest
import torch

from neoproto.errors import KeyMissing, StoreClosed
from neoproto.store import MemoryStore, store_of


@pytest.fixture
def store():
    store = MemoryStore("memory-test")
    yield store
    store.close()


def test_put_get_delete_by_key_and_by_reference(store):
    value = torch.arange(4)
    ref = store.put(value, key="k")
    value += 1
    got = store.get("k")
    assert got.tolist() == store.get(ref).tolist() == [0, 1, 2, 3]
    got += 1
    assert store.get(ref, rows=np.array([3, 0])).tolist() == [3, 0]
    store.delete("k")
    for name in ("k", ref):
        with pytest.raises(KeyMissing, match=r"'k'.*'memory-test'"):
            store.get(name)
        with pytest.raises(KeyMissing):
            store.delete(name)
    store.delete(ref, missing_ok=True)


def test_an_old_reference_neither_reads_nor_deletes_the_new_value(store):
    old = store.put(1, key="k")
    store.put(2, key="k")
    with pytest.raises(KeyMissing):
        store.get(old)
    store.delete(old, missing_ok=True)
    assert store.get("k") == 2


def test_batches_keep_their_order_and_cost_one_trip(store):
    refs = store.put_batch({"b": 1, "a": torch.zeros(3)})
    assert [ref.key for ref in refs] == ["b", "a"]
    assert store.get_batch(["a", refs[0]], rows=[range(1), None])[1] == 1
    assert len(store.put_batch([1, 2])) == 2
    with pytest.raises(KeyMissing, match="'x'"):
        store.delete_batch(["b", "x", "a"])
    assert store.trips == 4
    assert len(store.keys()) == 2


def test_arguments_are_checked(store):
    with pytest.raises(TypeError, match="non-empty text, got 3"):
        store.put(1, key=3)
    with pytest.raises(TypeError, match="a mapping or a sequence"):
        store.put_batch("text")
    with pytest.raises(ValueError, match="1 entries for 2 keys"):
        store.get_batch(["a", "b"], rows=[None])


def test_not_blocking_returns_a_future(store):
    async def main():
        ref = await store.put([1], blocking=False)
        return await store.get(ref, blocking=False)

    assert asyncio.run(main()) == [1]
    future = store.get("nowhere", blocking=False)
    assert future.done()
    with pytest.raises(KeyMissing):
        future.result()


def test_a_closed_store_is_forgotten(store):
    ref = store.put(1)
    assert store_of(ref) is store
    store.close()
    store.close()
    with pytest.raises(StoreClosed, match="is closed"):
        store.put(2)
    with pytest.raises(StoreClosed, match="not attached"):
        store_of(ref)
