import asyncio
import math

import pytest

from neoproto.errors import KeyMissing, LeaseExpired, WeightsNotReady
from neoproto.weights.registry import VersionState, WeightRegistry
from tests.neoproto.weights.manifests import AtOnce, Clock, manifest, version
from tests.virtual_time import run


def now():
    return asyncio.get_running_loop().time()


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def registry(clock):
    registry = AtOnce(WeightRegistry(clock))
    registry.publish(manifest(0))
    return registry


def test_the_latest_is_the_newest_that_is_ready(registry):
    assert AtOnce(WeightRegistry()).latest() is None
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
    assert not registry.release(other.lease_id)
    with pytest.raises(LeaseExpired, match=lease.lease_id):
        registry.renew(lease.lease_id)
    assert not registry.release(lease.lease_id)
    again = registry.acquire("r0", ttl=10)
    assert again.lease_id not in (lease.lease_id, other.lease_id)
    assert registry.release(again.lease_id)
    assert not registry.release(again.lease_id)
    assert not registry.validate(again.lease_id)


def test_leases_of_a_lost_registry_mean_nothing_to_its_successor(registry):
    successor = AtOnce(WeightRegistry(Clock()))
    successor.publish(manifest(0))
    successor.acquire("r0", ttl=10)
    assert not successor.validate(registry.acquire("r0", ttl=10).lease_id)


def test_what_is_not_ready_cannot_be_acquired_and_the_message_says_what_is(registry):
    registry.publish(manifest(1))
    assert registry.acquire("r0", version(0), ttl=1).version == version(0)
    registry.retire(version(0))
    for wanted in (version(0), version(2)):
        with pytest.raises(WeightsNotReady, match=rf"r0 cannot have weights {wanted}; ready: 0\.1"):
            registry.acquire("r0", wanted, ttl=1)
    assert registry.acquire("r0", ttl=1, min_version=version(1)).version == version(1)
    with pytest.raises(WeightsNotReady, match=r"r0 cannot have weights 0\.2 or newer; ready: 0\.1"):
        registry.acquire("r0", ttl=1, min_version=version(2))
    with pytest.raises(WeightsNotReady, match="r1 cannot have any weights; ready: none"):
        AtOnce(WeightRegistry()).acquire("r1", ttl=1)
    assert len(registry.holders(version(1))) == 1, "a refusal leaves no lease"


@pytest.mark.parametrize("ttl", [0, -1, math.inf, math.nan])
def test_a_lease_needs_an_end(registry, ttl):
    with pytest.raises(ValueError, match="positive number of seconds"):
        registry.acquire("r0", ttl=ttl)


def test_a_loaded_version_is_served_and_its_lease_has_ended(registry, clock):
    lease, other = registry.acquire("r0", ttl=10), registry.acquire("r1", ttl=10)
    clock.now += 9.9
    assert registry.loaded(lease.lease_id, "r0")
    assert registry.serving() == {"r0": version(0)}
    assert [one.holder for one in registry.holders(version(0))] == ["r1"]
    assert not registry.release(lease.lease_id)
    with pytest.raises(LeaseExpired):
        registry.renew(lease.lease_id)
    # What was loaded under a lease that has ended is torn: it is not served, whatever was before.
    registry.publish(manifest(1))
    late = registry.acquire("r0", ttl=10)
    clock.now += 10
    for ended in (lease, other, late):
        assert not registry.loaded(ended.lease_id, "r0")
    registry.forget_replica("r1")
    gone = registry.acquire("r1", ttl=10)
    registry.forget_replica("r1")
    assert not registry.loaded(gone.lease_id, "r1")
    assert registry.serving() == {"r0": version(0)}
    assert registry.state().lapsed == 2


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
        registry = WeightRegistry()
        assert await registry.wait_newer(None, 5) is None
        assert now() == 5
        waiting = asyncio.create_task(registry.wait_newer(None, 10))
        await asyncio.sleep(9)
        assert not waiting.done()
        await registry.publish(manifest(3))
        assert await waiting == version(3)
        assert now() == 14
        assert await registry.wait_newer(version(2), 0) == version(3)
        assert await registry.wait_newer(version(3), 1) is None
        await registry.retire(version(3))
        assert await registry.wait_newer(None, 1) is None

    run(scenario)


