import asyncio
import math
import time

import pytest

from neoproto.errors import KeyMissing, LeaseExpired
from neoproto.weights.registry import LocalRegistry, VersionState, WeightRegistry
from tests.neoproto.weights.manifests import Clock, manifest, version


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def registry(clock):
    registry = WeightRegistry(clock)
    registry.publish(manifest(0))
    return registry


def test_the_latest_is_the_newest_that_is_ready(registry):
    assert WeightRegistry().latest() is None
    registry.publish(manifest(1))
    assert registry.latest() == manifest(1)
    registry.retire(version(1))
    assert registry.latest() == manifest(0)
    registry.retire(version(0))
    assert registry.latest() is None


def test_versions_only_go_up_also_past_reclaimed_ones(registry):
    registry.retire(version(0))
    assert registry.reclaim(version(0))
    with pytest.raises(ValueError, match=r"weights 0\.0 cannot be published after 0\.0"):
        registry.publish(manifest(0))
    registry.publish(manifest(0, epoch=1))
    with pytest.raises(ValueError, match=r"0\.7 cannot be published after 1\.0"):
        registry.publish(manifest(7))


def test_a_lease_names_its_version_and_lives_as_long_as_it_is_renewed(registry, clock):
    lease = registry.acquire("r0", ttl=10)
    assert (lease.version, lease.holder, lease.ttl, lease.manifest) == (version(0), "r0", 10, manifest(0))
    for _ in range(3):
        clock.now += 9.9
        assert registry.validate(lease.lease_id)
        registry.renew(lease.lease_id)
    clock.now += 10
    assert not registry.validate(lease.lease_id)
    assert registry.state().lapsed == 1


def test_a_lease_that_lapsed_is_not_renewed_nor_does_it_count_as_released(registry, clock):
    lease, other = registry.acquire("r0", ttl=10), registry.acquire("r1", ttl=10)
    clock.now += 10
    with pytest.raises(LeaseExpired, match=lease.lease_id):
        registry.renew(lease.lease_id)
    assert not registry.release(lease.lease_id)
    again = registry.acquire("r0", ttl=10)
    assert again.lease_id not in (lease.lease_id, other.lease_id)
    assert registry.release(again.lease_id)
    assert not registry.release(again.lease_id)
    assert not registry.validate(again.lease_id)


def test_leases_of_a_lost_registry_mean_nothing_to_its_successor(registry):
    successor = WeightRegistry()
    successor.publish(manifest(0))
    successor.acquire("r0", ttl=10)
    assert not successor.validate(registry.acquire("r0", ttl=10).lease_id)


def test_what_is_not_ready_cannot_be_acquired_and_the_message_says_what_is(registry):
    registry.publish(manifest(1))
    assert registry.acquire("r0", version(0), ttl=1).version == version(0)
    registry.retire(version(0))
    for wanted in (version(0), version(2)):
        with pytest.raises(KeyMissing, match=rf"weights {wanted} can be acquired by r0; ready: 0\.1"):
            registry.acquire("r0", wanted, ttl=1)
    with pytest.raises(KeyMissing, match="no weights can be acquired by r1; ready: none"):
        WeightRegistry().acquire("r1", ttl=1)


@pytest.mark.parametrize("ttl", [0, -1, math.inf, math.nan])
def test_a_lease_needs_an_end(registry, ttl):
    with pytest.raises(ValueError, match="positive number of seconds"):
        registry.acquire("r0", ttl=ttl)


def test_reclaiming_waits_for_every_lease_to_end(registry, clock):
    released, lapsing = registry.acquire("r0", ttl=10), registry.acquire("r1", ttl=20)
    with pytest.raises(ValueError, match=r"0\.0 are not retired"):
        registry.reclaim(version(0))
    registry.retire(version(0))
    registry.retire(version(0))
    assert not registry.reclaim(version(0))
    registry.renew(released.lease_id)
    registry.release(released.lease_id)
    assert not registry.reclaim(version(0))
    (holder,) = registry.holders(version(0))
    assert (holder.holder, holder.lease_id, holder.seconds_left) == ("r1", lapsing.lease_id, 20)
    assert str(holder) == "r1 on 0.0 (20.0 s left)"
    clock.now += 20
    assert registry.reclaim(version(0))
    for gone in (registry.reclaim, registry.retire):
        with pytest.raises(KeyMissing, match=r"weights 0\.0 are not in the registry; there are: none"):
            gone(version(0))


