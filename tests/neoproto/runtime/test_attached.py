"""A worker's part in the run: its calls, groups and pools by way of the root, in this process."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from neoproto.errors import CallCancelled, DeadlineExceeded, RuntimeClosed, WorkerDied
from neoproto.runtime import ClassWithInitArgs, ResourcePool, Runtime, WorkerGroup
from neoproto.runtime.attached import AttachedRuntime
from neoproto.runtime.group import set_caller
from neoproto.runtime.relay import Request
from tests.neoproto.runtime.in_process import InProcessBackend
from tests.neoproto.runtime.workers import GATES, WAIT_S, Adder


@pytest.fixture
def pool(runtime: Runtime) -> ResourcePool:
    return runtime.create_resource_pool(processes_per_node=2)


@pytest.fixture
def parent(runtime: Runtime, pool: ResourcePool) -> WorkerGroup:
    return runtime.create_worker_group(ClassWithInitArgs(Adder, 10), on=pool, name="parent")


@pytest.fixture
def worker(backend: InProcessBackend, parent: WorkerGroup) -> AttachedRuntime:
    """What `current_runtime()` is in rank 0 of `parent`."""
    return backend.groups["parent"].attached[0]


@pytest.fixture
def child(worker: AttachedRuntime, pool: ResourcePool) -> WorkerGroup:
    """A group that rank 0 of `parent` has made."""
    return worker.create_worker_group(ClassWithInitArgs(Adder), on=pool, name="child")


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    GATES.update({"gate": threading.Event(), "gate is reached": threading.Event()})
    yield GATES["gate"]
    GATES["gate"].set()


def test_a_worker_calls_a_group_that_it_was_handed(parent: WorkerGroup, runtime: Runtime, pool: Any) -> None:
    adder = runtime.create_worker_group(ClassWithInitArgs(Adder, 1), on=pool)
    assert parent.rank(1).use(adder, 2) == [[3, 3]]


def test_a_worker_makes_calls_and_closes_groups(
    worker: AttachedRuntime, child: WorkerGroup, backend: InProcessBackend
) -> None:
    assert worker.create_resource_pool(1, 3).world_size == 3
    assert child.add(1) == [1, 1]
    assert child.submit("time_left", timeout=60).result()[0] <= 60
    with pytest.raises(LookupError, match="no such thing on 1"):
        child.fail(1)
    with pytest.raises(RuntimeError, match="is with the controller, which owns its processes"):
        _ = child.actor_mesh
    child.close()
    assert backend.groups["child"].events == ["watch", "drain", "stop"]
    with pytest.raises(RuntimeClosed, match="worker group child has been closed"):
        child.add(1)


def test_what_only_the_controller_may_do_is_refused(
    worker: AttachedRuntime, child: WorkerGroup, backend: InProcessBackend
) -> None:
    with pytest.raises(RuntimeError, match="a worker cannot close the run"):
        worker.close()
    other = backend.groups["parent"].attached[1]
    with pytest.raises(ValueError, match="was not made by this worker"):
        other._close_group(backend.groups["child"].request.key, 0.0)
    assert child.add(1) == [1, 1]


def test_a_relayed_call_is_cancelled_where_it_runs(child: WorkerGroup, backend: InProcessBackend) -> None:
    call = child.submit("forever")
    assert call.cancel()
    assert not call.cancel()
    with pytest.raises(CallCancelled, match=r"child\.forever was cancelled"):
        call.result(0)
    child.close(drain_s=WAIT_S)
    assert backend.groups["child"].events == ["watch", "drain", "stop"], "nothing ran any more"


def test_the_root_says_who_missed_the_deadline_of_a_relayed_call(
    child: WorkerGroup, gate: threading.Event
) -> None:
    with pytest.raises(DeadlineExceeded) as caught:
        child.rank(1).submit("block", ("gate",), timeout=0.05).result(WAIT_S)
    assert caught.value.ranks == (1,)
    assert "in block" in caught.value.stacks[1]


def test_a_call_that_the_root_never_answers_ends_in_its_process(
    parent: WorkerGroup, backend: InProcessBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("neoproto.runtime.attached.RELAY_GRACE_S", 0.0)
    asked: list[Request] = []
    alone = AttachedRuntime(backend.groups["parent"].request.attach, asked.append)
    set_caller(alone)  # groups that arrive by pickle are called by way of it
    group = pickle.loads(pickle.dumps(parent))
    with pytest.raises(DeadlineExceeded, match=r"parent\.add did not answer within 0\.1 s.* rank\(s\) 0, 1"):
        group.submit("add", (1,), timeout=0.1).result(WAIT_S)
    assert len(asked) == 1
    pending = group.submit("add", (1,))
    alone.shut_down("over")
    with pytest.raises(RuntimeClosed, match="over"):
        pending.result(0)
    with pytest.raises(RuntimeClosed, match="over"):
        group.submit("add", (1,))


def test_a_death_of_another_group_reaches_the_worker_that_called_it(
    child: WorkerGroup, backend: InProcessBackend
) -> None:
    call = child.submit("forever")
    backend.groups["child"].die(1)
    with pytest.raises(WorkerDied, match=r"child\[1\]"):
        call.result(WAIT_S)


def test_groups_go_with_the_worker_that_made_them(child: WorkerGroup, backend: InProcessBackend) -> None:
    backend.groups["parent"].die(1)  # another rank
    assert child.add(1) == [1, 1]
    backend.groups["parent"].die(0)
    assert backend.groups["child"].released.wait(WAIT_S)


def test_groups_go_with_the_group_whose_worker_made_them(
    parent: WorkerGroup, child: WorkerGroup, backend: InProcessBackend
) -> None:
    parent.close()
    assert backend.groups["child"].events == ["watch", "kill"]
    assert backend.groups["parent"].events == ["watch", "drain", "stop"]


def test_a_group_whose_maker_died_meanwhile_is_closed_again(
    worker: AttachedRuntime, pool: ResourcePool, backend: InProcessBackend
) -> None:
    backend.starting = lambda _: backend.on_death(
        backend.groups["parent"].request.key, 0, "signal 9 (SIGKILL)"
    )
    with pytest.raises(RuntimeClosed, match="the worker that asked for the group is gone"):
        worker.create_worker_group(ClassWithInitArgs(Adder), on=pool, name="late")
    assert backend.groups["late"].events == ["watch", "kill"]
