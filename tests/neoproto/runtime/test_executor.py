from __future__ import annotations

import asyncio
import concurrent.futures
import math
import os
import queue
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from neoproto import trace
from neoproto.errors import CallCancelled, GroupBroken, RuntimeClosed
from neoproto.runtime.executor import InitArguments, WorkerExecutor
from neoproto.runtime.wire import (
    CANCEL,
    INIT,
    LAST,
    CallHeader,
    RemoteFailure,
    decode,
    decode_failure,
    encode,
)
from neoproto.runtime.worker import Rendezvous, Worker, WorkerIdentity
from tests.neoproto.runtime.clock import Clock


class Recorder(Worker):
    latest: Recorder

    def __init__(self, start: int) -> None:
        self.seen: list[Any] = [start, self.rank, self.world_size]
        self.gate, self.last, self.running = threading.Event(), threading.Event(), threading.Event()
        Recorder.latest = self

    def note(self, value: Any) -> list[Any]:
        self.seen.append(value)
        return list(self.seen)

    def block(self) -> None:
        self.running.set()
        self.gate.wait(30)

    def stay(self) -> None:
        self.running.set()
        self.last.wait(30)

    def open(self) -> None:
        self.gate.set()

    def left(self) -> float:
        return self.remaining()

    def fail(self) -> None:
        raise LookupError("nothing here")

    def leave(self) -> None:
        raise SystemExit(3)

    async def leave_in_a_task(self, error: BaseException) -> None:
        async def leave() -> None:
            raise error

        await asyncio.gather(leave())

    async def forget_a_task(self) -> int:
        asyncio.get_running_loop().create_task(asyncio.sleep(0)).cancel()
        return 1

    def fork(self, how: str) -> int:
        if (child := os.fork()) == 0 and how == "exit":
            raise SystemExit(5)
        return child

    async def fork_async(self, how: str) -> int:
        return self.fork(how)

    async def cancel_itself(self) -> None:
        raise asyncio.CancelledError

    async def doze(self, seconds: float) -> float:
        await asyncio.sleep(seconds)
        return self.remaining()


