import pickle

import numpy as np
import pytest
import torch

from neoproto.store.codec import check_rows, decode, encode, select_rows

DTYPES = sorted(
    {
        getattr(torch, name)
        for name in dir(torch)
        if isinstance(getattr(torch, name), torch.dtype)
        and not getattr(torch, name).is_complex
        and not name.startswith(("q", "bits"))
    },
    key=str,
)


def _equal_bytes(a, b):
    return torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))


@pytest.mark.parametrize("dtype", [*DTYPES, torch.complex32, torch.complex64, torch.complex128], ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (3,), (4, 5), (2, 0, 3)], ids=str)
def test_dense_tensors_of_every_dtype_come_back(dtype, shape):
    raw = torch.randint(0, 2, (torch.Size(shape).numel() * dtype.itemsize,), dtype=torch.uint8)
    value = raw.view(dtype).reshape(shape)
    info, parts = encode(value)
    back = decode(info, parts)
    assert (back.dtype, back.shape) == (dtype, value.shape)
    assert _equal_bytes(back, value)
    assert info.nbytes == value.nbytes


@pytest.mark.parametrize(
    "value",
    [
        torch.arange(24).reshape(4, 6).t(),
        torch.arange(24).reshape(4, 6)[:, ::2],
        torch.randn(3, requires_grad=True),
        torch.randn(3, dtype=torch.complex64).conj(),
        torch.nn.Parameter(torch.randn(2, 2)),
        torch.arange(5).expand(3, 5),
    ],
)
def test_views_and_tracked_tensors_are_stored_as_plain_values(value):
    back = decode(*encode(value))
    assert type(back) is torch.Tensor
    assert not back.requires_grad
    assert torch.equal(back, value.detach())


@pytest.mark.parametrize(
    "value",
    [
        np.arange(6).reshape(2, 3),
        np.array(3.5),
        np.zeros((0, 4), np.float32),
        np.array(["a", "bcd"]),
        np.array(["2020-01-01"], "datetime64[D]"),
        np.arange(4, dtype=">i2"),
        np.asfortranarray(np.arange(6).reshape(2, 3)),
        np.array([(1, 2.0)], dtype=[("a", "i4"), ("b", "f8")]),
        np.broadcast_to(np.arange(3), (2, 3)),
    ],
)
def test_arrays_come_back(value):
    back = decode(*encode(value))
    assert back.dtype == value.dtype
    np.testing.assert_array_equal(back, value)


def test_object_arrays_are_stored_element_by_element():
    value = np.empty(3, dtype=object)
    value[:] = [{"a": [1]}, None, "text"]
    info, parts = encode(value)
    assert info.kind == "objects"
    assert list(decode(info, parts)) == [{"a": [1]}, None, "text"]
    rows = check_rows(info, np.array([2, 0, 2]))
    assert list(decode(*select_rows(info, parts, rows))) == ["text", {"a": [1]}, "text"]


def test_two_dimensional_object_arrays_select_whole_rows():
    value = np.array([[1, "b"], [None, (4,)], [5, 6]], dtype=object)
    info, parts = encode(value)
    got = decode(*select_rows(info, parts, range(1, 3)))
    assert got.tolist() == [[None, (4,)], [5, 6]]


def test_leaves_of_containers_are_not_pickled():
    leaf, array = torch.arange(1000, dtype=torch.bfloat16), np.arange(1000)
    value = {"t": leaf, "deep": [array, (leaf[:3], "x")], "f": lambda: 7}
    info, parts = encode(value)
    assert info.kind == "object"
    assert parts[0].size < 2000
    assert {part.size for part in parts[1:]} >= {2000, 8000}
    back = decode(info, parts)
    assert torch.equal(back["t"], leaf)
    np.testing.assert_array_equal(back["deep"][0], array)
    assert torch.equal(back["deep"][1][0], leaf[:3])
    assert back["f"]() == 7


def test_jagged_tensors_come_back():
    value = torch.nested.nested_tensor([torch.arange(2.0), torch.arange(5.0)], layout=torch.jagged)
    back = decode(*encode(value))
    assert [row.tolist() for row in back.unbind()] == [row.tolist() for row in value.unbind()]


def test_what_cannot_be_pickled_says_so():
    with pytest.raises((TypeError, pickle.PicklingError)):
        encode({"lock": __import__("threading").Lock()})


@pytest.mark.parametrize("rows", [range(1, 3), range(0, 4, 2), np.array([3, 0, 3]), range(0)])
@pytest.mark.parametrize("value", [torch.randn(4, 3, 2), np.arange(8).reshape(4, 2), torch.zeros(4, 0)])
def test_selecting_rows_equals_indexing(value, rows):
    info, parts = encode(value)
    got = decode(*select_rows(info, parts, check_rows(info, rows)))
    want = value[np.asarray(rows, dtype=np.int64)]
    np.testing.assert_array_equal(np.asarray(got), np.asarray(want))
    assert got.dtype == value.dtype


@pytest.mark.parametrize(
    ("value", "rows", "message"),
    [
        (torch.zeros(3), range(2, 5), r"rows 2..4 are outside its 3 rows"),
        (torch.zeros(3), np.array([-1]), r"rows -1..-1 are outside"),
        (torch.zeros(()), range(0), r"cannot select rows of a tensor of shape \(\)"),
        ({}, range(0), r"cannot select rows of a object"),
        (torch.zeros(3), np.zeros((1, 1), int), r"one-dimensional integers"),
        (torch.zeros(3), np.array([0.5]), r"one-dimensional integers"),
    ],
)
def test_rows_that_do_not_exist_are_refused(value, rows, message):
    with pytest.raises(ValueError, match=message):
        check_rows(encode(value)[0], rows)
