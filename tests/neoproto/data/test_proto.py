import pickle
import threading

import numpy as np
import pytest
import torch

from neoproto.data import DataProto, collect, pad_dataproto_to_divisor, split_for_ranks, unpad_dataproto
from neoproto.errors import KeyMissing, StoreClosed
from neoproto.store import MemoryStore, active_store, set_process_store, use_store


@pytest.fixture(params=["inline", "stored"])
def store(request):
    if request.param == "inline":
        yield None
        return
    store = MemoryStore("test-proto")
    with use_store(store):
        yield store
    store.close()


@pytest.fixture
def memory():
    store = MemoryStore("test-memory")
    with use_store(store):
        yield store
    store.close()


def make(rows=6, **meta):
    return DataProto.from_dict(
        tensors={"ids": torch.arange(rows * 2).reshape(rows, 2), "mask": torch.arange(rows) % 2 == 0},
        non_tensors={"uid": [f"u{i}" for i in range(rows)], "score": np.arange(rows, dtype=np.float64)},
        meta_info=meta,
    )


def uids(data):
    return data["uid"].tolist()


def test_columns_come_back_as_they_went_in(store):
    data = make(3)
    assert len(data) == 3
    assert torch.equal(data["ids"], torch.arange(6).reshape(3, 2))
    assert data["mask"].dtype == torch.bool
    assert uids(data) == ["u0", "u1", "u2"]
    assert data["score"].dtype == np.float64
    assert set(data.batch) == {"ids", "mask"}
    assert set(data.non_tensor_batch) == {"uid", "score"}
    assert data.batch.batch_size == torch.Size([3])


def test_making_a_batch_with_a_store_costs_one_put_and_holds_references(memory):
    data = make(8)
    assert memory.trips == 1
    assert len(data.refs) == 4
    assert memory.bytes_out == 0
    assert len(pickle.dumps(make(4096))) < 3000


def jagged():
    return torch.nested.nested_tensor([torch.arange(2.0), torch.arange(5.0)], layout=torch.jagged)


def test_rows_of_a_nested_tensor_are_a_column_of_objects(store):
    data = DataProto.from_dict({}, {"t": list(jagged().unbind()), "uid": ["a", "b"]})
    swapped = DataProto.concat([data[1:], data[:1]])
    assert [row.tolist() for row in swapped["t"]] == [[0, 1, 2, 3, 4], [0, 1]]
    with pytest.raises(ValueError, match="nested tensor"):
        data.batch["other"] = jagged()


@pytest.mark.parametrize(
    ("tensors", "others", "message"),
    [
        (
            {"a": torch.zeros(3, 2), "b": torch.zeros(4)},
            {},
            r"column 'b' has shape \(4,\), column 'a' has \(3, 2\)",
        ),
        ({"a": torch.zeros(3)}, {"n": [1, 2]}, r"column 'n' has shape \(2,\), column 'a' has \(3,\)"),
        ({"a": torch.zeros(())}, {}, r"column 'a' has no batch dimension"),
        ({"a": [1, 2]}, {}, r"column 'a' must be a tensor, got list"),
        ({"a": jagged()}, {}, r"column 'a' must be a dense tensor .* got a nested tensor: pad it, or give"),
        ({"a": torch.eye(2).to_sparse()}, {}, r"got a tensor of layout torch.sparse_coo"),
        ({}, {"n": "text"}, r"column 'n' must be an array or a sequence, got str"),
        ({"a": torch.zeros(3)}, {"a": [1, 2, 3]}, r"column 'a' is given both"),
    ],
)
def test_bad_columns_are_named(tensors, others, message):
    with pytest.raises(ValueError, match=message):
        DataProto.from_dict(tensors, others)


def test_refused_columns_are_not_put(memory):
    with pytest.raises(ValueError, match="batch dimensions differ"):
        DataProto.from_dict({"a": torch.zeros(3), "b": torch.zeros(4)})
    assert memory.keys() == []


def test_from_single_dict_sorts_by_type(store):
    data = DataProto.from_single_dict({"t": torch.arange(2), "n": np.array(["a", "b"])})
    assert (list(data.batch), list(data.non_tensor_batch)) == (["t"], ["n"])
    with pytest.raises(ValueError, match="column 'x' must be a tensor or an array, got list"):
        DataProto.from_single_dict({"x": [1]})


def test_rows_items_and_iteration(store):
    data = make(3, step=1)
    item = data[-1]
    assert item["uid"] == "u2"
    assert item.batch["ids"].tolist() == [4, 5]
    assert item.non_tensor_batch["score"] == 2.0
    assert [row["uid"] for row in data] == ["u0", "u1", "u2"]
    with pytest.raises(IndexError, match="row 3 is out of range for a batch of 3 rows"):
        data[3]


