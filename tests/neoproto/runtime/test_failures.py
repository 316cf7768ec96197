"""Who is told of which death, and that nobody is told twice."""

from __future__ import annotations

import pytest

from neoproto.errors import StoreError, WorkerDied
from neoproto.runtime.failures import Losses

DIED = WorkerDied("critic", 0, "here", "signal 9 (SIGKILL)")
STORE = StoreError("a process of the object store died: signal 9 (SIGKILL)")


def test_those_who_watch_a_group_are_told_and_nobody_else() -> None:
    losses = Losses()
    mine, others = losses.watch(["actor", "critic"]), losses.watch(["reward"])
    losses.report("rollout-0", WorkerDied("rollout-0", 0, "here", "exit code 1"))
    assert not mine.done()
    losses.report("critic", DIED)
    losses.report("critic", WorkerDied("critic", 1, "here", "exit code 1"))
    losses.report("actor", WorkerDied("actor", 0, "here", "exit code 1"))
    assert mine.exception(timeout=0) is DIED
    assert not others.done()


def test_the_store_is_everybodys() -> None:
    losses = Losses()
    loss = losses.watch([])
    losses.report(None, STORE)
    with pytest.raises(StoreError, match="object store died"):
        loss.result(timeout=0)


def test_what_died_before_counts() -> None:
    losses = Losses()
    losses.report("critic", DIED)
    losses.report(None, STORE)
    assert losses.watch(["critic"]).exception(timeout=0) in (DIED, STORE)
    assert losses.watch(["actor"]).exception(timeout=0) is STORE