def test_its_state_can_be_read(registry, clock):
    lease = registry.acquire("r0", ttl=10)
    registry.publish(manifest(1))
    registry.retire(version(0))
    registry.report_serving("rollout/0", version(0))
    registry.report_serving("rollout/1", version(0))
    registry.report_serving("rollout/1", version(1))
    registry.forget_replica("rollout/0")
    registry.forget_replica("rollout/7")
    clock.now += 4
    state = registry.state()
    assert state.newest == version(1)
    old, new = state.versions
    assert (old.version, old.state, old.nbytes) == (version(0), VersionState.RETIRED, 8)
    assert (new.version, new.state, new.leases) == (version(1), VersionState.READY, ())
    assert [(one.lease_id, one.seconds_left) for one in old.leases] == [(lease.lease_id, 6)]
    assert state.serving == registry.serving() == {"rollout/1": version(1)}


def test_waiting_for_a_newer_version_ends_with_it_or_with_time():
    async def scenario():
        registry = LocalRegistry()
        assert await registry.wait_newer(None, 0.01) is None
        waiting = asyncio.create_task(registry.wait_newer(None, 10))
        await asyncio.sleep(0)
        await registry.publish(manifest(3))
        assert await waiting == version(3)
        assert await registry.wait_newer(version(2), 0) == version(3)
        assert await registry.wait_newer(version(3), 0.01) is None
        await registry.retire(version(3))
        assert await registry.wait_newer(None, 0.01) is None

    asyncio.run(scenario())


def test_waiting_for_replicas_ends_when_the_last_one_serves():
    async def scenario():
        registry = LocalRegistry()
        assert await registry.wait_serving([], version(5), 0)
        waiting = asyncio.create_task(registry.wait_serving(["a", "b"], version(5), 10))
        for name, n in (("a", 6), ("b", 4), ("c", 5)):
            await registry.report_serving(name, version(n))
        assert not await registry.wait_serving(["a", "b"], version(5), 0.01)
        assert not waiting.done()
        await registry.report_serving("b", version(5))
        assert await waiting
        assert await registry.serving() == {"a": version(6), "b": version(5), "c": version(5)}
        assert await registry.wanted() == version(5)  # replicas load it below their lag
        await registry.wait_serving(["a"], version(3), 0)
        assert await registry.wanted() == version(5)

    asyncio.run(scenario())


def test_waiting_to_reclaim_ends_at_a_release_or_a_lapse_and_else_names_the_holders():
    async def scenario():
        registry = LocalRegistry()
        await registry.publish(manifest(0))
        released = await registry.acquire("r0", ttl=30)
        await registry.acquire("r1", ttl=0.2)
        await registry.retire(version(0))
        left = await registry.wait_reclaimed(version(0), 0.01)
        assert [one.holder for one in left] == ["r0", "r1"]
        start = time.monotonic()
        waiting = asyncio.create_task(registry.wait_reclaimed(version(0), 20))
        await asyncio.sleep(0.01)
        assert await registry.release(released.lease_id)
        assert await waiting == ()
        assert 0.1 < time.monotonic() - start < 5
        assert (await registry.state()).versions == ()

    asyncio.run(scenario())


def test_a_forgotten_replica_holds_nothing_up():
    async def scenario():
        registry = LocalRegistry()
        await registry.publish(manifest(0))
        gone = await registry.acquire("r0", ttl=30)
        other = await registry.acquire("r1", ttl=30)
        await registry.retire(version(0))
        waiting = asyncio.create_task(registry.wait_reclaimed(version(0), 20))
        await registry.release(other.lease_id)
        await asyncio.sleep(0.01)
        assert not waiting.done()
        start = time.monotonic()
        await registry.forget_replica("r0")
        assert await waiting == ()
        assert time.monotonic() - start < 5
        # Were it there after all, it would be refused.
        assert not await registry.validate(gone.lease_id)
        with pytest.raises(LeaseExpired):
            await registry.renew(gone.lease_id)

    asyncio.run(scenario())


def test_waiting_costs_no_turns_of_the_loop_and_can_be_cancelled():
    class Counting(asyncio.SelectorEventLoop):
        turns = 0

        def _run_once(self):
            self.turns += 1
            super()._run_once()

    async def scenario():
        loop, registry = asyncio.get_running_loop(), LocalRegistry()
        await registry.publish(manifest(0))
        await registry.acquire("r0", ttl=0.05)
        await registry.retire(version(0))
        before = loop.turns
        assert await registry.wait_newer(None, 0.3) is None
        assert loop.turns - before < 10
        await registry.publish(manifest(1))
        await registry.acquire("r1", ttl=30)
        await registry.retire(version(1))
        waiting = asyncio.create_task(registry.wait_reclaimed(version(1), 30))
        await asyncio.sleep(0.01)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting

    with asyncio.Runner(loop_factory=Counting) as runner:
        runner.run(scenario())
