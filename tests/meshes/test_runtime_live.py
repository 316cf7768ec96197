"""The control plane on real Monarch processes."""

from __future__ import annotations

import asyncio
import json
import math
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from meshes.common.guardian import marked_processes
from neoproto.data import DataProto
from neoproto.errors import (
    CallCancelled,
    DeadlineExceeded,
    GroupBroken,
    RemoteError,
    RuntimeClosed,
    StoreError,
    WorkerDied,
    WorkerInitError,
)
from neoproto.runtime import ClassWithInitArgs, RemoteCall, Runtime, current_runtime, put
from tests.meshes.leftovers import wait_until_clean
from tests.meshes.workers import Modes, Probe

pytestmark = pytest.mark.live


@pytest.fixture
def runtime(tmp_path: Path) -> Iterator[Runtime]:
    with Runtime.from_config(
        {"runtime": {"run_dir": str(tmp_path), "env_vars": {"COLOUR": "blue"}}}
    ) as runtime:
        yield runtime
    assert wait_until_clean(runtime.run_id, None, 2.0) == []


@pytest.mark.core
def test_a_group_calls_its_ranks_in_every_way(runtime: Runtime, tmp_path: Path) -> None:
    group = runtime.create_worker_group(
        ClassWithInitArgs(Probe, 10, env={"SHAPE": "round", "COLOUR": "red"}),
        on=runtime.create_resource_pool(1, 2),
        name="probe",
    )
    assert group.submit("add", args=(1,), timeout=30).result() == [11, 11]
    assert group.add(2) == [13, 13]
    assert group.submit("echo", args=("x",), timeout=30, blocking=True) == ["x", "x"]
    assert group.lead() == 0
    assert group.own([5, 6]) == [(0, 5), (1, 6)]
    assert group.rank(1).submit("whoami").result()[0]["rank"] == 1
    assert group.execute_rank_zero_sync("add", 1) == 14
    assert group.rank(1).add(1) == [14], "a view has its own place in the order"
    assert group.add(1) == [15, 15]
    assert [one["local_rank"] for one in group.whoami()] == [0, 1]
    assert group.environment("COLOUR") == ["red", "red"]
    assert group.environment("SHAPE") == ["round", "round"]
    assert group.submit("left", timeout=30).result()[0] < 30
    assert group.left() == [math.inf, math.inf]
    assert group.all_reduce() == [3.0, 3.0]
    group.write("words")
    log = (tmp_path / "logs" / "probe" / "rank1.log").read_text()
    assert [word in log for word in ("native words", "error words", "python words")] == [True] * 3
    with pytest.raises(AttributeError, match="no public method 'nothing'"):
        group.submit("nothing")
    with pytest.raises(ValueError, match="one entry per rank"):
        group.own([1, 2, 3])


def test_the_run_folder_says_which_processes_there_are(runtime: Runtime, tmp_path: Path) -> None:
    group = runtime.create_worker_group(
        ClassWithInitArgs(Probe), on=runtime.create_resource_pool(1, 2), name="probe"
    )

    def listed() -> dict[tuple[str, int], int]:
        rows = json.loads((tmp_path / "processes.json").read_text())
        return {(row["group"], row["rank"]): row["pid"] for row in rows}

    found = listed()
    workers = {("probe", one["rank"]): one["pid"] for one in group.whoami()}
    store = {("store-volume", 0), ("store-index", 0)}
    assert found.keys() == {("controller", 0), *store, *workers}
    assert found["controller", 0] == os.getpid()
    assert {name: found[name] for name in workers} == workers
    assert {found[name] for name in store} < set(marked_processes(runtime.run_id))
    os.kill(workers["probe", 1], signal.SIGKILL)
    with pytest.raises(WorkerDied):
        group.add(1)
    until = time.monotonic() + 5.0
    while ("probe", 1) in listed() and time.monotonic() < until:
        time.sleep(0.05)
    assert listed().keys() == {("controller", 0), *store, ("probe", 0)}
    group.close()
    assert listed().keys() == {("controller", 0), *store}
    runtime.close()
    assert listed() == {}


