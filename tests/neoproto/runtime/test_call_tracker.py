"""How calls settle, with a group whose processes are this test."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from neoproto.errors import CallCancelled, DeadlineExceeded, GroupBroken, RuntimeClosed, WorkerDied
from neoproto.runtime.backend import ProcessInfo
from neoproto.runtime.call_tracker import CallTracker, PendingCall
from neoproto.runtime.deadline import FAILURE_HOLD_S
from neoproto.runtime.executor import CallStatus
from neoproto.runtime.group_state import GroupState
from neoproto.runtime.wire import CANCEL, CallHeader, MethodCall, encode, encode_failure
from tests.neoproto.runtime.clock import Clock, ManualWatch


class Processes:
    """Notes what is sent; is asked for little else."""

    native = None

    def __init__(self, count: int) -> None:
        self.processes = [ProcessInfo(rank=rank, pid=1, host="h", rendezvous=None) for rank in range(count)]
        self.sent: list[tuple[tuple[int, ...], CallHeader]] = []
        self.states: dict[int, CallStatus] = {}
        self.broken: list[tuple[list[int], str]] = []

    def send(self, ranks: Sequence[int], header: CallHeader, payload: bytes) -> None:
        if payload == b"unsendable":
            raise OSError("no way")
        self.sent.append((tuple(ranks), header))

    def statuses(self, *_: Any) -> dict[int, CallStatus]:
        return self.states

    def stacks(self, ranks: Sequence[int]) -> dict[int, str]:
        return dict.fromkeys(ranks, "where it is")

    def break_group(self, ranks: list[int], reason: str) -> None:
        self.broken.append((ranks, reason))


class Bench:
    """A tracker with one group; time passes by `advance` if it is given a clock."""

    def __init__(self, path: Path, count: int = 2, clock: Clock | None = None) -> None:
        self.watch = None if clock is None else ManualWatch(clock)
        self.tracker = CallTracker(self.watch)
        self.processes = Processes(count)
        self.group = GroupState("key", "g", self.processes, path)  # type: ignore[arg-type]
        self.tracker.groups["key"] = self.group

    def start(
        self, *ranks: int, is_async: bool = False, timeout: float = math.inf, payload: bytes = b""
    ) -> PendingCall:
        call = MethodCall(role="", method="m", sends=[(ranks, payload)], is_async=is_async)
        return self.tracker.start(self.group.ref, call, time.monotonic() + timeout)

    def answer(self, call: PendingCall, rank: int, value: object) -> None:
        outcome = encode_failure(value, "there") if isinstance(value, Exception) else encode(value)
        self.tracker.on_reply(call.call_id, rank, outcome)

    def advance(self, seconds: float) -> None:
        assert self.watch is not None
        self.watch.advance(seconds)

    def die(self, rank: int) -> None:
        self.group.mark_dying(rank)
        self.group.mark_dead(rank, "signal 9 (SIGKILL)")
        self.tracker.on_death(self.group, rank)


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    clock = Clock()
    monkeypatch.setattr(time, "monotonic", clock)
    made = Bench(tmp_path, clock=clock)
    yield made
    made.tracker.close("over")


def test_replies_in_any_order_become_results_in_order(bench: Bench) -> None:
    call = bench.start(0, 1)
    bench.answer(call, 1, "b")
    bench.answer(call, 1, "twice")
    bench.answer(call, 7, "nobody")
    assert not call.done()
    bench.answer(call, 0, "a")
    assert call.result() == ["a", "b"]


def test_sync_calls_have_places_and_async_ones_have_none(bench: Bench) -> None:
    bench.start(1)
    bench.start(0, 1)
    bench.start(0, 1)
    bench.start(0, is_async=True)
    turns = [[header.turn(rank) for rank in ranks] for ranks, header in bench.processes.sent]
    assert turns == [[0], [0, 1], [1, 2], [None]]


def test_a_failure_settles_at_once_where_nobody_is_silent(bench: Bench) -> None:
    call = bench.start(0, 1)
    bench.answer(call, 0, LookupError("first"))
    bench.answer(call, 1, LookupError("second"))
    assert call.done()
    with pytest.raises(LookupError, match="first"):
        call.result()


def test_a_failure_does_not_wait_long_for_silent_ranks(bench: Bench) -> None:
    call = bench.start(0, 1)
    bench.answer(call, 0, LookupError("alone"))
    bench.advance(0.9 * FAILURE_HOLD_S)
    assert not call.done(), "a death may be its cause"
    bench.advance(0.1 * FAILURE_HOLD_S)
    with pytest.raises(LookupError, match="alone"):
        call.result(timeout=0)


def test_a_death_is_the_word_on_the_failure_it_caused(bench: Bench) -> None:
    before, after = bench.start(0, 1), bench.start(0, 1)
    bench.answer(after, 0, RuntimeError("connection closed by peer"))
    bench.advance(0.5 * FAILURE_HOLD_S)
    bench.group.mark_dying(1)  # known at once; its cause takes a while
    bench.answer(before, 0, RuntimeError("connection closed by peer"))
    bench.advance(10 * FAILURE_HOLD_S)
    assert not before.done()
    assert not after.done()
    bench.die(1)
    for call in (before, after):
        with pytest.raises(WorkerDied, match=r"g\[1\] on h died: signal 9"):
            call.result(timeout=0)
    with pytest.raises(WorkerDied):
        bench.start(0, 1)
    assert not bench.start(0).done(), "calls to the others go on"


def test_a_queued_call_past_its_deadline_breaks_nothing_and_a_running_one_does(bench: Bench) -> None:
    bench.processes.states = {
        0: CallStatus(state="queued", stack="a"),
        1: CallStatus(state="running", stack="b"),
    }
    call = bench.start(0, timeout=5)
    bench.advance(5)
    with pytest.raises(DeadlineExceeded) as queued:
        call.result(timeout=10)
    assert (queued.value.ranks, queued.value.stacks[0]) == ((0,), "a")
    bench.processes.states.pop(0)
    call = bench.start(0, 1, timeout=5)
    bench.advance(5)
    with pytest.raises(DeadlineExceeded) as running:
        call.result(timeout=10)
    assert running.value.stacks == {0: "where it is", 1: "b"}, "a mute rank is read from outside"
    assert bench.processes.broken == [([0, 1], "g is broken: m overran its deadline on rank(s) [0, 1]")]
    with pytest.raises(GroupBroken):
        bench.start(0)


def test_an_async_call_past_its_deadline_breaks_nothing(bench: Bench) -> None:
    call = bench.start(0, timeout=5, is_async=True)
    bench.advance(5)
    with pytest.raises(DeadlineExceeded):
        call.result(timeout=10)
    assert not bench.start(0).done()


def test_cancelling_tells_the_workers_of_async_calls_only(bench: Bench) -> None:
    sync, coroutine = bench.start(0, 1), bench.start(0, 1, is_async=True)
    bench.processes.sent.clear()
    assert sync.cancel()
    assert coroutine.cancel()
    assert not coroutine.cancel()
    ((ranks, header),) = bench.processes.sent
    assert (ranks, header.method, header.call_id) == ((0, 1), CANCEL, coroutine.call_id)
    with pytest.raises(CallCancelled):
        sync.result()


def test_a_sync_call_that_cannot_be_sent_breaks_the_group(bench: Bench) -> None:
    with pytest.raises(OSError, match="no way"):
        bench.start(0, 1, payload=b"unsendable")
    with pytest.raises(GroupBroken, match="could not be sent"):
        bench.start(0)


def test_after_the_end_nothing_is_taken_and_nothing_waits(bench: Bench) -> None:
    call = bench.start(0)
    bench.tracker.stop_admission("closing")
    with pytest.raises(RuntimeClosed, match="closing"):
        bench.start(0)
    assert not call.done(), "what is under way may end"
    bench.tracker.close("closed")
    with pytest.raises(RuntimeClosed, match="closed"):
        call.result()


def test_a_death_on_a_full_disk_says_so(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A process that cannot write may end without a word."""
    monkeypatch.setattr("neoproto.runtime.group_state.is_full", lambda folder: folder == tmp_path)
    call = bench.start(0)
    bench.die(0)
    with pytest.raises(WorkerDied, match=rf"\(SIGKILL\); {tmp_path}: No space left on device$"):
        call.result()