def test_iterating_reads_once(memory):
    data = make(5)
    trips = memory.trips
    assert len([row["uid"] for row in data]) == 5
    assert memory.trips == trips + 1


@pytest.mark.parametrize(
    "index",
    [
        [2, 0, 0],
        np.array([1]),
        torch.tensor([True, False, True, False, False, True]),
        np.array([], int),
        [-1, -6],
        slice(1, None, 2),
        slice(None, -2),
        slice(None, None, -1),
    ],
)
def test_indexing_is_numpys(store, index):
    data = make(6)
    want = np.array([f"u{i}" for i in range(6)])[np.asarray(index) if not isinstance(index, slice) else index]
    assert uids(data[index]) == want.tolist()


def test_bad_indices(store):
    data = make(6)
    with pytest.raises(IndexError, match="row 6 is out of range"):
        data.select_idxs([0, 6])
    with pytest.raises(ValueError, match="mask has 2 entries for 6 rows"):
        data.select_idxs([True, False])
    with pytest.raises(ValueError, match="integers or booleans"):
        data.select_idxs([0.5])
    with pytest.raises(ValueError, match="one-dimensional"):
        data.select_idxs([[0]])


def test_chunk_split_concat(store):
    data = make(6)
    chunks = data.chunk(3)
    assert [uids(chunk) for chunk in chunks] == [["u0", "u1"], ["u2", "u3"], ["u4", "u5"]]
    assert [len(part) for part in data.split(4)] == [4, 2]
    back = DataProto.concat([chunks[2], chunks[0], chunks[1]])
    assert uids(back) == ["u4", "u5", "u0", "u1", "u2", "u3"]
    assert torch.equal(back["ids"], torch.cat([c["ids"] for c in (chunks[2], chunks[0], chunks[1])]))
    with pytest.raises(ValueError, match="cannot cut 6 rows into 4 equal chunks"):
        data.chunk(4)


def test_concat_of_batches_made_apart_and_dtype_promotion(store):
    first = DataProto.from_dict({"x": torch.arange(3)}, {"s": np.array(["a", "b", "c"])})
    second = DataProto.from_dict({"x": torch.tensor([0.5])}, {"s": np.array(["long"])})
    both = DataProto.concat([first, second, first[1:]])
    assert both["x"].tolist() == [0.0, 1.0, 2.0, 0.5, 1.0, 2.0]
    assert both["x"].dtype == torch.float32
    assert both["s"].tolist() == ["a", "b", "c", "long", "b", "c"]


def test_concat_names_what_differs(store):
    one = DataProto.from_dict({"x": torch.zeros(2, 3)})
    with pytest.raises(ValueError, match=r"cannot concat column 'x': tensor \(2, 3\), tensor \(2, 4\)"):
        DataProto.concat([one, DataProto.from_dict({"x": torch.zeros(2, 4)})])
    with pytest.raises(ValueError, match=r"batch 1 differs from batch 0 in columns \['x', 'y'\]"):
        DataProto.concat([one, DataProto.from_dict({"y": torch.zeros(2)})])
    with pytest.raises(ValueError, match="at least one batch"):
        DataProto.concat([])


def test_concat_merges_meta_info_as_verl_does():
    parts = [make(1, metrics={"loss": i}, step=3) for i in range(2)]
    assert DataProto.concat(parts).meta_info == {"step": 3, "metrics": {"loss": [0, 1]}}
    with pytest.raises(ValueError, match="meta_info 'step' is 4 in batch 1, 3 in an earlier one"):
        DataProto.concat([make(1, step=3), make(1, step=4)])


def test_rows_that_repeat_are_read_as_copies(memory):
    """The samples of a prompt repeat its row: what is noted about one is not noted about the others."""
    data = DataProto.from_dict(non_tensors={"info": [{"seen": []}, {"seen": []}]}).repeat(3)
    for row, info in enumerate(infos := data["info"]):
        info["seen"].append(row)
    assert [info["seen"] for info in infos] == [[0], [1], [2], [3], [4], [5]]
    assert [info["seen"] for info in data["info"]] == [[]] * 6


def test_repeat_and_sample_level_repeat(store):
    data = make(2)
    assert uids(data.repeat(2)) == ["u0", "u0", "u1", "u1"]
    assert uids(data.repeat(2, interleave=False)) == ["u0", "u1", "u0", "u1"]
    assert uids(data.sample_level_repeat(torch.tensor([0, 3]))) == ["u1"] * 3
    with pytest.raises(ValueError, match="repeat_times must be 2 counts"):
        data.sample_level_repeat([1])