def test_every_way_of_dispatch_on_processes(runtime: Runtime) -> None:
    group = runtime.create_worker_group(
        ClassWithInitArgs(Modes), on=runtime.create_resource_pool(1, 3), name="modes"
    )
    whole = DataProto.from_dict({"x": torch.arange(7)})
    assert group.one_to_all([1, 2, 3], key="k") == [(rank, [1, 2, 3], "k") for rank in range(3)]
    assert group.executed_on_rank_zero() == 0
    assert group.all_to_all([5, 6, 7]) == [(0, 5), (1, 6), (2, 7)]
    call = group.dp_compute([5, 6, 7], key=["a", "b", "c"])
    assert call.result() == [(0, 5, "a"), (1, 6, "b"), (2, 7, "c")]
    tripled = group.submit("proto", (whole, 3), timeout=60)  # not blocking, and trimmed
    assert tripled.result()["y"].tolist() == [3 * value for value in range(7)]
    assert group.proto(batch=whole, by=2)["y"].tolist() == [2 * value for value in range(7)]
    assert len(whole) == 7, "the caller's batch is left alone"
    with pytest.raises(ValueError, match="7 rows do not divide over 3"):
        group.proto_unpadded(whole)
    assert group.with_func(lambda batch: batch.select(["x"]), whole)["x"].tolist() == list(range(7))
    assert group.metric(whole) == [3, 3, 3]
    assert group.rank_zero(key="k") == (0, "k")
    assert group.by_mesh(batch=whole) == [(0, 0), (0, 1), (0, 2), (0, 3), (2, 4), (2, 5), (2, 6)]
    with pytest.raises(ValueError, match=r"rank\(s\) \[0, 1, 2\] did not register_mesh\('nowhere'"):
        group.by_no_mesh(whole)
    assert group.custom("w") == "0:w0+1:w1+2:w2"
    assert group.slice(start=1, size=2).custom("w") == "1:w0+2:w1"
    assert group.execute_all_sync("rank_zero", key="k") == [(0, "k"), (1, "k"), (2, "k")]
    assert group.execute_rank_zero_async("all_to_all", 9).result() == (0, 9)


def test_closing_does_not_wait_for_a_group_that_starts(runtime: Runtime, tmp_path: Path) -> None:
    pool = runtime.create_resource_pool(1, 2)
    os.mkfifo(tmp_path / "nobody-reads")
    stuck = {"NEOPROTO_LOG_FILE": str(tmp_path / "nobody-reads")}  # its processes open it, and wait
    ends: list[BaseException] = []

    def create() -> None:
        try:
            runtime.create_worker_group(ClassWithInitArgs(Probe, env=stuck), on=pool, name="stuck")
        except RuntimeClosed as error:
            ends.append(error)

    thread = threading.Thread(target=create)
    thread.start()
    time.sleep(2.0)
    started = time.monotonic()
    runtime.close()
    thread.join(1.0)
    assert [str(end) for end in ends] == ["the runtime has been closed"]
    assert time.monotonic() - started < 15
    with pytest.raises(RuntimeClosed):
        runtime.create_worker_group(ClassWithInitArgs(Probe), on=pool)


def test_a_process_beside_the_controller(runtime: Runtime) -> None:
    pool = runtime.create_resource_pool(on="controller")
    runner = runtime.create_worker_group(ClassWithInitArgs(Probe, 1), on=pool, name="runner")
    assert runner.execute_rank_zero_sync("add", 1) == 2
    assert runner.environment("COLOUR") == ["blue"]


def test_calls_work_on_a_running_loop(runtime: Runtime) -> None:
    group = runtime.create_worker_group(
        ClassWithInitArgs(Probe), on=runtime.create_resource_pool(1, 2), name="probe"
    )

    async def body() -> None:
        assert await group.submit("add", (1,), timeout=30) == [1, 1]
        assert group.submit("add", (1,), timeout=30).result() == [2, 2], "blocking on a loop still works"
        calls = [group.submit("echo", (number,), timeout=30) for number in range(20)]
        assert await RemoteCall.gather(calls) == [[number] * 2 for number in range(20)]
        slow, quick = group.submit("doze", (30.0,)), group.submit("doze", (0.01,))
        completed, pending = await RemoteCall.wait([slow, quick], count=1)
        assert completed == [quick]
        assert pending == [slow]
        assert slow.cancel()
        with pytest.raises(CallCancelled):
            await slow
        assert not slow.cancel()
        assert await group.submit("cancellations") == [1, 1], "on the workers too"

    asyncio.run(body())