def test_a_call_with_no_time_is_never_sent_and_breaks_nothing(bench: Bench) -> None:
    for is_async in (False, True):
        call = bench.start(0, 1, timeout=0, is_async=is_async)
        with pytest.raises(DeadlineExceeded, match=r"g\.m did not answer within 0\.0 s"):
            call.result(timeout=0)
    assert bench.processes.sent == []
    bench.start(0, 1)
    ((_, header),) = bench.processes.sent
    assert header.turn(0) == 0, "no turn in the order was taken"


def test_what_waits_behind_an_overrun_ends_with_it(bench: Bench) -> None:
    bench.processes.states = {1: CallStatus(state="running", stack="b")}
    elsewhere = bench.start(0)
    overrun = bench.start(0, 1, timeout=5)
    bench.answer(overrun, 0, "done")
    behind, with_its_peer, loop = bench.start(0, 1), bench.start(0), bench.start(1, is_async=True)
    bench.advance(5)
    with pytest.raises(DeadlineExceeded):
        overrun.result(timeout=10)
    for call in (behind, with_its_peer):
        with pytest.raises(GroupBroken, match=r"m overran its deadline on rank\(s\) \[1\]"):
            call.result(timeout=0)
    assert not elsewhere.done(), "it is before the others on a rank that goes on"
    assert not loop.done(), "async methods go on"


