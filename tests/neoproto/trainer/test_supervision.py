"""How a failed replica is noticed, replaced and, in the end, given up."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from neoproto.errors import (
    ConfigError,
    DeadlineExceeded,
    EngineFailed,
    ReplicaLost,
    RuntimeClosed,
    TornRead,
    WeightMismatch,
    WorkerDied,
    WorkerInitError,
)
from tests.neoproto.trainer.processes import SIGKILL, Cluster
from tests.neoproto.trainer.replay import prompts, version

BEGIN = ["attach_registry", "update_weights"]


def called(cluster: Cluster, index: int) -> list[str]:
    return [method for method in cluster.processes[index].methods_called if method != "ping"]


async def one_restart(cluster: Cluster, index: int = 0) -> None:
    replica = cluster.set.replicas[index]
    before = replica.restarts  # it may be down for less time than between two looks
    await cluster.until(lambda: replica.restarts > before and replica.up)


def test_a_process_that_dies_idle_is_replaced_on_its_place_and_serves_before_it_is_up() -> None:
    cluster = Cluster(2, max_restarts=1)

    async def play() -> None:
        await cluster.bring_up()
        await cluster.publish(3)
        cluster.processes[1].die()
        await one_restart(cluster, 1)
        assert cluster.spawned == [1]
        assert cluster.processes[1].closed
        assert not cluster.processes[0].closed
        assert (cluster.processes[2].served, called(cluster, 2)) == (version(3), BEGIN)
        # The dead process is forgotten under the name that it alone had.
        assert set(await cluster.registry.serving()) == {"rollout-0", "rollout-1-2"}
        assert cluster.told[0] == (
            f"replica rollout-1 failed (worker rollout-1[0] on here died: {SIGKILL}); restarting it, 1 of 1"
        )
        assert cluster.told[1].startswith("replica rollout-1 is up again on weights 0.3, after ")

    cluster.run(play)


@pytest.mark.parametrize("cause", [TornRead("gave up after 5 torn reads"), EngineFailed("half loaded")])
def test_a_failed_agent_is_a_failed_replica(cause: Exception) -> None:
    cluster = Cluster(1, agents=True)
    cluster.processes[0].failures["run_agent"] = cause

    async def play() -> None:
        await cluster.publish(0)
        await cluster.until(lambda: cluster.set.replicas[0].restarts == 1)
        await cluster.until(lambda: cluster.set.replicas[0].up)
        assert called(cluster, 1) == [*BEGIN, "run_agent"]
        await cluster.publish(1)
        await cluster.until(lambda: cluster.processes[1].served == version(1))

    cluster.run(play)


@pytest.mark.parametrize(
    "cause", [WeightMismatch("other names"), WorkerDied("registry", 0, "here", "exit code 1")]
)
@pytest.mark.parametrize("method", ["run_agent", "update_weights", "ping"])
def test_what_no_other_process_would_do_better_ends_the_run(cause: Exception, method: str) -> None:
    cluster = Cluster(1, agents=True)
    cluster.processes[0].failures[method] = cause

    async def play() -> None:
        await cluster.publish(0)
        await asyncio.Event().wait()

    with pytest.raises(type(cause), match=str(cause)[:10]):
        cluster.run(play)
    assert cluster.spawned == []


def test_an_agent_that_ends_by_itself_is_a_failure_too() -> None:
    cluster = Cluster(1, agents=True)

    async def ends() -> None: ...

    cluster.processes[0].run_agent = ends  # type: ignore[method-assign]

    async def play() -> None:
        await cluster.publish(0)
        await cluster.until(lambda: cluster.set.replicas[0].restarts == 1)

    cluster.run(play)
    assert "its update agent ended" in cluster.told[0]


def test_a_process_that_answers_no_heartbeat_is_ended_and_replaced() -> None:
    cluster = Cluster(1)

    async def play() -> None:
        await cluster.bring_up()
        cluster.processes[0].gates["ping"] = asyncio.Event()
        clock = asyncio.get_running_loop().time
        started = clock()
        await one_restart(cluster)
        # Two heartbeats of half the time each are missed, after the interval to the first of them.
        assert 0.2 <= clock() - started <= 0.25
        assert cluster.processes[0].closed

    cluster.run_on_virtual_time(play)
    assert "no answer to a heartbeat for 0.2 s" in cluster.told[0]


def test_one_missed_heartbeat_is_not_enough() -> None:
    """The deadline of one passes while this process is held up, its answer waiting."""
    cluster = Cluster(1)

    async def play() -> None:
        await cluster.bring_up()
        for _ in range(3):
            cluster.processes[0].failures["ping"] = DeadlineExceeded("ping", "rollout-0", [0], 0.1)
            await cluster.until(lambda: "ping" not in cluster.processes[0].failures)
            await asyncio.sleep(10.0)
        assert cluster.set.replicas[0].up

    cluster.run_on_virtual_time(play)
    assert cluster.spawned == []


def test_failed_starts_count_and_the_history_names_every_cause() -> None:
    cluster = Cluster(2, max_restarts=3)
    cluster.spawn_failures = [
        WorkerInitError("__init__ of rollout-0[0] on here raised OSError: no memory\nand more"),
        DeadlineExceeded("start", "rollout-0", [0], 7.0),
        OSError("the host is gone"),
    ]

    async def play() -> None:
        await cluster.bring_up()
        cluster.processes[0].die()
        await asyncio.Event().wait()

    with pytest.raises(ReplicaLost) as caught:
        cluster.run(play)
    assert (caught.value.replica, caught.value.restarts) == ("rollout-0", 3)
    assert caught.value.causes == (
        f"worker rollout-0[0] on here died: {SIGKILL}",
        "__init__ of rollout-0[0] on here raised OSError: no memory",
        "rollout-0.start did not answer within 7.0 s; no answer from rank(s) 0",
        "the host is gone",
    )
    assert str(caught.value).startswith(
        "replica rollout-0 is lost after 3 restart(s): 1. worker rollout-0[0]"
    )
    assert "; 4. the host is gone" in str(caught.value)
    assert isinstance(caught.value.__cause__, OSError)
    assert cluster.spawned == [0, 0, 0]


@pytest.mark.parametrize("method", ["attach_registry", "update_weights"])
def test_a_death_while_it_is_being_replaced_counts_as_well(method: str) -> None:
    cluster = Cluster(1, max_restarts=2)
    spawn = cluster.spawn

    def spawning(index: int) -> Any:
        made = spawn(index)
        if len(cluster.spawned) == 1:
            made.group.failures[method] = WorkerDied(made.group.name, 0, "here", "exit code 1")
        return made

    cluster.spawn = spawning  # type: ignore[method-assign]

    async def play() -> None:
        await cluster.bring_up()
        cluster.processes[0].die()
        await cluster.until(lambda: len(cluster.processes) == 3 and cluster.set.replicas[0].up)
        assert cluster.set.replicas[0].restarts == 2
        assert cluster.processes[1].closed

    cluster.run(play)


def test_without_restarts_the_first_death_ends_the_run() -> None:
    cluster = Cluster(2, max_restarts=0)

    async def play() -> None:
        await cluster.bring_up()
        cluster.processes[1].die()
        await cluster.set.within(5).generate_sequences(prompts(4))
        await asyncio.Event().wait()

    with pytest.raises(ReplicaLost, match=r"rollout-1 is lost after 0 restart\(s\): 1\. worker .*SIGKILL"):
        cluster.run(play)
    assert cluster.spawned == []


def test_the_limit_is_of_each_replica() -> None:
    cluster = Cluster(2, max_restarts=1)

    async def play() -> None:
        await cluster.bring_up()
        for process in cluster.processes[:2]:
            process.die()
        await cluster.until(lambda: sum(one.restarts for one in cluster.set.replicas) == 2)
        await cluster.until(lambda: all(one.up for one in cluster.set.replicas))

    cluster.run(play)


@pytest.mark.parametrize("cause", [RuntimeClosed("closed"), ConfigError("wrong")])
def test_a_start_that_cannot_be_made_any_more_ends_the_run(cause: Exception) -> None:
    cluster = Cluster(1)
    cluster.spawn_failures = [cause]

    async def play() -> None:
        await cluster.bring_up()
        cluster.processes[0].die()
        await asyncio.Event().wait()

    with pytest.raises(type(cause)):
        cluster.run(play)


def test_a_start_has_a_deadline_and_what_it_made_afterwards_is_released() -> None:
    cluster = Cluster(1, max_restarts=20, start_limit=0.3)
    cluster.spawn_gate.clear()

    async def play() -> None:
        await cluster.bring_up()
        cluster.processes[0].die()
        await cluster.until(lambda: len(cluster.spawned) == 2)
        cluster.spawn_gate.set()
        await cluster.until(lambda: cluster.set.replicas[0].up)
        # All that were ever started: the one that died, and those that came too late.
        await cluster.until(lambda: len(cluster.processes) == 1 + len(cluster.spawned))
        await cluster.until(lambda: [one.closed for one in cluster.processes].count(False) == 1)
        (open_one,) = [one for one in cluster.processes if not one.closed]
        assert cluster.set.replicas[0].process.group is open_one

    cluster.run(play)
    assert "rollout-0.start did not answer within 0.3 s" in cluster.told[1]


def test_a_version_published_while_it_loads_is_served_before_it_is_up() -> None:
    cluster = Cluster(2)
    spawn = cluster.spawn

    def spawning(index: int) -> Any:
        made = spawn(index)
        made.group.gates["update_weights"] = asyncio.Event()
        return made

    cluster.spawn = spawning  # type: ignore[method-assign]

    async def play() -> None:
        await cluster.bring_up()
        cluster.processes[0].die()
        await cluster.until(
            lambda: len(cluster.processes) == 3 and "update_weights" in cluster.processes[2].methods_called
        )
        new = cluster.processes[2]
        loads = new.update_weights
        news = await cluster.publish(1)

        async def old_news(wanted: object) -> None:
            """What it read was the newest when it began."""
            new.update_weights = loads  # type: ignore[method-assign]
            await new.serve(version(0))

        new.update_weights = old_news  # type: ignore[method-assign]
        await cluster.set.within(5).update_weights(news)
        assert not cluster.set.replicas[0].up
        new.gates["update_weights"].set()
        await cluster.until(lambda: cluster.set.replicas[0].up)
        assert new.served == version(1)
        assert called(cluster, 2) == [*BEGIN, "update_weights"]

    cluster.run(play)


def test_a_death_before_there_are_any_weights_is_noticed_too() -> None:
    cluster = Cluster(1)

    async def play() -> None:
        await cluster.until(lambda: called(cluster, 0) == ["attach_registry"])
        cluster.processes[0].die()
        await cluster.until(lambda: len(cluster.processes) == 2)
        await cluster.bring_up()
        assert cluster.processes[1].served == version(0)

    cluster.run(play)


def test_leases_of_a_dead_process_end_before_its_place_is_taken() -> None:
    cluster = Cluster(1)
    cluster.spawn_gate.clear()

    async def play() -> None:
        await cluster.bring_up()
        await cluster.registry.acquire("rollout-0", version(0), ttl=30)
        await cluster.registry.acquire("somebody else", version(0), ttl=30)
        cluster.processes[0].die()
        await cluster.until(lambda: bool(cluster.spawned))
        (left,) = await cluster.registry.holders(version(0))
        assert left.holder == "somebody else"
        cluster.spawn_gate.set()

    cluster.run(play)


def test_the_end_of_training_ends_supervision_whatever_it_is_at() -> None:
    """An agent is given up, and a start that nobody waits for any more is released when it is done."""
    cluster = Cluster(2, agents=True)
    cluster.spawn_gate.clear()
    closed = threading.Event()

    async def play() -> None:
        await cluster.publish(0)
        assert await cluster.set.wait_serving(["rollout-0", "rollout-1"], version(0), 5)
        await cluster.until(lambda: "run_agent" in cluster.processes[0].methods_called)
        cluster.processes[1].die()
        await cluster.until(lambda: bool(cluster.spawned))

    async def run() -> None:
        before = asyncio.all_tasks()
        supervising = asyncio.create_task(cluster.supervisor.run())
        await play()
        supervising.cancel()
        await asyncio.wait([supervising])
        await asyncio.sleep(0)
        assert supervising.cancelled()
        assert asyncio.all_tasks() == before

    asyncio.run(run())
    made = cluster.process("late")
    made.close = lambda drain_s: closed.set()  # type: ignore[method-assign,assignment]
    cluster.process = lambda name: made  # type: ignore[method-assign]
    cluster.spawn_gate.set()
    assert closed.wait(5)
