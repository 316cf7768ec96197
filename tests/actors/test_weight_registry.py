"""The registry's worker and its two adapters, over calls that end on another thread as a runtime's do."""

import asyncio
import concurrent.futures
import threading

import pytest

from actors.weight_registry import BlockingRegistry, GroupRegistry, RegistryWorker
from neoproto.errors import KeyMissing, LeaseExpired
from neoproto.runtime import Dispatch
from neoproto.runtime.registration import method_table
from neoproto.weights.registry import Registry
from tests.neoproto.weights.manifests import manifest, version


class Call:
    """What of a `RemoteCall` is used."""

    def __init__(self, future):
        self.future = future

    def result(self):
        return self.future.result()

    def cancel(self):
        return self.future.cancel()

    def __await__(self):
        return asyncio.shield(asyncio.wrap_future(self.future)).__await__()


class Group:
    """A group of one registry worker on a loop of its own."""

    def __init__(self):
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever)
        self.thread.start()
        self.worker = RegistryWorker()
        self.calls, self.timeouts = [], []

    def submit(self, method, args=(), kwargs=None, timeout=None):
        call = Call(asyncio.run_coroutine_threadsafe(getattr(self.worker, method)(*args), self.loop))
        self.calls.append(call)
        self.timeouts.append(timeout)
        return call

    def close(self):
        asyncio.run_coroutine_threadsafe(self.cancel_all(), self.loop).result(10)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()
        self.loop.close()

    async def cancel_all(self):
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)


@pytest.fixture
def group():
    group = Group()
    yield group
    group.close()


def test_every_method_answers_for_rank_zero_and_overlaps():
    table = method_table(RegistryWorker)
    asked = {name for name in vars(Registry) if not name.startswith("_")}
    assert asked <= set(table)
    for name in asked:
        assert (table[name].is_async, table[name].dispatch_mode) == (True, Dispatch.RANK_ZERO), name


def test_the_adapters_reach_every_method(group):
    registry, blocking = GroupRegistry(group), BlockingRegistry(group)

    async def scenario():
        assert await registry.latest() is None
        await registry.publish(manifest(0))
        assert await registry.wait_newer(None, 5.0) == version(0)
        assert await registry.latest() == manifest(0)
        lease = await registry.acquire("r0", ttl=30)
        await registry.renew(lease.lease_id)
        assert await registry.validate(lease.lease_id)
        assert [one.holder for one in await registry.holders(version(0))] == ["r0"]
        await registry.report_serving("rollout/0", version(0))
        assert await registry.wait_serving(["rollout/0"], version(0), 5.0)
        assert await registry.serving() == {"rollout/0": version(0)}
        await registry.forget_replica("rollout/0")
        await registry.retire(version(0))
        assert not await registry.reclaim(version(0))
        assert [one.holder for one in await registry.wait_reclaimed(version(0), 0.01)] == ["r0"]
        assert await registry.release(lease.lease_id)
        assert await registry.reclaim(version(0))
        with pytest.raises(LeaseExpired):
            await registry.renew(lease.lease_id)
        with pytest.raises(KeyMissing):
            await registry.acquire("r0", ttl=1)
        assert (await registry.state()).versions == ()

    asyncio.run(scenario())
    blocking.publish(manifest(1))
    blocking.retire(version(1))
    assert blocking.wait_reclaimed(version(1), 1.0) == ()
    assert all(timeout >= 30 for timeout in group.timeouts)


def test_a_cancelled_wait_is_cancelled_in_the_registry_too(group):
    async def scenario():
        waiting = asyncio.create_task(GroupRegistry(group, timeout=10).wait_newer(None, 20))
        await asyncio.sleep(0.05)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting

    asyncio.run(scenario())
    with pytest.raises(concurrent.futures.CancelledError):
        group.calls[0].result()
    assert group.timeouts == [30]