def test_what_waits_behind_a_rank_that_does_nothing_else_ends_too(bench: Bench) -> None:
    overrun = bench.start(1, timeout=5)  # says nothing of its state
    loop = bench.start(1, is_async=True)
    bench.advance(5)
    with pytest.raises(DeadlineExceeded):
        overrun.result(timeout=10)
    with pytest.raises(GroupBroken):
        loop.result(timeout=0)


@pytest.mark.parametrize("way", ["cancelled", "failed", "died"])
def test_a_call_that_ended_early_is_watched_until_its_deadline(bench: Bench, way: str) -> None:
    """For the caller it is over; rank 1 runs it still."""
    bench.processes.states = {1: CallStatus(state="running", stack="b")}
    overrun = bench.start(0, 1, timeout=5)
    behind = bench.start(1)
    if way == "cancelled":
        assert overrun.cancel()
        bench.answer(overrun, 0, "late")
    elif way == "failed":
        bench.answer(overrun, 0, LookupError("alone"))
        bench.advance(FAILURE_HOLD_S)
    else:
        bench.die(0)
    with pytest.raises((CallCancelled, LookupError, WorkerDied)):
        overrun.result(timeout=0)
    assert not behind.done()
    bench.advance(5)
    with pytest.raises(GroupBroken, match=r"overran its deadline on rank\(s\) \[1\]"):
        behind.result(timeout=10)
    with pytest.raises(GroupBroken):
        bench.start(1)


def test_a_cancelled_call_that_ends_in_time_breaks_nothing(bench: Bench) -> None:
    cancelled, other = bench.start(0, 1, timeout=5), bench.start(0, timeout=6)
    assert cancelled.cancel()
    bench.answer(cancelled, 0, None)
    bench.answer(cancelled, 1, None)
    bench.processes.states = {0: CallStatus(state="queued", stack="")}
    bench.advance(6)
    with pytest.raises(DeadlineExceeded):
        other.result(timeout=10)
    assert bench.group.broken is None


def test_a_rank_that_refuses_ends_what_waits_for_it(bench: Bench) -> None:
    asked, behind = bench.start(0, 1), bench.start(0, 1)
    broken = encode_failure(GroupBroken("g is broken: m overran"), "there", broken=True)
    bench.tracker.on_reply(asked.call_id, 0, broken)
    for call in (asked, behind):
        with pytest.raises(GroupBroken, match="m overran"):
            call.result(timeout=0)


def test_a_closed_group_is_watched_no_longer(bench: Bench) -> None:
    cancelled = bench.start(0, timeout=5)
    assert cancelled.cancel()
    bench.tracker.fail_all(bench.group, "closed")
    other = bench.start(1, timeout=6, is_async=True)
    bench.advance(6)
    with pytest.raises(DeadlineExceeded):
        other.result(timeout=10)
    assert bench.processes.broken == []
