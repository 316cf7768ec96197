"""Replicas as one thing to call: what becomes of a call when some of them fail."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable

import pytest

from neoproto.data import DataProto
from neoproto.errors import (
    DeadlineExceeded,
    EngineFailed,
    GroupBroken,
    NeoProtoError,
    ReplicaFailed,
    RolloutError,
    RuntimeClosed,
    StoreError,
    TornRead,
    WorkerDied,
)
from neoproto.trainer.replicas import ReplicaSet, is_replicas_own
from tests.neoproto.trainer.processes import Cluster, handle
from tests.neoproto.trainer.replay import prompts, version


def uids(batch: DataProto) -> list[str]:
    return [str(uid) for uid in batch["uid"]]


def names(count: int) -> list[str]:
    return [f"p{number}" for number in range(count)]


async def generate(cluster: Cluster, count: int, timeout: float = 5.0) -> DataProto:
    batch: DataProto = await cluster.set.within(timeout).generate_sequences(prompts(count))
    return batch


@pytest.mark.parametrize(("replicas", "rows"), [(1, 5), (2, 5), (3, 7), (3, 2), (3, 1)])
def test_rows_are_spread_over_the_replicas_nearly_evenly_and_their_order_is_kept(
    replicas: int, rows: int
) -> None:
    cluster = Cluster(replicas, n=2)

    async def play() -> None:
        await cluster.bring_up()
        assert uids(await generate(cluster, rows)) == [uid for uid in names(rows) for _ in range(2)]
        shares = [one.uids for one in cluster.processes]
        assert list(itertools.chain(*shares)) == names(rows)
        sizes = [len(share) for share in shares]
        assert max(sizes) - min(sizes) <= 1

    cluster.run(play)


def test_nothing_to_generate_is_answered_with_nothing() -> None:
    cluster = Cluster(2)

    async def play() -> None:
        await cluster.bring_up()
        assert len(await cluster.set.within(5).generate_sequences(prompts(2).slice(0, 0))) == 0

    cluster.run(play)


def test_rows_of_a_replica_that_dies_are_generated_by_the_others_in_their_place() -> None:
    cluster = Cluster(3, n=2)

    async def play() -> None:
        await cluster.bring_up()
        cluster.processes[1].gates["generate_sequences"] = asyncio.Event()
        answering = asyncio.create_task(generate(cluster, 9))
        await cluster.until(lambda: "generate_sequences" in cluster.processes[1].methods_called)
        cluster.spawn_gate.clear()
        cluster.processes[1].die()
        assert uids(await answering) == [uid for uid in names(9) for _ in range(2)]
        assert sorted(cluster.processes[0].uids + cluster.processes[2].uids) == names(9)
        cluster.spawn_gate.set()

    cluster.run(play)


def test_rows_of_the_only_replica_wait_for_its_successor() -> None:
    cluster = Cluster(1)

    async def play() -> None:
        await cluster.bring_up(4)
        cluster.processes[0].gates["generate_sequences"] = asyncio.Event()
        answering = asyncio.create_task(generate(cluster, 3))
        await cluster.until(lambda: "generate_sequences" in cluster.processes[0].methods_called)
        cluster.processes[0].die()
        answers = await answering
        assert uids(answers) == names(3)
        assert set(answers["weight_versions"][:, 0].tolist()) == {4}
        assert cluster.processes[1].uids == names(3)

    cluster.run(play)


def test_without_a_replica_a_call_waits_until_its_deadline_and_says_who_is_missing_and_why() -> None:
    cluster = Cluster(2)
    cluster.spawn_gate.clear()

    async def play() -> None:
        await cluster.bring_up()
        for process in cluster.processes:
            process.die()
        started = asyncio.get_running_loop().time()
        with pytest.raises(DeadlineExceeded) as caught:
            await generate(cluster, 3, timeout=0.2)
        assert asyncio.get_running_loop().time() - started >= 0.2
        assert (caught.value.group, caught.value.method) == ("rollout", "generate_sequences")
        assert caught.value.ranks == (0, 1)
        assert isinstance(caught.value.__cause__, WorkerDied)
        with pytest.raises(DeadlineExceeded, match=r"rollout\.update_weights did not answer within 0\.1 s"):
            await cluster.set.within(0.1).update_weights(version(0))
        assert not await cluster.set.wait_serving(["rollout-0", "rollout-1"], version(0), 0.1)
        cluster.spawn_gate.set()

    cluster.run(play)


def test_a_deadline_that_passes_at_a_replica_is_reported_with_its_own_words() -> None:
    cluster = Cluster(1)

    async def play() -> None:
        await cluster.bring_up()
        cluster.processes[0].gates["generate_sequences"] = asyncio.Event()
        with pytest.raises(DeadlineExceeded, match=r"rollout-0\.generate_sequences did not answer"):
            await generate(cluster, 1, timeout=0.1)

    cluster.run(play)


def test_weights_are_loaded_by_those_that_are_up_whoever_dies_of_it() -> None:
    cluster = Cluster(3)

    async def play() -> None:
        await cluster.bring_up()
        cluster.processes[1].failures["update_weights"] = WorkerDied("rollout-1", 0, "here", "exit code 1")
        cluster.spawn_gate.clear()
        await cluster.set.within(5).update_weights(await cluster.publish(1))
        assert [one.up for one in cluster.set.replicas] == [True, False, True]
        assert {one.served for one in (cluster.processes[0], cluster.processes[2])} == {version(1)}
        cluster.spawn_gate.set()
        await cluster.until(lambda: cluster.set.replicas[1].up)
        assert cluster.processes[3].served == version(1)

    cluster.run(play)


def test_when_all_die_of_a_load_it_waits_for_a_successor() -> None:
    cluster = Cluster(2)

    async def play() -> None:
        await cluster.bring_up()
        for one in cluster.processes:
            one.failures["update_weights"] = EngineFailed("out of memory")
        await cluster.set.within(5).update_weights(await cluster.publish(1))
        up = [one for one in cluster.set.replicas if one.up]
        assert up
        assert {(await cluster.set.serving())[one.name] for one in up} == {version(1)}

    cluster.run(play)


def test_what_is_not_a_replicas_own_failure_ends_the_call() -> None:
    cluster = Cluster(2)

    async def play() -> None:
        await cluster.bring_up()
        cluster.processes[1].failures["generate_sequences"] = RolloutError("no token")
        with pytest.raises(RolloutError, match="no token"):
            await generate(cluster, 4)
        assert all(one.up for one in cluster.set.replicas)

    cluster.run(play)


def test_serving_is_known_of_replicas_that_are_up_by_the_names_of_their_places() -> None:
    cluster = Cluster(2)

    async def play() -> None:
        await cluster.bring_up()
        assert await cluster.set.serving() == {"rollout-0": version(0), "rollout-1": version(0)}
        # The registry may hear from a dead process as late as it likes.
        old = cluster.processes[0]
        old.die()
        await cluster.until(lambda: cluster.set.replicas[0].restarts == 1)
        await cluster.until(lambda: cluster.set.replicas[0].up)
        await cluster.registry.report_serving(old.name, version(9))
        assert await cluster.set.serving() == {"rollout-0": version(0), "rollout-1": version(0)}

    cluster.run(play)


def test_a_replica_that_is_down_is_neither_waited_for_nor_called() -> None:
    cluster = Cluster(2)
    cluster.spawn_gate.clear()

    async def play() -> None:
        await cluster.bring_up()
        cluster.processes[1].die()
        await cluster.until(lambda: not cluster.set.replicas[1].up)
        with pytest.raises(ReplicaFailed, match=r"rollout-1 failed: worker .* died: signal 9"):
            await cluster.set.replicas[1].generate(prompts(1), 1.0)
        await cluster.processes[0].serve(await cluster.publish(1))
        assert await cluster.set.wait_serving(["rollout-0", "rollout-1"], version(1), 1.0)
        await cluster.until(lambda: bool(cluster.spawned))
        await cluster.registry.report_serving("rollout-1", version(1))  # before it died, says the registry
        assert await cluster.set.serving() == {"rollout-0": version(1)}
        assert cluster.set.metrics() == {"training/replica_restarts": 1.0, "rollout/replicas_up": 1.0}
        cluster.spawn_gate.set()
        await cluster.until(lambda: cluster.set.replicas[1].up)
        assert cluster.processes[2].served == version(1)
        assert cluster.set.metrics() == {"training/replica_restarts": 1.0, "rollout/replicas_up": 2.0}

    cluster.run(play)


def test_a_late_failure_of_an_earlier_process_changes_nothing() -> None:
    cluster = Cluster(1)

    async def play() -> None:
        replica, old = cluster.set.replicas[0], cluster.processes[0]
        replica.renew(cluster.process("rollout-0-2"))
        replica.come_up()
        with pytest.raises(ReplicaFailed, match="too late"):
            raise replica.fail(EngineFailed("too late"), old)
        assert replica.up
        replica.fail(EngineFailed("in time"), replica.process)
        assert not replica.up

    asyncio.run(play_alone(cluster, play))


async def play_alone(cluster: Cluster, play: Callable[[], Awaitable[None]]) -> None:
    """Without a supervisor, once all are up."""
    supervising = asyncio.create_task(cluster.supervisor.run())
    await cluster.bring_up()
    supervising.cancel()
    await asyncio.wait([supervising])
    await play()


def test_at_the_start_all_replicas_are_waited_for() -> None:
    cluster = Cluster(2)
    cluster.processes[1].gates["attach_registry"] = asyncio.Event()

    async def play() -> None:
        loading = asyncio.create_task(cluster.bring_up())
        await cluster.until(lambda: cluster.set.replicas[0].up)
        await asyncio.sleep(4.0)
        assert not loading.done()
        cluster.processes[1].gates["attach_registry"].set()
        await loading
        assert all(one.up for one in cluster.set.replicas)

    cluster.run_on_virtual_time(play)


def test_a_cancelled_call_is_given_up_at_the_replicas() -> None:
    cluster = Cluster(1)

    async def play() -> None:
        await cluster.bring_up()
        cluster.processes[0].gates["generate_sequences"] = asyncio.Event()
        answering = asyncio.create_task(generate(cluster, 1))
        await cluster.until(lambda: "generate_sequences" in cluster.processes[0].methods_called)
        answering.cancel()
        await asyncio.wait([answering])
        await asyncio.sleep(0)
        assert answering.cancelled()
        assert "generate_sequences" not in cluster.processes[0].running.values()
        assert cluster.set.replicas[0].up

    cluster.run(play)


@pytest.mark.parametrize(
    ("error", "own"),
    [
        (WorkerDied("rollout-0", 0, "here", "exit code 1"), True),
        (WorkerDied("registry", 0, "here", "exit code 1"), False),
        (DeadlineExceeded("ping", "rollout-0", [0], 1.0), True),
        (DeadlineExceeded("latest", "registry", [0], 1.0), False),
        (EngineFailed("out of memory"), True),
        (RolloutError("no token"), False),
        (GroupBroken("overran"), True),
        (RuntimeClosed("closed"), True),
        (TornRead("gave up"), True),
        (StoreError("a process of the object store died"), False),
        (NeoProtoError("something"), False),
        (ValueError("something"), False),
    ],
)
def test_which_failures_are_a_replicas_own(error: Exception, own: bool) -> None:
    assert is_replicas_own(error, "rollout-0") is own


def test_replicas_have_different_names() -> None:
    cluster = Cluster(1)
    for processes in ([], [handle(cluster.process("a")) for _ in range(2)]):
        with pytest.raises(ValueError, match="groups with different names"):
            ReplicaSet("rollout", processes, cluster.registry)