@pytest.mark.core
def test_a_topology_becomes_processes_and_closing_drains(tmp_path: Path) -> None:
    topology = {
        "clusters": [
            {"name": "a", "nnodes": 2, "n_gpus_per_node": 2, "device_type": "cpu"},
            {"name": "b", "nnodes": 1, "n_gpus_per_node": 2, "device_type": "cpu"},
        ],
        "device_pools": [
            {"name": "train", "cluster": "a", "nnodes": 2, "n_gpus_per_node": 2},
            {"name": "serve", "cluster": "b", "nnodes": 1, "n_gpus_per_node": 2},
        ],
        "models": [
            {"name": "actor", "worker": "actor", "config_key": "k", "resource_pool": "train"},
            {
                "name": "rollout",
                "worker": "rollout",
                "config_key": "k",
                "resource_pool": "serve",
                "device_range": [1, 2],
            },
        ],
    }
    config = {"runtime": {"run_dir": str(tmp_path)}, "topology": topology}
    with Runtime.from_config(config) as runtime:
        assert runtime.placement_table().row_count == 2
        actor, rollout = (
            runtime.create_worker_group(
                ClassWithInitArgs(Probe), on=runtime.model_resource_pool(name), name=name
            )
            for name in ("actor", "rollout")
        )
        places = [(one["node_rank"], one["local_rank"], one["rank"]) for one in actor.whoami()]
        assert places == [(0, 0, 0), (0, 1, 1), (1, 0, 2), (1, 1, 3)]
        assert rollout.whoami()[0]["world_size"] == 1
        view = actor.slice(start=2, size=2)
        assert [one["rank"] for one in view.whoami()] == [2, 3]
        assert view.rank(1).add(1) == [1]
        with pytest.raises(ValueError, match="neither"):
            actor.slice(start=1, size=2)
        with pytest.raises(ValueError, match="no model 'critic'"):
            runtime.model_resource_pool("critic")
        results: list[object] = []
        thread = threading.Thread(target=lambda: results.append(actor.add(1)))  # without Monarch's context
        thread.start()
        thread.join(30)
        assert results == [[1, 1, 1, 2]]
        calls = [rollout.submit("sleep", (1.0,)), rollout.submit("doze", (1.0,)), rollout.submit("add", (5,))]
        rollout.close()
        assert [call.result() for call in calls] == [[1.0], [1.0], [5]], "what was admitted has ended"
        with pytest.raises(RuntimeClosed):
            rollout.add(1)
    assert wait_until_clean(runtime.run_id, None, 2.0) == []


@pytest.mark.core
def test_an_exception_arrives_as_itself(runtime: Runtime) -> None:
    group = runtime.create_worker_group(
        ClassWithInitArgs(Probe), on=runtime.create_resource_pool(1, 2), name="probe"
    )
    with pytest.raises(KeyError, match="lost") as caught:
        group.fail("lost")
    notes = "\n".join(caught.value.__notes__)
    assert "tests/meshes/workers.py" in notes, "the remote traceback names real files"
    assert "in fail" in notes
    with pytest.raises(RemoteError, match=r"OddError: ab") as odd:
        group.fail_oddly()
    assert "in fail_oddly" in odd.value.traceback
    assert group.add(1) == [1, 1], "the group goes on"


@pytest.mark.core
def test_a_deadline_breaks_the_group_of_a_sync_method(runtime: Runtime) -> None:
    group = runtime.create_worker_group(
        ClassWithInitArgs(Probe), on=runtime.create_resource_pool(1, 2), name="probe"
    )
    with pytest.raises(DeadlineExceeded) as dozed:
        group.submit("doze", (30.0,), timeout=0.3, blocking=True)
    assert dozed.value.ranks == (0, 1)
    assert group.add(1) == [1, 1], "an async method past its deadline breaks nothing"
    call = group.submit("sleep", (30.0,), timeout=0.5)
    time.sleep(0.4)
    started = time.monotonic()
    with pytest.raises(DeadlineExceeded) as caught:
        call.result()
    assert time.monotonic() - started < 10, "a late result() does not restart the deadline"
    assert (caught.value.method, caught.value.group, caught.value.ranks) == ("sleep", "probe", (0, 1))
    assert "in sleep" in caught.value.stacks[1]
    with pytest.raises(GroupBroken, match="sleep overran"):
        group.submit("add", (1,))
    started = time.monotonic()
    group.close()
    assert time.monotonic() - started < 20, "a broken group is killed, not drained"
    with pytest.raises(RuntimeClosed):
        group.submit("add", (1,))


def test_a_rank_that_holds_the_interpreter_shows_its_stack(runtime: Runtime) -> None:
    group = runtime.create_worker_group(
        ClassWithInitArgs(Probe), on=runtime.create_resource_pool(1, 2), name="probe"
    )
    call = group.rank(1).submit("hold_the_interpreter", (25,), timeout=0.5)
    with pytest.raises(DeadlineExceeded) as caught:
        call.result()
    assert caught.value.ranks == (1,)
    assert "in hold_the_interpreter" in caught.value.stacks[1]
    assert "tests/meshes/workers.py" in caught.value.stacks[1]