class Bench:
    """An executor, and its replies in the order they come."""

    def __init__(self) -> None:
        identity = WorkerIdentity(
            rank=1, world_size=2, local_rank=1, node_rank=0, group_name="g", log_path="/x", run_id="r"
        )
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever)
        self.thread.start()
        rendezvous = Rendezvous(is_server=False, public=False)
        self.executor = WorkerExecutor(identity, "here", rendezvous, self.loop)
        self.replies: queue.Queue[tuple[int, RemoteFailure | bytes]] = queue.Queue()
        self.ids = 0

    def call(
        self,
        method: str,
        *args: Any,
        turn: int | None,
        budget: float | None = None,
        payload: bytes | None = None,
    ) -> int:
        self.ids += 1
        number = self.ids
        header = CallHeader(
            call_id=number, role="", method=method, sequence=turn, ranks=None, budget_s=budget
        )
        payload = encode((args, {})) if payload is None else payload
        self.executor.accept(header, payload, lambda outcome: self.replies.put((number, outcome)))
        return number

    def tell(self, word: str, call_id: int = 0) -> None:
        """What is not a call."""
        self.executor.accept(CallHeader(call_id=call_id, role="", method=word), b"", pytest.fail)

    def drain(self, seconds: float) -> concurrent.futures.Future[bool]:
        return asyncio.run_coroutine_threadsafe(self.executor.drain(seconds), self.loop)

    def close(self) -> None:
        self.executor.close()
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(10)
        self.loop.close()

    def wait_running(self) -> None:
        """Until `block` or `stay` runs."""
        assert Recorder.latest.running.wait(10)
        Recorder.latest.running.clear()

    def wake(self) -> None:
        """Have the loop look at its timers: the clock was moved."""
        self.loop.call_soon_threadsafe(lambda: None)

    def reply(self) -> tuple[int, Any]:
        number, outcome = self.replies.get(timeout=10)
        return number, decode_failure(outcome) if isinstance(outcome, RemoteFailure) else decode(outcome)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Time stands still, for the loop too, until a test moves it."""
    made = Clock()
    monkeypatch.setattr(time, "monotonic", made)
    return made


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = Bench()
    init = InitArguments(classes={"": (Recorder, (7,), {})}, rendezvous=("localhost", 1))
    made.call(INIT, turn=0, payload=encode(init))
    assert made.reply() == (1, None)
    yield made
    made.close()


def test_sync_calls_run_by_number_whatever_the_order_of_arrival(bench: Bench) -> None:
    bench.call("note", "third", turn=3)
    bench.call("note", "second", turn=2)
    assert bench.executor.status(3).state == "queued"
    bench.call("note", "first", turn=1)
    assert bench.reply() == (4, [7, 1, 2, "first"])
    assert bench.reply() == (3, [7, 1, 2, "first", "second"])
    assert bench.reply() == (2, [7, 1, 2, "first", "second", "third"])


def test_a_call_whose_arguments_do_not_unpickle_keeps_its_turn(bench: Bench) -> None:
    bench.call("note", turn=1, payload=b"not a pickle")
    bench.call("note", "next", turn=2)
    number, error = bench.reply()
    assert number == 2
    assert isinstance(error, Exception)
    assert bench.reply() == (3, [7, 1, 2, "next"])


@pytest.mark.parametrize("error", [SystemExit(0), KeyboardInterrupt(), GeneratorExit()])
def test_an_exit_in_a_task_of_a_methods_does_not_end_the_loop(bench: Bench, error: BaseException) -> None:
    bench.call("leave_in_a_task", error, turn=None)
    raised = bench.reply()[1]
    assert isinstance(raised, RuntimeError)
    assert f"the worker raised {type(error).__name__}(" in str(raised)
    bench.call("forget_a_task", turn=None)
    assert bench.reply()[1] == 1


@pytest.mark.parametrize("method", ["fork", "fork_async"])
@pytest.mark.parametrize(("how", "code"), [("exit", 5), ("return", 0)])
def test_a_process_that_a_method_forks_does_not_come_back(
    bench: Bench, method: str, how: str, code: int
) -> None:
    """It would take calls, and answer them, a second time."""
    bench.call(method, how, turn=1 if method == "fork" else None)
    child = bench.reply()[1]
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == code


def test_a_method_that_raises_a_cancellation_was_not_cancelled(bench: Bench) -> None:
    bench.call("cancel_itself", turn=None)
    raised = bench.reply()[1]
    assert "the worker raised CancelledError()" in str(raised)


def test_exceptions_and_exits_become_replies(bench: Bench) -> None:
    bench.call("fail", turn=1)
    bench.call("leave", turn=2)
    bench.call("missing", turn=3)
    bench.call("note", 1, turn=4)
    errors = [bench.reply()[1] for _ in range(3)]
    assert [type(error) for error in errors] == [LookupError, RuntimeError, AttributeError]
    assert "SystemExit(3)" in str(errors[1])
    assert bench.reply()[1][-1] == 1


def test_the_budget_reaches_the_method(bench: Bench) -> None:
    bench.call("left", turn=1, budget=5.0)
    assert 4.0 < bench.reply()[1] <= 5.0
    bench.call("left", turn=2)
    assert bench.reply()[1] == math.inf


def test_a_running_method_past_its_deadline_breaks_the_group(bench: Bench, clock: Clock) -> None:
    bench.call("block", turn=1, budget=5)
    bench.call("note", "behind", turn=2)
    bench.wait_running()
    assert bench.executor.status(2).state == "running"
    clock.now += 5.1
    status = bench.executor.status(2)
    assert status.state == "running"
    assert "in block" in status.stack
    Recorder.latest.gate.set()
    assert bench.reply() == (2, None)
    number, error = bench.reply()
    assert number == 3
    assert isinstance(error, GroupBroken)
    assert "block overran" in str(error)


def test_what_comes_while_a_method_overruns_is_refused_at_once(bench: Bench, clock: Clock) -> None:
    bench.call("block", turn=1, budget=5)
    bench.wait_running()
    clock.now += 5.1
    bench.call("note", "behind", turn=2)
    number, error = bench.reply()
    assert number == 3
    assert isinstance(error, GroupBroken)
    Recorder.latest.gate.set()
    assert bench.reply() == (2, None)
    bench.call("note", "next", turn=3)
    assert bench.reply()[0] == 4, "each is answered once"


def test_a_method_that_begins_after_its_deadline_has_its_budget_again(bench: Bench, clock: Clock) -> None:
    gate = Recorder.latest.gate
    bench.call("block", turn=1)
    late = bench.call("block", turn=2, budget=5)
    behind = bench.call("note", "behind", turn=3)
    clock.now += 6
    assert bench.executor.status(late).state == "queued"
    gate.set()
    assert bench.reply() == (2, None)
    assert bench.reply() == (late, None), "it ran, and was quick"
    assert bench.reply()[1][-1] == "behind", "so nothing is broken"
    gate.clear()
    Recorder.latest.running.clear()
    bench.call("block", turn=4)
    bench.wait_running()
    late = bench.call("stay", turn=5, budget=5)
    behind = bench.call("note", "behind", turn=6)
    clock.now += 6
    gate.set()
    assert bench.reply()[1] is None
    bench.wait_running()
    assert bench.executor.status(late).state == "late"
    clock.now += 4.9
    assert bench.executor.status(late).state == "late", "its budget begins again"
    clock.now += 0.2
    bench.wake()
    number, error = bench.reply()
    assert number == behind
    assert isinstance(error, GroupBroken)
    assert "stay overran" in str(error)
    assert bench.executor.status(late).state == "running"
    Recorder.latest.last.set()
    assert bench.reply() == (late, None)


def test_a_queued_method_past_its_deadline_breaks_nothing_and_runs(bench: Bench, clock: Clock) -> None:
    bench.call("block", turn=1)
    bench.call("note", "late", turn=2, budget=5)
    clock.now += 6
    assert bench.executor.status(3).state != "running"
    Recorder.latest.gate.set()
    assert bench.reply() == (2, None)
    assert bench.reply()[1][-1] == "late", "skipping it would part this rank from its peers"


def test_async_methods_overlap_and_can_be_cancelled(bench: Bench) -> None:
    slow = bench.call("doze", 30.0, turn=None)
    quick = bench.call("doze", 0.0, turn=None, budget=9.0)
    number, left = bench.reply()
    assert number == quick
    assert 8.0 < left <= 9.0
    bench.tell(CANCEL, slow)
    bench.tell(CANCEL, 99)
    number, error = bench.reply()
    assert number == slow
    assert isinstance(error, CallCancelled)


def test_a_cancel_on_the_heels_of_its_call_is_not_lost(bench: Bench) -> None:
    ready, go = threading.Event(), threading.Event()
    bench.loop.call_soon_threadsafe(lambda: (ready.set(), go.wait(10)))
    assert ready.wait(10)
    slow = bench.call("doze", 30.0, turn=None)
    bench.tell(CANCEL, slow)  # before the loop has begun with the call
    go.set()
    number, error = bench.reply()
    assert number == slow
    assert isinstance(error, CallCancelled)
    assert bench.executor._tasks == {}


def test_drain_waits_for_both_kinds_and_then_admits_no_async_call(bench: Bench) -> None:
    blocked, dozing = bench.call("block", turn=1), bench.call("doze", 0.2, turn=None)
    bench.tell(LAST)
    late = bench.call("doze", 0.0, turn=None)
    number, error = bench.reply()
    assert number == late
    assert isinstance(error, RuntimeClosed)
    assert bench.reply()[0] == dozing
    assert not bench.drain(0.0).result(10)
    draining = bench.drain(10.0)
    Recorder.latest.gate.set()
    assert draining.result(10)
    assert bench.reply() == (blocked, None)


def test_drain_waits_for_the_word_that_no_more_calls_come(bench: Bench) -> None:
    assert not bench.drain(0.0).result(10), "a call may be on its way yet"
    draining = bench.drain(10.0)
    bench.tell(LAST)
    assert draining.result(10)


def test_drain_gives_up_in_time(bench: Bench) -> None:
    bench.call("block", turn=1)
    bench.tell(LAST)
    assert bench.drain(0.1).result(10) is False
    Recorder.latest.gate.set()
    bench.reply()


def test_an_init_that_raises_is_reported() -> None:
    bench = Bench()

    class Broken(Recorder):
        def __init__(self) -> None:
            raise OSError("no weights")

    bench.call(
        INIT, turn=0, payload=encode(InitArguments(classes={"": (Broken, (), {})}, rendezvous=("h", 1)))
    )
    assert isinstance(bench.reply()[1], OSError)
    bench.call("note", 1, turn=1)
    assert "its __init__ has not ended, or failed" in str(bench.reply()[1])
    bench.close()


def test_calls_with_a_deadline_are_traced(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(trace.FOLDER_VARIABLE, str(tmp_path / "trace"))
    bench = Bench()
    try:
        init = InitArguments(classes={"": (Recorder, (7,), {})}, rendezvous=("localhost", 1))
        bench.call(INIT, turn=0, payload=encode(init))
        bench.reply()  # async methods do not wait for their turn
        bench.call("note", "first", turn=1, budget=30)
        bench.call("fail", turn=2, budget=30)
        bench.call("doze", 0.05, turn=None, budget=30)
        bench.call("doze", 0.0, turn=None)  # as long as the run, for all that is known
        for _ in range(4):
            bench.reply()
    finally:
        bench.close()
        trace.close_process()
    (opening,), events = trace.read_part(tmp_path / "trace" / "g-rank1.jsonl")
    assert opening["lane"] == "g-rank1"
    assert sorted(event["name"] for event in events) == ["doze", "fail", "note", "start"]
    (doze,) = (event for event in events if event["name"] == "doze")
    assert doze["dur"] >= 50e3
