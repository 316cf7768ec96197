"""Calls from workers, groups that workers make, and who releases what."""

from __future__ import annotations

import gc
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from meshes.common import procs
from neoproto.errors import DeadlineExceeded, GroupBroken, RuntimeClosed, WorkerDied, WorkerInitError
from neoproto.runtime import ClassWithInitArgs, Runtime, WorkerGroup, current_runtime
from tests.meshes.leftovers import wait_until_clean
from tests.meshes.workers import Caller, Greeter, Probe

pytestmark = pytest.mark.live


@pytest.fixture
def runtime(tmp_path: Path) -> Iterator[Runtime]:
    with Runtime.from_config({"runtime": {"run_dir": str(tmp_path)}}) as runtime:
        yield runtime
    assert wait_until_clean(runtime.run_id, None, 2.0) == []


def callers(runtime: Runtime, count: int = 1) -> WorkerGroup:
    return runtime.create_worker_group(
        ClassWithInitArgs(Caller), on=runtime.create_resource_pool(1, count), name="caller"
    )


def wait_for(condition: Callable[[], bool], seconds: float = 20.0) -> bool:
    until = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > until:
            return False
        time.sleep(0.05)
    return True


@pytest.mark.core
def test_sync_calls_of_several_senders_have_one_order(runtime: Runtime) -> None:
    """Two workers and the controller call collectives: any two ranks in different orders would hang."""
    group = runtime.create_worker_group(
        ClassWithInitArgs(Probe), on=runtime.create_resource_pool(1, 2), name="probe"
    )
    two = callers(runtime, 2)
    theirs = two.submit("call_often", (group, 50), timeout=150)
    ours = [group.submit("all_reduce", timeout=150) for _ in range(50)]
    assert [call.result() for call in ours] == [[3.0, 3.0]] * 50
    assert theirs.result() == [[[3.0, 3.0]] * 50] * 2
    assert group.reductions_done() == [150, 150]
    assert two.root_clients() == [False, False], "no worker makes a root client"


@pytest.mark.core
def test_a_group_handed_to_a_worker_works_there_and_retains_nothing(runtime: Runtime) -> None:
    group = runtime.create_worker_group(
        ClassWithInitArgs(Probe), on=runtime.create_resource_pool(1, 2), name="probe"
    )
    caller = callers(runtime)
    caller.keep(group)
    assert caller.call("add", 1) == [[1, 1]]
    assert caller.submit("call_on_the_loop", ("add", (1,), 30.0)).result() == [[2, 2]]
    assert caller.submit("call_on_the_loop", ("left", (), 60.0), timeout=20).result()[0][0] < 20
    with pytest.raises(KeyError, match="lost") as caught:
        caller.call("fail", "lost")
    assert "in fail" in "\n".join(caught.value.__notes__)
    with pytest.raises(DeadlineExceeded) as late:
        caller.submit("call_on_the_loop", ("doze", (30.0,), 0.5), timeout=30, blocking=True)
    assert (late.value.group, late.value.ranks) == ("probe", (0, 1))
    assert caller.submit("cancel_a_call", timeout=60, blocking=True) == [
        [True, "probe.doze was cancelled", False, [1, 1]]
    ]
    caller.keep(group.rank(1))
    assert caller.call("add", 1) == [[3]]
    pids = [one["pid"] for one in group.whoami()]
    del group
    gc.collect()
    assert wait_for(lambda: not any(map(procs.lives, pids))), "the worker's handle keeps nothing"
    with pytest.raises(RuntimeClosed, match="probe"):
        caller.call("add", 1)


def test_the_last_reference_releases_the_workers(runtime: Runtime) -> None:
    group = runtime.create_worker_group(
        ClassWithInitArgs(Probe), on=runtime.create_resource_pool(1, 2), name="probe"
    )
    pids = [one["pid"] for one in group.whoami()]
    view = group.rank(0)
    del group
    gc.collect()
    assert view.add(1) == [1], "a local view keeps the group"
    view.close()
    call = view.submit("sleep", (1.0,))
    del view
    gc.collect()
    assert call.result() == [1.0], "so does a call under way"
    del call
    gc.collect()
    assert wait_for(lambda: not any(map(procs.lives, pids)))
    assert current_runtime() is runtime


