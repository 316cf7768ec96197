"""Every operation against a plain model: a list of rows."""

import pickle

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from neoproto.data import DataProto, split_for_ranks
from neoproto.store import MemoryStore, use_store


def build(rows):
    return DataProto.from_dict(
        tensors={"x": torch.tensor([[row, -row] for row in rows], dtype=torch.int64).reshape(len(rows), 2)},
        non_tensors={"o": [{"row": row} for row in rows], "n": np.array(rows, dtype=np.int32)},
    )


def read(data):
    values = data.materialize()
    x, o, n = values["x"], values["o"], values["n"]
    assert x.dtype == torch.int64
    assert x.shape == (len(data), 2)
    assert n.dtype == np.int32
    assert x[:, 0].tolist() == (-x[:, 1]).tolist() == n.tolist() == [cell["row"] for cell in o]
    return n.tolist()


@st.composite
def programs(draw):
    """Some batches, and operations to apply to a stack of them."""
    rows = draw(st.lists(st.lists(st.integers(0, 99), max_size=6), min_size=1, max_size=3))
    steps = draw(
        st.lists(st.tuples(st.integers(0, 9), st.integers(0, 2**30), st.integers(-7, 7)), max_size=8)
    )
    return rows, steps


def apply(operation, salt, amount, data, model, others):
    """One operation on a batch and on its model; `others` is another (batch, model) to join with."""
    rng = np.random.default_rng(salt)
    size = len(model)
    if operation == 0:
        step = amount if amount else None
        return data[step and step // 2 : amount : step], model[step and step // 2 : amount : step]
    if operation == 1:
        index = rng.integers(-size, size, abs(amount)) if size else np.zeros(0, int)
        return data.select_idxs(torch.as_tensor(index)), [model[i] for i in index]
    if operation == 2:
        mask = rng.integers(0, 2, size).astype(bool)
        return data[mask], [row for row, keep in zip(model, mask, strict=True) if keep]
    if operation == 3:
        return DataProto.concat([data, others[0], data]), model + others[1] + model
    if operation == 4:
        times = abs(amount) % 3
        if salt % 2:
            return data.repeat(times), [row for row in model for _ in range(times)]
        return data.repeat(times, interleave=False), model * times
    if operation == 5:
        counts = rng.integers(0, 3, size)
        return data.sample_level_repeat(counts), [
            r for r, c in zip(model, counts, strict=True) for _ in range(c)
        ]
    if operation == 6:
        order = rng.permutation(size)
        data = data.select()  # `reorder` works in place, and `others` may be this very batch
        data.reorder(order)
        return data, [model[i] for i in order]
    if operation == 7:
        divisor = abs(amount) + 1
        if not model:
            return data, model
        padded, added = data.pad_to_divisor(divisor)
        assert read(padded)[:size] == model
        assert len(padded) % divisor == 0
        return padded, model + [model[i % size] for i in range(added)]
    if operation == 8:
        return pickle.loads(pickle.dumps(data)), model
    pieces = data.split(abs(amount) + 1)
    return (DataProto.concat(pieces[::-1]) if pieces else data), [
        row
        for start in range(0, size, abs(amount) + 1)[::-1]
        for row in model[start : start + abs(amount) + 1]
    ]


def run(program):
    rows, steps = program
    batches = [(build(part), list(part)) for part in rows]
    data, model = batches[0]
    for operation, salt, amount in steps:
        data, model = apply(operation, salt, amount, data, model, batches[salt % len(batches)])
        if len(model) > 300:
            break
        assert len(data) == len(model)
    assert read(data) == model
    if model:
        split = split_for_ranks(data, 3, pad=True)
        assert read(split.collect(split.chunks)) == model
        assert read(data) == model


@given(programs())
@settings(deadline=None, max_examples=150)
def test_inline_batches_behave_like_lists_of_rows(program):
    run(program)


@given(programs())
@settings(deadline=None, max_examples=150)
def test_stored_batches_behave_like_lists_of_rows(program):
    store = MemoryStore("properties")
    try:
        with use_store(store):
            run(program)
    finally:
        store.close()


@given(st.lists(st.integers(0, 99), min_size=1, max_size=20), st.data())
@settings(deadline=None, max_examples=50)
def test_columns_move_between_batches_like_dictionary_entries(rows, data):
    store = MemoryStore("columns")
    try:
        with use_store(store if data.draw(st.booleans()) else None):
            batch = build(rows)
            names = data.draw(st.lists(st.sampled_from(["x", "o", "n"]), unique=True))
            tensors = [name for name in names if name == "x"]
            others = [name for name in names if name != "x"]
            chosen = batch.select(tensors, others)
            assert sorted(chosen.columns) == sorted(names)
            taken = batch.pop(tensors, others)
            assert sorted(taken.columns) == sorted(names)
            assert sorted(batch.columns) == sorted({"x", "o", "n"} - set(names))
            if len(batch.columns) in (0, 3):
                return
            assert read(taken.union(batch)) == rows
    finally:
        store.close()
