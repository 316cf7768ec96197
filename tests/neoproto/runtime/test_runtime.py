"""The root of a run: what it refuses, and its groups from start to end, with workers in this process."""

from __future__ import annotations

import gc
import json
import pickle
import threading
import time
from collections.abc import Iterator

import pytest
import torch

from neoproto.data import DataProto
from neoproto.errors import (
    ConfigError,
    DeadlineExceeded,
    GroupBroken,
    RuntimeClosed,
    StoreError,
    TopologyError,
    WorkerDied,
    WorkerInitError,
)
from neoproto.runtime import ClassWithInitArgs, ResourcePool, Runtime, WorkerGroup, current_runtime
from neoproto.runtime.backend import STORE_KEY, GroupRequest
from neoproto.runtime.settings import RuntimeSettings
from tests.neoproto.runtime.in_process import InProcessBackend
from tests.neoproto.runtime.workers import GATES, ORDER, WAIT_S, Adder, BadStart


@pytest.fixture
def pool(runtime: Runtime) -> ResourcePool:
    return runtime.create_resource_pool(processes_per_node=2)


@pytest.fixture
def group(runtime: Runtime, pool: ResourcePool) -> WorkerGroup:
    return runtime.create_worker_group(ClassWithInitArgs(Adder, 10), on=pool, name="adder")


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    """Lets `Adder.block("gate")` go; `GATES["gate is reached"]` is set once a rank is there."""
    GATES.update({"gate": threading.Event(), "gate is reached": threading.Event()})
    yield GATES["gate"]
    GATES["gate"].set()


def reached() -> bool:
    return GATES["gate is reached"].wait(WAIT_S)


def listed(runtime: Runtime) -> list[tuple[str, int]]:
    rows = json.loads((runtime.run_dir / "processes.json").read_text())
    return [(row["group"], row["rank"]) for row in rows]


def test_groups_do_not_take_the_names_of_what_is_the_runs_own(runtime: Runtime, pool: ResourcePool) -> None:
    """They are rows of processes.json, or what lies beside the groups' folders of logs."""
    wanted = (
        "controller",
        "store-volume",
        "store-index",
        "store",
        "hosts",
        "controller.log",
        "actor",
        "actor",
    )
    groups = [runtime.create_worker_group(ClassWithInitArgs(Adder), on=pool, name=name) for name in wanted]
    given = [group.name for group in groups]
    assert given == [*(f"{name}-2" for name in wanted[:6]), "actor", "actor-2"]
    for name in ("a/b", ".hidden"):
        with pytest.raises(ConfigError, match="a group's name is a folder's name"):
            runtime.create_worker_group(ClassWithInitArgs(Adder), on=pool, name=name)


@pytest.mark.parametrize(
    ("config", "error", "said"),
    [
        ({"topology": {}}, TopologyError, r"topology\.clusters: wanted at least one cluster, got none"),
        ({"topology": 5}, TopologyError, r"topology: wanted a mapping, got 5 \(int\)"),
        ({"backend": "ray2"}, ConfigError, r"runtime\.backend: no backend 'ray2'"),
        (None, ConfigError, r"configuration: wanted a mapping"),
    ],
)
def test_what_cannot_be_is_refused_and_leaves_no_runtime(
    config: object, error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=f"^{said}"):
        Runtime.from_config(config)
    with pytest.raises(RuntimeClosed):
        current_runtime()


def test_a_pool_has_no_more_gpus_than_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    runtime = Runtime(RuntimeSettings.from_config({}), None)
    assert runtime.create_resource_pool(1, 2, device_type="gpu").device_type == "gpu"
    with pytest.raises(ValueError, match="the pool wants 3 GPUs a node, this machine has 2"):
        runtime.create_resource_pool(1, 3, device_type="gpu")
    with pytest.raises(ValueError, match="device_type must be 'gpu' or 'cpu', got 'cuda'"):
        runtime.create_resource_pool(1, 1, device_type="cuda")  # type: ignore[arg-type]
    applied = RuntimeSettings.from_config({"monarch": {"job_mode": "current"}})
    assert Runtime(applied, None).create_resource_pool(1, 3, device_type="gpu").world_size == 3


def test_a_second_runtime_is_refused_while_one_is_open(runtime: Runtime) -> None:
    assert current_runtime() is runtime
    with pytest.raises(RuntimeError, match="has a live Runtime already"):
        Runtime.from_config({"backend": "in-process"})


def test_a_group_is_called_on_all_ranks_on_one_or_as_registered(group: WorkerGroup) -> None:
    assert group.add(1) == [11, 11]
    assert group.rank(1).add(1) == [12]
    assert group.lead().result() == 0
    assert group.own([5, 6]) == [(0, 5), (1, 6)]
    assert group.submit("add", (0,), timeout=60).result() == [11, 12]
    assert group.execute_rank_zero_sync("add", 1) == 12
    with pytest.raises(AttributeError, match="no public method 'subtract'; there is: add, block"):
        group.subtract(1)


