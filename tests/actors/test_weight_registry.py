"""The registry's worker and its proxy, over calls that end on another thread as a runtime's do."""

import asyncio
import concurrent.futures
import threading

import pytest
import torch

from actors.weight_registry import GroupRegistry, RegistryWorker
from neoproto.errors import LeaseExpired, WeightsNotReady
from neoproto.runtime import Dispatch
from neoproto.runtime.registration import method_table
from neoproto.store import MemoryStore
from neoproto.weights import Publisher, Puller, UpdateAgent, WeightOptions
from neoproto.weights.registry import WeightRegistry
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
        self.calls, self.timeouts, self.methods = [], [], []

    def submit(self, method, args=(), kwargs=None, timeout=None):
        self.timeouts.append(timeout)
        self.methods.append(method)
        work = getattr(self.worker, method)(*args, **(kwargs or {}))
        call = Call(asyncio.run_coroutine_threadsafe(work, self.loop))
        self.calls.append(call)
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
    asked = {name for name in vars(WeightRegistry) if not name.startswith("_")}
    assert len(asked) > 10
    assert asked <= set(table)
    for name in asked:
        assert (table[name].is_async, table[name].dispatch_mode) == (True, Dispatch.RANK_ZERO), name


def test_the_proxy_reaches_every_method(group):
    registry = GroupRegistry(group)

    async def scenario():
        assert await registry.latest() is None
        await registry.publish(manifest(0))
        assert await registry.wait_newer(None, 5.0, min_version_lag=7) == version(0)
        assert await registry.latest() == manifest(0)
        lease = await registry.acquire("r0", ttl=30)
        await registry.renew(lease.lease_id)
        assert await registry.validate(lease.lease_id)
        assert [one.holder for one in await registry.holders(version(0))] == ["r0"]
        await registry.report_serving("rollout/0", version(0))
        assert await registry.wait_serving(["rollout/0"], version=version(0), timeout=5.0)
        assert await registry.wanted() == version(0)
        assert await registry.serving() == {"rollout/0": version(0)}
        await registry.forget_replica("rollout/0")
        loaded = await registry.acquire("r1", version(0), ttl=30, min_version=version(0))
        assert await registry.loaded(loaded.lease_id, "rollout/1")
        assert await registry.serving() == {"rollout/1": version(0)}
        await registry.retire(version(0))
        assert not await registry.reclaim(version(0))
        assert [one.holder for one in await registry.wait_reclaimed(version(0), 0.01)] == ["r0"]
        assert await registry.release(lease.lease_id)
        assert await registry.reclaim(version(0))
        with pytest.raises(LeaseExpired):
            await registry.renew(lease.lease_id)
        with pytest.raises(WeightsNotReady):
            await registry.acquire("r0", ttl=1)
        assert (await registry.state()).versions == ()

    asyncio.run(scenario())
    registry.announce(manifest(1))
    assert registry.withdraw(version(1), 1.0) == ()
    assert set(group.methods) == {name for name in vars(WeightRegistry) if not name.startswith("_")}
    waits = {"wait_newer": {35.0}, "wait_serving": {35.0}, "wait_reclaimed": {30.01, 31.0}}
    for name in set(group.methods):
        given = {
            timeout for method, timeout in zip(group.methods, group.timeouts, strict=True) if method == name
        }
        assert given == waits.get(name, {30.0}), name


class Engine:
    """Loads whatever it is given."""

    async def check_layout(self, layout, what): ...

    async def pause(self, mode, drain_s): ...

    async def load(self, version, tensors):
        assert tensors["w"].tolist() == [version.n] * 2

    async def resume(self): ...


def test_a_load_costs_three_calls_to_the_registry(group):
    store, registry = MemoryStore(), GroupRegistry(group)
    publisher = Publisher(store, registry, WeightOptions(num_slots=2))

    async def scenario():
        puller = Puller(store, registry, "rollout-0")
        agent = UpdateAgent(registry, puller, Engine(), replica="rollout-0")
        await agent.load(version(0))
        assert group.methods == ["publish", "acquire", "validate", "loaded"]
        running = asyncio.create_task(agent.run())
        await asyncio.to_thread(publisher.publish, version(1), {"w": torch.full((2,), 1.0)})
        assert await registry.wait_serving(["rollout-0"], version(1), 10)
        running.cancel()
        await asyncio.wait([running])
        sent = [name for name in group.methods if not name.startswith("wait_")]
        assert sent == ["publish", "acquire", "validate", "loaded"] * 2

    publisher.publish(version(0), {"w": torch.zeros(2)})
    asyncio.run(scenario())


def test_a_cancelled_wait_is_cancelled_in_the_registry_too(group):
    async def scenario():
        waiting = asyncio.create_task(GroupRegistry(group, timeout=10).wait_newer(None, 20))
        await asyncio.sleep(0)
        assert group.methods == ["wait_newer"]
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting

    asyncio.run(scenario())
    with pytest.raises(concurrent.futures.CancelledError):
        group.calls[0].result()
    assert group.timeouts == [30]
