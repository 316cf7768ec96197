"""Typed calls: what is sent, and what a type checker makes of them."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from pathlib import Path

import pytest
from mypy import api

from neoproto.errors import RuntimeClosed
from neoproto.runtime import Dispatch, Worker, WorkerGroup, WorkerHandle, register, remote
from neoproto.runtime.group import public_methods
from neoproto.runtime.placement import Block
from neoproto.runtime.pool import ResourcePool
from tests.neoproto.runtime import typed_calls
from tests.neoproto.runtime.test_call_tracker import Bench


class Counter(Worker):
    @register(dispatch_mode=Dispatch.RANK_ZERO, blocking=True)
    def add(self, value: int, *, times: int = 1) -> int:
        """Add, and say the total."""
        return value * times

    def plain(self) -> str:
        return ""


class CounterHandle(WorkerHandle):
    add = remote(Counter.add)
    plain = remote(Counter.plain)


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    made = Bench(tmp_path)
    yield made
    made.tracker.close("over")


@pytest.fixture
def handle(bench: Bench) -> CounterHandle:
    block = Block(first_node=0, nnodes=1, first_device=0, devices_per_node=2)
    pool = ResourcePool(name="pool", cluster="default", block=block, device_type="cpu")
    methods = {"": public_methods(Counter)}
    return CounterHandle(
        WorkerGroup(bench.tracker, bench.group.ref, methods, pool, lambda *_: None, lambda _: None)
    )


def test_a_call_of_a_handle_is_a_call_of_the_group(bench: Bench, handle: CounterHandle) -> None:
    call = handle.within(60).add(3, times=2)
    ((ranks, header),) = bench.processes.sent
    assert (ranks, header.method) == ((0,), "add")
    assert header.budget_s is not None
    assert 0 < header.budget_s <= 60
    assert not call.done(), "it does not wait, whatever the method is registered as"
    bench.tracker.on_reply(header.call_id, 0, pickle.dumps(6))
    assert call.result() == 6


def test_a_method_may_be_named_by_the_class(bench: Bench, handle: CounterHandle) -> None:
    call = WorkerHandle(handle.group).call(Counter.plain)
    ((ranks, header),) = bench.processes.sent
    assert (ranks, header.method, header.budget_s) == ((0, 1), "plain", None)
    assert call.cancel()


def test_a_handle_keeps_the_words_of_the_method() -> None:
    assert CounterHandle.add.__doc__ == "Add, and say the total."


def test_a_handle_travels_as_its_group_does(handle: CounterHandle) -> None:
    arrived = pickle.loads(pickle.dumps(handle.within(60)))
    with pytest.raises(RuntimeClosed):  # no runtime is open here
        arrived.add(1)


def test_a_type_checker_follows_typed_calls() -> None:
    said, errors, code = api.run(["--strict", typed_calls.__file__])
    assert (said.startswith("Success"), errors, code) == (True, "", 0), said
