import asyncio
import threading
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from neoproto.errors import KeyMissing, LeaseExpired, TornRead, WeightMismatch
from neoproto.store import MemoryStore
from neoproto.weights import Publisher, Puller, WeightOptions, WeightRegistry
from neoproto.weights.manifest import Box, Piece
from neoproto.weights.puller import ReadStopped, Slice, WeightReader, byte_ranges, finish
from tests.neoproto.weights.manifests import version
from tests.virtual_time import run as run_virtual

TTL = 30.0


class SlowStore(MemoryStore):
    """Reads wait until they are let go on; counts those under way and those begun."""

    def __init__(self):
        super().__init__()
        self.go_on, self.begun = threading.Event(), threading.Event()
        self.under_way = self.reads = 0

    def get(self, key, *, rows=None, blocking=True):
        self.under_way += 1
        self.reads += 1
        self.begun.set()
        assert self.go_on.wait(20)
        self.under_way -= 1
        return super().get(key, rows=rows, blocking=blocking)


async def publish(registry, store, n=0, **tensors):
    manifest = Publisher(store).publish(version(n), tensors or {"w": torch.arange(4.0)})
    await registry.publish(manifest)
    return manifest


def run(scenario):
    return asyncio.run(asyncio.wait_for(scenario(), 30))


def test_a_version_is_read_under_a_lease_that_ends_with_the_block():
    async def scenario():
        registry, store = WeightRegistry(), MemoryStore()
        manifest = await publish(registry, store)
        puller = Puller(store, registry, "r0")
        async with puller.pull() as pulled:
            assert pulled.version == version(0)
            assert pulled.manifest == manifest
            assert pulled.tensors["w"].tolist() == [0, 1, 2, 3]
            await pulled.check()
            assert [one.holder for one in await registry.holders(version(0))] == ["r0"]
        assert await registry.holders(version(0)) == ()
        await publish(registry, store, 1)
        async with puller.pull() as newest, puller.pull(version(0)) as named:
            assert (newest.version, named.version) == (version(1), version(0))
        with pytest.raises(KeyMissing):
            async with puller.pull(version(7)):
                pass

    run(scenario)


def test_the_lease_is_kept_as_long_as_the_block_lasts():
    async def scenario():
        registry, store = WeightRegistry(), MemoryStore()
        await publish(registry, store)
        async with Puller(store, registry, "r0", TTL).pull() as pulled:
            await asyncio.sleep(100 * TTL)
            await pulled.check()
        assert (await registry.state()).lapsed == 0

    run_virtual(scenario)


def test_a_loaded_version_is_reported_once_and_its_lease_is_not_released_again():
    async def scenario():
        class Noting(WeightRegistry):
            async def release(self, lease_id):
                pytest.fail("released")

        registry, store = Noting(), MemoryStore()
        await publish(registry, store)
        async with Puller(store, registry, "r0", TTL).pull() as pulled:
            await pulled.loaded("replica 0")
            assert await registry.serving() == {"replica 0": version(0)}
            assert await registry.holders(version(0)) == ()
            await asyncio.sleep(100 * TTL)  # a renewal would be refused
            with pytest.raises(TornRead):
                await pulled.check()

    run_virtual(scenario)


@pytest.mark.parametrize("renewed", [True, False])
def test_what_was_loaded_under_a_lapsed_lease_is_a_torn_read(renewed):
    async def scenario():
        registry, store = (WeightRegistry if renewed else Refusing)(), MemoryStore()
        await publish(registry, store)

        async def load():
            async with Puller(store, registry, "r0", TTL).pull() as pulled:
                if renewed:
                    await registry.forget_replica("r0")
                else:
                    await asyncio.sleep(1.5 * TTL)
                await pulled.loaded("r0")

        with pytest.raises(TornRead, match=r"the lease of r0 on weights 0\.0 lapsed, 30\.0 s after"):
            await load()
        assert await registry.serving() == {}

    run_virtual(scenario)


