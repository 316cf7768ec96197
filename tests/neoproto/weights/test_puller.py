import asyncio
import threading

import pytest
import torch

from neoproto.errors import KeyMissing, LeaseExpired, TornRead, WeightMismatch
from neoproto.store import MemoryStore
from neoproto.weights import Publisher, Puller, WeightRegistry
from neoproto.weights.reading import finish
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


async def published(registry, store, n=0, **tensors):
    manifest = Publisher(store).publish(version(n), tensors or {"w": torch.arange(4.0)})
    await registry.publish(manifest)
    return manifest


def run(scenario):
    return asyncio.run(asyncio.wait_for(scenario(), 30))


def test_a_version_is_read_under_a_lease_that_ends_with_the_block():
    async def scenario():
        registry, store = WeightRegistry(), MemoryStore()
        manifest = await published(registry, store)
        puller = Puller(store, registry, "r0")
        async with puller.pull() as pulled:
            assert pulled.version == version(0)
            assert pulled.manifest == manifest
            assert pulled.tensors["w"].tolist() == [0, 1, 2, 3]
            await pulled.check()
            assert [one.holder for one in await registry.holders(version(0))] == ["r0"]
        assert await registry.holders(version(0)) == ()
        await published(registry, store, 1)
        async with puller.pull() as newest, puller.pull(version(0)) as named:
            assert (newest.version, named.version) == (version(1), version(0))
        with pytest.raises(KeyMissing):
            async with puller.pull(version(7)):
                pass

    run(scenario)


def test_the_lease_is_kept_as_long_as_the_block_lasts():
    async def scenario():
        registry, store = WeightRegistry(), MemoryStore()
        await published(registry, store)
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
        await published(registry, store)
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
        await published(registry, store)

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
        await published(registry, store)

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
        manifest = await published(registry, store)

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
        await published(
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
        await published(registry, store)
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
        await published(registry, store, a=torch.zeros(2), b=torch.zeros(3))
        await published(registry, store, 1, a=torch.zeros(2), b=torch.zeros(4))
        puller = Puller(store, registry, "r0")
        async with puller.pull(version(0)):
            pass
        with pytest.raises(WeightMismatch, match=r"weights 0\.1 .* b is float32\[4\], not float32\[3\]"):
            async with puller.pull():
                pass
        assert await registry.holders(version(1)) == ()

    run(scenario)