def test_a_call_carries_its_deadline_to_the_worker(group: WorkerGroup) -> None:
    assert all(0 < left <= 60 for left in group.submit("time_left", timeout=60).result())
    assert group.time_left() == [float("inf")] * 2


def test_a_batch_is_split_by_device_mesh(runtime: Runtime) -> None:
    wide = runtime.create_resource_pool(processes_per_node=4)
    group = runtime.create_worker_group(ClassWithInitArgs(Adder), on=wide)
    batch = DataProto.from_dict({"x": torch.arange(6)})
    with pytest.raises(ValueError, match=r"rank\(s\) \[0, 1, 2, 3\] did not register_mesh\('half'"):
        group.in_mesh(batch)
    group.join_mesh()
    assert group.in_mesh(batch)["x"].tolist() == list(range(6))


def test_roles_share_the_processes(runtime: Runtime, backend: InProcessBackend, pool: ResourcePool) -> None:
    roles = {"one": ClassWithInitArgs(Adder, 1), "two": ClassWithInitArgs(Adder, 2, env={"A": "1"})}
    group = runtime.create_worker_group(roles, on=pool, name="fused")
    assert group.role("one").add(0) == [1, 1]
    assert group.role("two").add(0) == [2, 2]
    assert backend.groups["fused"].request.env == {"A": "1"}
    with pytest.raises(ValueError, match="fused has no role 'three'; there is: one, two"):
        group.role("three")


def test_one_ranks_exception_is_the_calls(group: WorkerGroup) -> None:
    with pytest.raises(LookupError, match="no such thing on 1") as caught:
        group.fail(1)
    assert "traceback of adder[1] on h" in caught.value.__notes__[0]
    assert group.add(1) == [11, 11]


def test_an_init_that_raises_names_its_rank_and_leaves_no_process(
    runtime: Runtime, backend: InProcessBackend, pool: ResourcePool
) -> None:
    with pytest.raises(
        WorkerInitError, match=r"^__init__ of bad\[1\] on .* raised OSError: no weights$"
    ) as caught:
        runtime.create_worker_group(ClassWithInitArgs(BadStart, 1), on=pool, name="bad")
    assert isinstance(caught.value.__cause__, OSError)
    assert backend.groups["bad"].events == ["watch", "kill"]
    assert listed(runtime) == [("controller", 0), ("store-volume", 0)]


def test_processes_that_do_not_start_in_time_are_named(
    runtime: Runtime, backend: InProcessBackend, pool: ResourcePool
) -> None:
    backend.refuse_start = TimeoutError()
    with pytest.raises(DeadlineExceeded) as caught:
        runtime.create_worker_group(ClassWithInitArgs(Adder), on=pool, name="slow")
    assert str(caught.value) == "slow.start did not answer within 120.0 s; no answer from rank(s) 0, 1"


def test_a_name_in_use_gets_a_number(runtime: Runtime, backend: InProcessBackend, pool: ResourcePool) -> None:
    groups = [runtime.create_worker_group(ClassWithInitArgs(Adder), on=pool) for _ in range(2)]
    assert [group.name for group in groups] == ["adder", "adder-2"]
    assert listed(runtime)[2:] == [("adder", 0), ("adder", 1), ("adder-2", 0), ("adder-2", 1)]


def test_a_death_ends_calls_to_its_rank_and_is_told_to_whoever_watches(
    runtime: Runtime, backend: InProcessBackend, group: WorkerGroup, gate: threading.Event
) -> None:
    watched, other = runtime.watch_failures(["adder"]), runtime.watch_losses(["another"])
    both, first = group.submit("block", ("gate",)), group.rank(0).submit("forever")
    assert reached()
    backend.groups["adder"].die(1)
    with pytest.raises(WorkerDied, match=r"adder\[1\] on .* died: signal 9"):
        both.result(WAIT_S)
    assert isinstance(watched.exception(0), WorkerDied)
    assert not other.done()
    assert not first.done(), "rank 0 goes on"
    with pytest.raises(WorkerDied):
        group.add(1)
    gate.set()
    assert group.rank(0).add(1) == [11]
    assert listed(runtime)[2:] == [("adder", 0)]
    group.close()
    assert backend.groups["adder"].events == ["watch", "kill"], "what has lost a rank is not drained"
    with pytest.raises(RuntimeClosed):
        first.result(0)


def test_a_death_of_the_store_is_told_to_everybody_who_watches(
    runtime: Runtime, backend: InProcessBackend
) -> None:
    watched = runtime.watch_failures([])
    backend.on_death(STORE_KEY, 0, None)
    backend.on_death(STORE_KEY, 0, "exit code 1")
    assert isinstance(error := watched.exception(0), StoreError)
    assert str(error) == "a process of the object store died: exit code 1"
    assert listed(runtime) == [("controller", 0)]


