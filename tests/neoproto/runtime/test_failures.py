"""Who is told of which death, and that nobody is told twice."""

from __future__ import annotations

import pytest

from neoproto.errors import StoreError, WorkerDied
from neoproto.runtime.failures import ProcessFailures

DIED = WorkerDied("critic", 0, "here", "signal 9 (SIGKILL)")
STORE = StoreError("a process of the object store died: signal 9 (SIGKILL)")


def test_those_who_watch_a_group_are_told_and_nobody_else() -> None:
    failures = ProcessFailures()
    mine, others = failures.watch(["actor", "critic"]), failures.watch(["reward"])
    failures.report("rollout-0", WorkerDied("rollout-0", 0, "here", "exit code 1"))
    assert not mine.done()
    failures.report("critic", DIED)
    failures.report("critic", WorkerDied("critic", 1, "here", "exit code 1"))
    failures.report("actor", WorkerDied("actor", 0, "here", "exit code 1"))
    assert mine.exception(timeout=0) is DIED
    assert not others.done()


def test_the_store_is_everybodys() -> None:
    failures = ProcessFailures()
    failure = failures.watch([])
    failures.report(None, STORE)
    with pytest.raises(StoreError, match="object store died"):
        failure.result(timeout=0)


def test_what_died_before_counts() -> None:
    failures = ProcessFailures()
    failures.report("critic", DIED)
    failures.report(None, STORE)
    assert failures.watch(["critic"]).exception(timeout=0) in (DIED, STORE)
    assert failures.watch(["actor"]).exception(timeout=0) is STORE