def test_a_worker_makes_a_group_that_ends_with_it(runtime: Runtime) -> None:
    pool = runtime.create_resource_pool(1, 1, name="handed over")
    caller = callers(runtime, 2)
    first, second = caller.rank(0), caller.rank(1)
    (pids,) = first.make(pool, "nested")
    assert first.call("add", 1) == [[6]]
    assert first.attempt("root")[0].startswith("RuntimeError: a worker cannot make a Runtime")
    assert first.attempt("close")[0].startswith("RuntimeError: a worker cannot close the run")
    (said,) = first.attempt("actor_mesh")
    assert (
        said
        == "RuntimeError: the backend's handle on nested is with the controller, which owns its processes"
    )
    assert caller.store_round() == [42, 42], "the store is as it was"
    with pytest.raises(WorkerInitError, match=r"broken\[0\].*LookupError") as failed:
        second.make_broken(pool)
    assert isinstance(failed.value.__cause__, LookupError)
    (dropped,) = second.make(pool, "nested")
    second.drop()
    assert wait_for(lambda: not any(map(procs.lives, dropped)))
    (closed,) = second.make_on("closed", processes_per_node=1)
    second.close_group()
    assert not any(map(procs.lives, closed))
    assert all(map(procs.lives, pids))
    os.kill(caller.submit("pid").result()[0], signal.SIGKILL)
    assert wait_for(lambda: not any(map(procs.lives, pids))), "it goes when its maker dies"
    (pids,) = second.make(pool, "nested")
    caller.close()
    assert not any(map(procs.lives, pids)), "and when its maker is closed"


def test_a_death_reaches_callers_in_workers(runtime: Runtime) -> None:
    group = runtime.create_worker_group(
        ClassWithInitArgs(Probe), on=runtime.create_resource_pool(1, 2), name="probe"
    )
    caller = callers(runtime)
    caller.keep(group)
    pending = caller.submit("call", ("sleep", 60.0), timeout=90)
    pid = group.submit("where", blocking=True)[1]
    time.sleep(0.3)
    os.kill(pid, signal.SIGKILL)
    started = time.monotonic()
    with pytest.raises(WorkerDied, match=r"probe\[1\]"):
        pending.result()
    assert time.monotonic() - started < 5


def test_fused_roles_share_their_processes(runtime: Runtime) -> None:
    group = runtime.create_worker_group(
        {"probe": ClassWithInitArgs(Probe, 3), "greeter": ClassWithInitArgs(Greeter, "hello")},
        on=runtime.create_resource_pool(1, 2),
        name="fused",
    )
    probe, greeter = group.role("probe"), group.role("greeter")
    pids = [one["pid"] for one in probe.whoami()]
    assert greeter.greet("you") == [f"hello you from {rank} in {pids[rank]}" for rank in range(2)]
    assert probe.rank(1).add(1) == [4]
    caller = callers(runtime)
    caller.keep(greeter.rank(1))
    assert caller.call("greet", "me") == [[f"hello me from 1 in {pids[1]}"]]
    with pytest.raises(ValueError, match="no role 'other'"):
        group.role("other")
    with pytest.raises(AttributeError, match="no public method"):
        group.submit("add", (1,))
    caller.keep(probe)
    overrun = caller.submit("call", ("sleep", 60.0), timeout=2.0)
    time.sleep(0.5)  # it runs by then
    behind = greeter.submit("greet", ("you",))
    with pytest.raises(DeadlineExceeded):
        overrun.result()
    with pytest.raises(GroupBroken, match="sleep overran"):
        behind.result(timeout=10)  # admitted in time, so it waits behind


def test_names_do_not_collide(runtime: Runtime) -> None:
    pool = runtime.create_resource_pool(1, 1)
    names = [
        runtime.create_worker_group(ClassWithInitArgs(Greeter, "hi"), on=pool, name=name).name
        for name in ("actor", "actor-2", "actor")
    ]
    assert names == ["actor", "actor-2", "actor-3"]