class Refusing(WeightRegistry):
    """Takes no renewals, as if they came too late."""

    async def renew(self, lease_id):
        raise LeaseExpired(lease_id)


def test_a_lease_that_lapses_during_the_read_or_the_use_is_a_torn_read():
    async def scenario():
        registry, store = Refusing(), MemoryStore()
        await publish(registry, store)

        class Slow(Puller):
            seconds = 1.5 * TTL

            async def _finish(self, reading, stop):
                await asyncio.sleep(self.seconds)
                return finish(reading, stop)

        puller = Slow(store, registry, "r0", TTL)
        with pytest.raises(TornRead, match=r"the lease of r0 on weights 0\.0 lapsed"):
            async with puller.pull():
                pytest.fail("handed over")
        puller.seconds = 0
        async with puller.pull() as pulled:
            await asyncio.sleep(1.5 * TTL)
            with pytest.raises(TornRead):
                await pulled.check()

    run_virtual(scenario)


def test_bytes_that_went_because_the_lease_lapsed_are_a_torn_read_too():
    async def scenario():
        registry, store = Refusing(), MemoryStore()
        manifest = await publish(registry, store)

        class TakenAway(Puller):
            async def _finish(self, reading, stop):
                await registry.retire(version(0))
                assert await registry.wait_reclaimed(version(0), 2 * TTL) == ()
                store.delete_batch(list(manifest.buckets))
                return finish(reading, stop)

        with pytest.raises(TornRead):
            async with TakenAway(store, registry, "r0", TTL).pull():
                pytest.fail("handed over")

    run_virtual(scenario)


def test_a_cancelled_pull_stops_reading_and_then_releases():
    async def scenario():
        store, under_way = SlowStore(), []

        class Noting(WeightRegistry):
            async def release(self, lease_id):
                under_way.append(store.under_way)
                return await super().release(lease_id)

        registry = Noting()
        await publish(
            registry,
            store,
            a=torch.zeros(20 << 20, dtype=torch.uint8),
            b=torch.zeros(64 << 20, dtype=torch.uint8),
        )

        async def pull():
            async with Puller(store, registry, "r0").pull():
                pytest.fail("handed over")

        pulling = asyncio.create_task(pull())
        await asyncio.to_thread(store.begun.wait)
        for _ in range(2):
            pulling.cancel()
            for _ in range(20):  # turns enough for it to end, if it did not wait for the thread
                await asyncio.sleep(0)
        assert not pulling.done()
        assert len(await registry.holders(version(0))) == 1
        store.go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await pulling
        assert (under_way, store.reads) == ([0], 1)
        assert await registry.holders(version(0)) == ()

    run(scenario)


def test_a_failure_in_the_block_releases_and_is_not_replaced_by_that_of_the_release():
    async def scenario():
        class Broken(WeightRegistry):
            async def release(self, lease_id):
                await super().release(lease_id)
                raise LeaseExpired("cannot be told")

        registry, store = Broken(), MemoryStore()
        await publish(registry, store)
        puller = Puller(store, registry, "r0")
        with pytest.raises(ZeroDivisionError):
            async with puller.pull():
                raise ZeroDivisionError
        assert await registry.holders(version(0)) == ()
        with pytest.raises(LeaseExpired, match="cannot be told"):
            async with puller.pull():
                pass

    run(scenario)


def test_a_version_with_another_layout_is_refused_and_names_what_differs():
    async def scenario():
        registry, store = WeightRegistry(), MemoryStore()
        await publish(registry, store, a=torch.zeros(2), b=torch.zeros(3))
        await publish(registry, store, 1, a=torch.zeros(2), b=torch.zeros(4))
        puller = Puller(store, registry, "r0")
        async with puller.pull(version(0)):
            pass
        with pytest.raises(WeightMismatch, match=r"weights 0\.1 .* b is float32\[4\], not float32\[3\]"):
            async with puller.pull():
                pass
        assert await registry.holders(version(1)) == ()

    run(scenario)


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
