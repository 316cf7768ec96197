"""Starting worker groups, all at once."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, cast

import pytest

from neoproto.errors import DeadlineExceeded, NeoProtoError, StoreError
from neoproto.run.groups import start_groups, wait_for_all
from neoproto.runtime import WorkerGroup
from neoproto.runtime.failures import ProcessFailure


def group(name: str) -> WorkerGroup:
    return cast("WorkerGroup", name)


def test_groups_are_started_side_by_side_and_come_in_order() -> None:
    together = threading.Barrier(2)

    def start(name: str) -> Callable[[], WorkerGroup]:
        def wait() -> WorkerGroup:
            together.wait(10)
            return group(name)

        return wait

    starting: list[Future[WorkerGroup]] = []
    found = start_groups([start("a"), start("b")], ProcessFailure(), 5, starting)
    assert found == ["a", "b"] == [future.result() for future in starting]


def test_a_start_that_takes_too_long_names_the_option() -> None:
    def late() -> WorkerGroup:
        raise DeadlineExceeded("__init__", "reward", [0], 7, {0: "a stack\nof two lines"})

    said = r"no answer from rank\(s\) 0; trainer.timeouts.start=7 is how long workers may take to start$"
    with pytest.raises(NeoProtoError, match=said):
        start_groups([late], ProcessFailure(), 7)


def test_a_failed_start_leaves_the_others_to_the_caller() -> None:
    go, failed = threading.Event(), threading.Event()

    def slow() -> WorkerGroup:
        assert go.wait(10)
        return group("late")

    def fails() -> WorkerGroup:
        failed.set()
        raise ValueError("no")

    starting: list[Future[WorkerGroup]] = []
    with pytest.raises(ValueError, match="no"):
        start_groups([slow, fails], ProcessFailure(), 5, starting)
    assert not starting[0].done(), "the start has waited for a group that was still starting"
    go.set()
    assert starting[0].result(10) == "late"


def test_a_process_that_dies_ends_a_start() -> None:
    """For example of the store, which no one uses before all workers have started."""
    failure, go = ProcessFailure(), threading.Event()

    def dies() -> WorkerGroup:
        failure.set_exception(StoreError("died"))
        assert go.wait(10)
        return group("late")

    with pytest.raises(StoreError, match="died"):
        start_groups([dies], failure, 5)
    go.set()


def test_a_start_waits_for_all() -> None:
    futures: list[Future[Any]] = [Future(), Future()]
    for future in futures:
        threading.Timer(0.05, future.set_result, [1]).start()
    wait_for_all(futures, ProcessFailure())
    assert all(future.done() for future in futures)