def test_reorder_is_in_place(store):
    data = make(3)
    assert data.reorder(torch.tensor([2, 0, 1])) is None
    assert uids(data) == ["u2", "u0", "u1"]


def test_padding_leaves_the_batch_alone(store):
    data = make(3)
    padded, added = pad_dataproto_to_divisor(data, 8)
    assert (len(data), len(padded), added) == (3, 8, 5)
    assert uids(padded) == ["u0", "u1", "u2", "u0", "u1", "u2", "u0", "u1"]
    assert uids(unpad_dataproto(padded, added)) == ["u0", "u1", "u2"]
    with pytest.raises(ValueError, match="cannot remove 4 of 3 rows"):
        data.unpad(4)


def test_select_pop_rename(store):
    data = make(2, a=1, b=2)
    assert set(data.select(["ids"]).columns) == {"ids", "uid", "score"}
    assert set(data.select([], ["uid"], ["a"]).columns) == {"uid"}
    taken = data.pop(["ids"], ["uid"], ["a"])
    assert set(taken.columns) == {"ids", "uid"}
    assert (taken.meta_info, data.meta_info) == ({"a": 1}, {"b": 2})
    assert set(data.columns) == {"mask", "score"}
    with pytest.raises(KeyError, match="no 'ids'"):
        data.pop(["mask", "ids"])
    assert "mask" in data
    assert set(data.rename("mask", "keep").columns) == {"keep", "score"}
    with pytest.raises(ValueError, match="one new key for each old key"):
        data.rename(["keep"], [])
    with pytest.raises(ValueError, match="used twice"):
        data.rename("keep", "score")


def test_union(store):
    data = make(2, a=1)
    other = DataProto.from_dict(
        {"extra": torch.ones(2), "ids": torch.arange(4).reshape(2, 2)}, meta_info={"b": 2}
    )
    assert data.union(other) is data
    assert data["extra"].tolist() == [1, 1]
    assert data.meta_info == {"a": 1, "b": 2}
    with pytest.raises(ValueError, match=r"column 'ids' has two values, \(2, 2\) and \(2, 2\)"):
        data.union(DataProto.from_dict({"ids": torch.zeros(2, 2, dtype=torch.int64)}))
    with pytest.raises(ValueError, match="union of 2 rows with 3 rows"):
        data.union(DataProto.from_dict({"z": torch.zeros(3)}))
    with pytest.raises(ValueError, match="meta_info 'a' is both 1 and 5"):
        data.union(DataProto(meta_info={"a": 5}))


def test_union_with_itself_reads_nothing(memory):
    data = make(4)
    data[1:3].union(data.select(["ids"])[1:3])
    assert memory.bytes_out == 0


def test_meta_info_is_not_shared_with_derived_batches(store):
    data = make(4, nested={"list": [1]})
    derived = [
        data[:2],
        data.select(["ids"]),
        data.chunk(2)[0],
        data.repeat(2),
        data.stored(MemoryStore("elsewhere")),
        DataProto.concat([data]),
        make(4).union(data),
    ]
    for other in derived:
        other.meta_info["nested"]["list"].append(2)
    assert data.meta_info == {"nested": {"list": [1]}}


@pytest.mark.parametrize("shuffle", [False, True])
def test_make_iterator_gives_a_dataloaders_order(store, shuffle):
    data = make(6)
    kwargs = {"shuffle": shuffle}
    got = [uids(part) for part in data.make_iterator(2, 2, seed=5, dataloader_kwargs=kwargs)]
    loader = torch.utils.data.DataLoader(
        [f"u{i}" for i in range(6)],
        batch_size=2,
        collate_fn=list,
        generator=torch.Generator().manual_seed(5),
        **kwargs,
    )
    assert got == [part for _ in range(2) for part in loader]
    with pytest.raises(ValueError, match="cannot cut 6 rows into mini-batches of 4"):
        data.make_iterator(4, 1)


def test_assigning_and_deleting_columns(store):
    data = make(2)
    data.batch["new"] = torch.tensor([5, 6])
    data.non_tensor_batch["tag"] = ["x", None]
    assert data["new"].tolist() == [5, 6]
    assert data["tag"].tolist() == ["x", None]
    del data.batch["mask"]
    assert "mask" not in data
    with pytest.raises(ValueError, match="a list is no tensor column"):
        data.batch["bad"] = [1, 2]
    with pytest.raises(ValueError, match=r"column 'bad' has shape \(3,\)"):
        data.batch["bad"] = torch.zeros(3)
    with pytest.raises(KeyError, match="no tensor column 'uid'"):
        data.batch["uid"]


