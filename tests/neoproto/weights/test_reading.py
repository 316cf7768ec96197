import threading
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from neoproto.errors import WeightMismatch
from neoproto.store import MemoryStore
from neoproto.weights import Publisher, WeightOptions
from neoproto.weights.manifest import Box, Piece
from neoproto.weights.reading import ReadStopped, Slice, WeightReader, byte_ranges
from tests.neoproto.weights.manifests import version


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_byte_ranges_are_those_of_the_part_in_its_order(data):
    shape = tuple(data.draw(st.lists(st.integers(1, 5), max_size=4)))
    start = tuple(data.draw(st.integers(0, size - 1)) for size in shape)
    part = tuple(data.draw(st.integers(1, size - at)) for size, at in zip(shape, start, strict=True))
    piece = Piece(box=Box.whole(shape), bucket=0, offset=64)
    inner = Box(start=start, shape=part)
    bucket = torch.cat(
        [
            torch.zeros(64, dtype=torch.uint8),
            torch.arange(Box.whole(shape).numel).to(torch.int16).view(torch.uint8),
        ]
    )
    ranges = list(byte_ranges(piece, inner, 2))
    found = torch.cat([bucket[one.start : one.stop] for one in ranges]).view(torch.int16)
    expected = inner.of(torch.arange(Box.whole(shape).numel, dtype=torch.int16).view(shape))
    assert torch.equal(found.view(part), expected)
    assert sum(map(len, ranges)) == 2 * inner.numel


def test_a_contiguous_part_is_one_range():
    piece = Piece(box=Box.whole((4, 6)), bucket=0, offset=0)
    assert list(byte_ranges(piece, Box(start=(1, 0), shape=(2, 6)), 4)) == [range(24, 72)]
    assert list(byte_ranges(piece, Box(start=(1, 2), shape=(2, 3)), 4)) == [range(32, 44), range(56, 68)]


@pytest.fixture
def published():
    store = MemoryStore()
    tensors = {
        "layers.0.w": torch.arange(24.0).view(4, 6),
        "layers.1.w": torch.arange(24.0, 48.0).view(4, 6),
        "norm": torch.ones(6),
    }
    tensors["tied"] = tensors["layers.0.w"]
    return store, Publisher(store, options=WeightOptions(bucket_bytes=100)).publish(version(0), tensors)


def test_a_slice_reads_its_own_bytes_and_no_others(published):
    store, manifest = published
    before = store.bytes_out
    select = {
        "layers.0.w": Slice(dim=1, start=2, stop=5),
        "layers.1.w": Slice(dim=0, start=1, stop=3),
        "norm": None,
    }
    found = WeightReader(store).read(manifest, select=select)
    assert list(found) == list(select)
    assert torch.equal(found["layers.0.w"], torch.arange(24.0).view(4, 6)[:, 2:5])
    assert torch.equal(found["layers.1.w"], torch.arange(24.0, 48.0).view(4, 6)[1:3])
    assert found["norm"].tolist() == [1] * 6
    assert store.bytes_out - before == 4 * (12 + 12 + 6)


def test_a_layer_range_leaves_the_other_layers_unread(published):
    store, manifest = published
    before = store.bytes_out
    assert list(WeightReader(store).read(manifest, select={"layers.1.w": None})) == ["layers.1.w"]
    assert store.bytes_out - before == 96
    assert WeightReader(store).read(manifest, select={}) == {}


def test_tied_names_that_are_wanted_alike_share_memory(published):
    store, manifest = published
    part = Slice(dim=0, start=0, stop=2)
    found = WeightReader(store).read(manifest, select={"layers.0.w": part, "tied": part})
    assert found["tied"].data_ptr() == found["layers.0.w"].data_ptr()
    found = WeightReader(store).read(manifest)
    assert found["tied"].data_ptr() == found["layers.0.w"].data_ptr()


@pytest.mark.parametrize(
    ("select", "message"),
    [
        ({"nobody": None}, r"weights 0\.0 have no nobody"),
        ({"norm": Slice(dim=0, start=0, stop=7)}, r"norm is float32\[6\], it has no Slice"),
        ({"norm": Slice(dim=1, start=0, stop=1)}, "norm is"),
        ({"norm": Slice(dim=0, start=3, stop=2)}, "norm is"),
    ],
)
def test_what_the_version_does_not_have_cannot_be_selected(published, select, message):
    store, manifest = published
    with pytest.raises(WeightMismatch, match=message):
        WeightReader(store).read(manifest, select=select)


def test_an_empty_slice_is_empty(published):
    store, manifest = published
    found = WeightReader(store).read(manifest, select={"norm": Slice(dim=0, start=3, stop=3)})
    assert found["norm"].shape == (0,)


def test_a_tensor_that_is_not_complete_is_refused(published):
    store, manifest = published
    entry = manifest.entries[0]
    piece = replace(entry.pieces[0], box=Box(start=(0, 0), shape=(3, 6)))
    broken = replace(manifest, entries=(replace(entry, pieces=(piece,)),))
    with pytest.raises(WeightMismatch, match=r"weights 0\.0: layers\.0\.w is not complete"):
        WeightReader(store).read(broken)


def test_a_bucket_of_another_size_is_refused(published):
    store, manifest = published
    store.put(torch.zeros(7, dtype=torch.uint8), key="short")
    with pytest.raises(WeightMismatch, match=r"bucket short has 7 bytes, its manifest says 96"):
        WeightReader(store).read(replace(manifest, buckets=("short", *manifest.buckets[1:])))


def test_a_reader_refuses_another_layout_and_names_what_differs(published):
    store, manifest = published
    reader = WeightReader(store)
    reader.read(manifest)
    other = Publisher(store, prefix="other").publish(version(1), {"norm": torch.ones(5)})
    with pytest.raises(WeightMismatch, match=r"3 missing: .* norm is float32\[5\], not float32\[6\]"):
        reader.read(other)


def test_a_read_that_is_stopped_reads_no_more(published):
    store, manifest = published
    stop = threading.Event()
    stop.set()
    before = store.trips
    with pytest.raises(ReadStopped):
        WeightReader(store).read(manifest, stop)
    assert store.trips == before