@pytest.mark.core
def test_the_death_of_a_store_process_fails_calls_with_its_cause(runtime: Runtime, tmp_path: Path) -> None:
    group = runtime.create_worker_group(
        ClassWithInitArgs(Probe), on=runtime.create_resource_pool(1, 1), name="probe"
    )
    assert group.through_the_store(1) == [1]
    failure = runtime.watch_failures([])
    (volume,) = [
        pid
        for pid in marked_processes(runtime.run_id)
        if f"{tmp_path}/logs/store/volume0.log".encode() in Path(f"/proc/{pid}/environ").read_bytes()
    ]
    os.kill(volume, signal.SIGKILL)
    started = time.monotonic()
    reason = r"a process of the object store died: signal 9 \(SIGKILL\)"
    for attempt in (lambda: put(2), lambda: group.through_the_store(2), lambda: put(3)):
        with pytest.raises(StoreError, match=reason):
            attempt()
    with pytest.raises(StoreError, match=reason):
        failure.result(timeout=0)
    assert time.monotonic() - started < 8
    assert group.add(1) == [1], "groups go on"
    assert "store-volume" not in (tmp_path / "processes.json").read_text()


@pytest.mark.core
def test_an_init_failure_names_its_rank_at_once(runtime: Runtime) -> None:
    pool = runtime.create_resource_pool(1, 2)
    started = time.monotonic()
    with pytest.raises(WorkerInitError, match=r"probe\[1\].*LookupError") as caught:
        runtime.create_worker_group(ClassWithInitArgs(Probe, fail_on=1), on=pool, name="probe")
    assert time.monotonic() - started < 40, "the other rank's minute is not waited for"
    assert isinstance(caught.value.__cause__, LookupError)
    assert "rank 1 of 2 starts" in "\n".join(caught.value.__notes__)


def test_a_death_inside_a_collective_is_the_word_for_all(runtime: Runtime) -> None:
    pool = runtime.create_resource_pool(1, 2)
    group = runtime.create_worker_group(ClassWithInitArgs(Probe), on=pool, name="probe")
    started = time.monotonic()
    pending = group.submit("die_in_a_collective", (1,), timeout=90)
    behind = group.submit("add", (1,), timeout=90)
    for call in (pending, behind):
        with pytest.raises(WorkerDied, match=r"probe\[1\] .* died: signal 9 \(SIGKILL\)"):
            call.result()  # and not what its peer makes of it
    assert time.monotonic() - started < 20, "torch is imported in there too"
    group.close()


@pytest.mark.parametrize("signum", [pytest.param(signal.SIGKILL, marks=pytest.mark.core), signal.SIGTERM])
def test_a_dead_worker_is_reported_within_seconds(runtime: Runtime, signum: signal.Signals) -> None:
    pool = runtime.create_resource_pool(1, 2)
    group = runtime.create_worker_group(ClassWithInitArgs(Probe), on=pool, name="probe")
    other = runtime.create_worker_group(ClassWithInitArgs(Probe), on=pool, name="other")
    pid = group.whoami()[1]["pid"]
    pending = group.submit("sleep", (60.0,), timeout=90)
    time.sleep(0.2)
    os.kill(pid, signum)
    started = time.monotonic()
    with pytest.raises(WorkerDied) as caught:
        pending.result()
    assert time.monotonic() - started < 5
    died = caught.value
    assert (died.group, died.rank) == ("probe", 1)
    assert "rank 1 of 2 starts" in died.log_tail
    if signum is signal.SIGKILL:
        assert died.cause == "signal 9 (SIGKILL)"
    with pytest.raises(WorkerDied):
        group.rank(1).submit("add", (1,))
    assert other.add(1) == [1, 1], "other groups go on"
    time.sleep(2.5)  # Monarch's own report comes later; it must not interrupt the program
    group.close()


def test_one_live_root_a_process(runtime: Runtime, tmp_path: Path) -> None:
    assert current_runtime() is runtime
    with pytest.raises(RuntimeError, match="live Runtime"):
        Runtime.from_config({"runtime": {"run_dir": str(tmp_path)}})
    runtime.close()
    runtime.close()
    with pytest.raises(RuntimeClosed):
        current_runtime()
    with pytest.raises(RuntimeClosed):
        runtime.create_resource_pool()
    with Runtime.from_config({"runtime": {"run_dir": str(tmp_path / "second")}}) as second:
        pool = second.create_resource_pool(1, 1)
        group = second.create_worker_group(ClassWithInitArgs(Probe), on=pool)
        assert group.add(1) == [1]