def test_only_needed_rows_are_read(memory):
    data = DataProto.from_dict({"x": torch.arange(1000, dtype=torch.uint8)})
    assert data[[7, 7, 9]]["x"].tolist() == [7, 7, 9]
    assert memory.bytes_out == 2
    assert data.repeat(3)[1::1000]["x"].tolist() == [0, 77, 144] or memory.bytes_out == 5


def test_a_pickled_chunk_carries_its_own_rows_only():
    data = DataProto.from_dict({"x": torch.zeros(10_000)}, {"o": list(range(10_000))})
    part = pickle.loads(pickle.dumps(data[10:13]))
    assert part["o"].tolist() == [10, 11, 12]
    assert len(pickle.dumps(data[10:13])) < 2_000


def test_pickling_drops_references_that_no_row_uses(memory):
    both = DataProto.concat([make(2), make(2)])
    part = pickle.loads(pickle.dumps(both[2:]))
    assert len(part.refs) == 4
    assert uids(part) == ["u0", "u1"]
    assert uids(pickle.loads(pickle.dumps(both[[3, 0]]))) == ["u1", "u0"]
    assert len(pickle.loads(pickle.dumps(both[:0]))) == 0


def test_release_deletes_and_is_idempotent(memory):
    data = make(2)
    part = data[:1]
    data.release()
    data.release()
    assert memory.keys() == []
    with pytest.raises(KeyMissing):
        part["ids"]


def test_a_closed_store_is_said_to_be_closed():
    store = MemoryStore("short-lived")
    with use_store(store):
        data = make(2)
    store.close()
    with pytest.raises(StoreClosed, match="short-lived"):
        data["ids"]
    data.release()


def test_the_process_store_is_seen_from_other_threads_and_can_be_masked():
    store = MemoryStore("whole-process")
    set_process_store(store)
    try:
        seen = []
        thread = threading.Thread(target=lambda: seen.append(active_store()))
        thread.start()
        thread.join()
        assert seen == [store]
        with use_store(None):
            assert make(1).refs == []
    finally:
        set_process_store(None)
        store.close()
    assert active_store() is None


def test_empty_batches(store):
    data = make(0)
    assert len(data) == 0
    assert data["ids"].shape == (0, 2)
    assert uids(make(3)[:0]) == []
    assert make(3)[:0]["ids"].shape == (0, 2)
    assert len(DataProto()) == 0


def test_to_moves_inline_and_marks_stored_columns(store):
    data = make(2).to("meta")
    assert data["ids"].device.type == "meta"
    assert data.materialize(["mask"])["mask"].device.type == "meta"


def test_split_for_ranks_and_collect(store):
    data = make(5)
    split = split_for_ranks(data, 4, pad=True)
    assert [len(chunk) for chunk in split.chunks] == [2, 2, 2, 2]
    assert (split.padding, len(data)) == (3, 5)
    assert uids(split.collect([chunk.select() for chunk in split.chunks])) == [f"u{i}" for i in range(5)]
    assert split.collect([chunk["ids"] for chunk in split.chunks]).shape == (5, 2)
    assert split.collect([chunk["score"] for chunk in split.chunks]).tolist() == [0, 1, 2, 3, 4]
    assert split.collect([uids(chunk) for chunk in split.chunks]) == [f"u{i}" for i in range(5)]
    samples = split.collect([chunk.repeat(3) for chunk in split.chunks])
    assert uids(samples) == [f"u{i}" for i in range(5) for _ in range(3)]


def test_split_without_padding_must_divide():
    with pytest.raises(ValueError, match="5 rows do not divide over 4 ranks"):
        split_for_ranks(make(5), 4, pad=False)
    split = split_for_ranks(make(4), 4, pad=True)
    assert split.padding == 0


def test_padding_cannot_be_removed_from_unrelated_results():
    split = split_for_ranks(make(5), 4, pad=True)
    with pytest.raises(ValueError, match="8 rows went in, 4 came out"):
        split.collect([[1]] * 4)
    with pytest.raises(ValueError, match="got list, int"):
        collect([[1], 2])


def test_splitting_an_inline_batch_puts_it_once():
    data = make(4)
    store = MemoryStore("late")
    with use_store(store):
        split = split_for_ranks(data, 2, pad=False)
    assert store.trips == 1
    assert all(len(chunk.refs) == 4 for chunk in split.chunks)
    assert data.refs == []
    store.close()