def test_all_ranks_run_sync_calls_in_one_order_whoever_sends(
    group: WorkerGroup, backend: InProcessBackend
) -> None:
    ORDER.clear()
    senders = [group, *(pickle.loads(pickle.dumps(group)) for _ in range(3))]

    def send(number: int) -> None:
        for count in range(50):
            senders[number].submit("note", ((number, count),))

    threads = [threading.Thread(target=send, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    group.add(0)  # behind all of them
    assert len(ORDER[0]) == 200
    assert ORDER[0] == ORDER[1]


def test_a_method_that_overruns_breaks_its_group(
    backend: InProcessBackend, group: WorkerGroup, gate: threading.Event
) -> None:
    overrun = group.submit("block", ("gate",), timeout=0.05)
    behind = group.submit("add", (1,))
    with pytest.raises(DeadlineExceeded) as caught:
        overrun.result(WAIT_S)
    assert caught.value.ranks == (0, 1)
    assert "in block" in caught.value.stacks[0]
    with pytest.raises(GroupBroken, match=r"block overran its deadline on rank\(s\) \[0, 1\]"):
        behind.result(WAIT_S)
    with pytest.raises(GroupBroken):
        group.add(1)
    group.close()
    assert backend.groups["adder"].events == ["watch", "kill"]


def test_closing_a_group_drains_what_was_admitted(
    backend: InProcessBackend, group: WorkerGroup, gate: threading.Event
) -> None:
    call = group.submit("block", ("gate",))
    assert reached()
    closing = threading.Thread(target=group.close, args=(WAIT_S,))
    closing.start()
    gate.set()
    closing.join(WAIT_S)
    assert call.result(0) == ["gate", "gate"]
    assert backend.groups["adder"].events == ["watch", "drain", "stop"]
    with pytest.raises(RuntimeClosed, match="worker group adder has been closed"):
        group.add(1)
    with pytest.raises(RuntimeClosed, match="worker group adder has been closed"):
        pickle.loads(pickle.dumps(group)).add(1)
    assert "closed" in group._repr_html_()
    group.close()


def test_a_group_that_nobody_holds_is_released(
    runtime: Runtime, backend: InProcessBackend, pool: ResourcePool
) -> None:
    group = runtime.create_worker_group(ClassWithInitArgs(Adder), on=pool, name="dropped")
    call, view = group.submit("forever"), group.rank(0)
    del group
    gc.collect()
    assert view.add(1) == [1], "a view and a call under way hold it"
    del view
    assert call.cancel()
    gc.collect()
    assert backend.groups["dropped"].released.wait(WAIT_S)


def test_closing_the_runtime_goes_in_order(
    runtime: Runtime, backend: InProcessBackend, group: WorkerGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("neoproto.runtime.runtime.DRAIN_S", 0.05)
    done: list[str] = []

    def fail() -> None:
        done.append(f"second, with {group.add(0)}")
        raise OSError("it does not matter")

    runtime.before_close(lambda: done.append("first"))
    runtime.before_close(fail)
    call = group.submit("forever")
    runtime.close()
    runtime.close()
    assert done == ["second, with [10, 10]", "first"]
    assert backend.events == ["start store", "stop spawning", "close store", "close"]
    assert listed(runtime) == []
    for use in (lambda: group.add(1), lambda: call.result(0), lambda: runtime.create_resource_pool()):
        with pytest.raises(RuntimeClosed):
            use()
    with pytest.raises(RuntimeClosed):
        current_runtime()


def test_a_group_that_another_thread_closes_keeps_its_time_to_drain(
    runtime: Runtime, backend: InProcessBackend, group: WorkerGroup
) -> None:
    GATES.update({name: threading.Event() for name in ("last", "last is reached")})
    call = group.submit("block", ("last",), timeout=WAIT_S)
    assert GATES["last is reached"].wait(WAIT_S)
    closes_group = threading.Thread(target=group.close, args=(WAIT_S,))
    closes_all = threading.Thread(target=runtime.close)
    processes = backend.groups["adder"]
    closes_group.start()
    while "drain" not in processes.events:
        time.sleep(0.01)
    closes_all.start()
    closes_all.join(0.5)
    assert not call.done()
    assert "close store" not in backend.events
    GATES["last"].set()
    closes_group.join()
    closes_all.join()
    assert call.result(0) == ["last", "last"]
    assert processes.events == ["watch", "drain", "stop"]


def test_a_group_that_starts_while_the_runtime_closes_is_given_up(
    runtime: Runtime, backend: InProcessBackend, pool: ResourcePool
) -> None:
    def close(_: GroupRequest) -> None:
        runtime.close()

    backend.starting = close
    with pytest.raises(RuntimeClosed):
        runtime.create_worker_group(ClassWithInitArgs(Adder), on=pool)


def test_a_handle_of_an_earlier_runtime_is_refused(
    monkeypatch: pytest.MonkeyPatch, runtime: Runtime, group: WorkerGroup
) -> None:
    travelled = pickle.dumps(group)
    runtime.close()
    with Runtime.from_config({"backend": "in-process"}), pytest.raises(RuntimeClosed, match="adder"):
        pickle.loads(travelled).add(1)
