import pickle

import pytest
import torch

from neoproto.errors import WeightMismatch
from neoproto.weights import (
    Entry,
    Manifest,
    TensorLayout,
    WeightVersion,
    check_layout,
    dtype_name,
    parse_dtype,
)
from neoproto.weights.manifest import Box, Piece


def layout(dtype: str, *shape: int) -> TensorLayout:
    return TensorLayout(dtype=dtype, shape=shape)


def test_equal_layouts_pass_in_any_order():
    check_layout(
        {"a": layout("float32", 2), "b": layout("bfloat16", 3, 4)},
        {"b": layout("bfloat16", 3, 4), "a": layout("float32", 2)},
        what="weights 0.1",
    )


def test_a_mismatch_names_what_is_missing_unexpected_and_different():
    found = {
        "a": layout("float32", 2),
        "new": layout("float32"),
        "c": layout("bfloat16", 3),
        "d": layout("int8", 1),
    }
    expected = {
        "a": layout("float32", 4),
        "gone": layout("float32"),
        "c": layout("float32", 3),
        "d": found["d"],
    }
    with pytest.raises(WeightMismatch) as caught:
        check_layout(found, expected, what="weights 0.1")
    text = str(caught.value)
    assert text == (
        "weights 0.1 do not fit the model: 1 missing: gone; 1 unexpected: new; "
        "2 different: a is float32[2], not float32[4], c is bfloat16[3], not float32[3]"
    )


def test_a_long_list_of_differences_is_cut_and_counted():
    expected = {f"w{index:02}": layout("float32", 1) for index in range(20)}
    with pytest.raises(WeightMismatch, match=r"20 missing: w00, .*w07 and 12 more$"):
        check_layout({}, expected, what="weights 0.1")


@pytest.mark.parametrize(
    "dtype",
    [
        *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.complex64),
        *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
    ],
)
def test_a_dtypes_size_is_known_without_torch(dtype):
    assert layout(dtype_name(dtype), 3, 5).nbytes == 15 * dtype.itemsize


def test_nbytes_counts_shared_bytes_once():
    shared = {
        "dtype": "bfloat16",
        "shape": (4, 8),
        "pieces": (Piece(box=Box.whole((4, 8)), bucket=0, offset=0),),
    }
    norm = Piece(box=Box.whole((8,)), bucket=0, offset=64)
    manifest = Manifest(
        version=WeightVersion(epoch=0, n=1),
        entries=(
            Entry(name="embed", **shared),
            Entry(name="head", **shared),
            Entry(name="norm", dtype="float32", shape=(8,), pieces=(norm,)),
            Entry(name="empty", dtype="float32", shape=(0,), pieces=()),
        ),
        buckets=("weights/0.1/0",),
        bucket_bytes=(96,),
    )
    assert manifest.nbytes == 64 + 32
    assert [entry.name for entry in manifest] == ["embed", "head", "norm", "empty"]
    assert pickle.loads(pickle.dumps(manifest)) == manifest


def test_boxes_overlap_in_what_both_contain():
    one, other = Box(start=(0, 2), shape=(3, 4)), Box(start=(2, 0), shape=(5, 3))
    assert one.overlap(other) == Box(start=(2, 2), shape=(1, 1))
    assert one.overlap(Box(start=(3, 0), shape=(1, 9))) is None
    assert one.overlap(Box(start=(0, 2), shape=(0, 4))) is None
    assert Box.whole(()).overlap(Box.whole(())) == Box.whole(())
    assert Box(start=(2, 3), shape=(1, 2)).inside(one) == Box(start=(2, 1), shape=(1, 2))
    assert one.of(torch.arange(36).view(6, 6)).tolist() == [[2, 3, 4, 5], [8, 9, 10, 11], [14, 15, 16, 17]]


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("bf16", torch.bfloat16), ("fp32", torch.float32), ("float16", torch.float16), ("int64", torch.int64)],
)
def test_dtypes_are_known_by_name(name, dtype):
    assert parse_dtype(name) == dtype
    assert parse_dtype(dtype_name(dtype)) == dtype


@pytest.mark.parametrize("name", ["float7", "nn", "Tensor"])
def test_what_is_not_a_dtype_is_refused(name):
    with pytest.raises(ValueError, match=f"unknown dtype '{name}'"):
        parse_dtype(name)