def test_waiting_with_a_lag_ends_once_it_is_reached_or_somebody_waits_for_the_version():
    async def scenario():
        registry = WeightRegistry()
        waiting = asyncio.create_task(registry.wait_newer(version(0), 1000, min_version_lag=3))
        first = asyncio.create_task(registry.wait_newer(None, 1000, min_version_lag=3))
        for n in range(3):
            await registry.publish(manifest(n))
            await asyncio.sleep(60)
            assert not waiting.done()
        assert await first == version(0)
        await registry.publish(manifest(3))
        assert await waiting == version(3)

        # As validation does: what is wanted is due below the lag, at once.
        waiting = asyncio.create_task(registry.wait_newer(version(3), 1000, min_version_lag=3))
        await registry.publish(manifest(4))
        await asyncio.sleep(60)
        assert not waiting.done()
        before = now()
        assert not await registry.wait_serving(["r0"], version(4), 0)
        assert await waiting == version(4)
        assert now() == before
        assert await registry.wait_newer(version(4), 60, min_version_lag=3) is None

    run(scenario)


def test_waiting_for_replicas_ends_when_the_last_one_serves():
    async def scenario():
        registry = WeightRegistry()
        assert await registry.wait_serving([], version(5), 0)
        waiting = asyncio.create_task(registry.wait_serving(["a", "b"], version(5), 1000))
        for name, n in (("a", 6), ("b", 4), ("c", 5)):
            await registry.report_serving(name, version(n))
        assert not await registry.wait_serving(["a", "b"], version(5), 60)
        assert not waiting.done()
        await registry.publish(manifest(5))
        lease = await registry.acquire("b", ttl=30)
        before = now()
        assert await registry.loaded(lease.lease_id, "b")
        assert await waiting
        assert now() == before
        assert await registry.serving() == {"a": version(6), "b": version(5), "c": version(5)}
        assert await registry.wanted() == version(5)  # replicas load it below their lag
        await registry.wait_serving(["a"], version(3), 0)
        assert await registry.wanted() == version(5)

    run(scenario)


@pytest.mark.parametrize("ends", ["release", "loaded"])
def test_waiting_to_reclaim_ends_when_the_last_lease_does_and_else_names_the_holders(ends):
    async def scenario():
        registry = WeightRegistry()
        await registry.publish(manifest(0))
        held = await registry.acquire("r0", ttl=300)
        await registry.acquire("r1", ttl=20)
        await registry.retire(version(0))
        left = await registry.wait_reclaimed(version(0), 1)
        assert [one.holder for one in left] == ["r0", "r1"]
        waiting = asyncio.create_task(registry.wait_reclaimed(version(0), 200))
        await asyncio.sleep(49)
        assert not waiting.done(), "r1 let its lease lapse, r0 has one"
        arguments = (held.lease_id, "r0") if ends == "loaded" else (held.lease_id,)
        assert await getattr(registry, ends)(*arguments)
        assert await waiting == ()
        assert now() == 50
        # And the other way round: at the lapse of the last one.
        await registry.publish(manifest(1))
        for name, ttl in (("r0", 20), ("r1", 30)):
            await registry.acquire(name, ttl=ttl)
        await registry.retire(version(1))
        assert await registry.wait_reclaimed(version(1), 200) == ()
        assert now() == 80
        assert (await registry.state()).versions == ()

    run(scenario)


def test_a_forgotten_replica_holds_nothing_up():
    async def scenario():
        registry = WeightRegistry()
        await registry.publish(manifest(0))
        gone = await registry.acquire("r0", ttl=30)
        other = await registry.acquire("r1", ttl=30)
        await registry.retire(version(0))
        waiting = asyncio.create_task(registry.wait_reclaimed(version(0), 20))
        await registry.release(other.lease_id)
        await asyncio.sleep(1)
        assert not waiting.done()
        await registry.forget_replica("r0")
        assert await waiting == ()
        assert now() == 1
        # Were it there after all, it would be refused.
        assert not await registry.validate(gone.lease_id)
        assert not await registry.loaded(gone.lease_id, "r0")
        with pytest.raises(LeaseExpired):
            await registry.renew(gone.lease_id)

    run(scenario)


def test_waiting_costs_no_turns_of_the_loop_and_can_be_cancelled():
    async def scenario():
        loop, registry = asyncio.get_running_loop(), WeightRegistry()
        turns = 0
        once = loop._run_once

        def counted():
            nonlocal turns
            turns += 1
            once()

        loop._run_once = counted
        await registry.publish(manifest(0))
        await registry.acquire("r0", ttl=0.05)
        await registry.retire(version(0))
        assert await registry.wait_newer(None, 300) is None
        assert turns < 10
        await registry.publish(manifest(1))
        await registry.acquire("r1", ttl=30)
        await registry.retire(version(1))
        waiting = asyncio.create_task(registry.wait_reclaimed(version(1), 30))
        await asyncio.sleep(1)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting

    run(scenario)
