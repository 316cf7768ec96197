from __future__ import annotations

import asyncio
import gc
import sys
import threading
import time

import pytest

from neoproto.runtime import RemoteCall
from neoproto.runtime.wire import encode_failure


def test_a_call_settles_once_and_converts_once() -> None:
    conversions: list[int] = []

    def convert(raw: int) -> int:
        conversions.append(raw)
        return raw * 2

    call: RemoteCall[int] = RemoteCall(convert)
    assert not call.done()
    assert call._settle(3)
    assert not call._settle(4)
    assert call.done()
    assert [call.result(), call.result()] == [6, 6]
    assert conversions == [3]


def test_an_error_is_raised_every_time() -> None:
    call: RemoteCall[int] = RemoteCall()
    call._settle(error=KeyError("gone"))
    for _ in range(2):
        with pytest.raises(KeyError, match="gone"):
            call.result()


def test_result_waits_for_another_thread_and_gives_up_without_ending_the_call() -> None:
    call: RemoteCall[str] = RemoteCall()
    with pytest.raises(TimeoutError):
        call.result(timeout=0.01)
    threading.Timer(0.05, lambda: call._settle("late")).start()
    assert call.result(timeout=10) == "late"


def test_await_on_several_loops_and_tasks() -> None:
    call: RemoteCall[str] = RemoteCall()

    async def body() -> list[str]:
        async def wait() -> str:
            return await call

        tasks = [asyncio.create_task(wait()) for _ in range(3)]
        await asyncio.sleep(0)
        threading.Thread(target=lambda: call._settle("x")).start()
        return await asyncio.gather(*tasks)

    assert asyncio.run(body()) == ["x"] * 3
    assert asyncio.run(body()) == ["x"] * 3


def test_a_cancelled_await_leaves_no_callback() -> None:
    call: RemoteCall[str] = RemoteCall()

    async def body() -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await call

    asyncio.run(body())
    assert call._callbacks == []
    assert call._settle("x")


def test_gather_keeps_the_order_of_its_input() -> None:
    calls: list[RemoteCall[int]] = [RemoteCall() for _ in range(3)]
    gathered = RemoteCall.gather(calls)
    for index in (2, 0, 1):
        assert not gathered.done()
        calls[index]._settle(index)
    assert gathered.result() == [0, 1, 2]
    assert RemoteCall.gather([]).result() == []


def test_gather_ends_with_the_first_failure() -> None:
    calls: list[RemoteCall[int]] = [RemoteCall() for _ in range(3)]
    gathered = RemoteCall.gather(calls)
    calls[1]._settle(error=LookupError("second"))
    with pytest.raises(LookupError, match="second"):
        gathered.result()


def test_gather_ends_with_a_failure_that_travelled() -> None:
    from neoproto.runtime.wire import decode_failure

    def convert(raw: object) -> None:
        raise decode_failure(raw)  # type: ignore[arg-type]

    calls: list[RemoteCall[None]] = [RemoteCall(convert), RemoteCall(convert)]
    gathered = RemoteCall.gather(calls)
    calls[1]._settle(encode_failure(LookupError("far away"), "there"))
    assert gathered.done()
    with pytest.raises(LookupError, match="far away"):
        gathered.result()


def test_wait_counts_and_splits() -> None:
    calls: list[RemoteCall[int]] = [RemoteCall() for _ in range(4)]
    two = RemoteCall.wait(calls, count=2)
    calls[3]._settle(3)
    assert not two.done()
    calls[1]._settle(error=ValueError("counts as ended"))
    assert two.result() == ([calls[1], calls[3]], [calls[0], calls[2]])
    assert [call._callbacks for call in calls] == [[], [], [], []], "pending calls are left as they were"
    assert RemoteCall.wait(calls, count=0).result() == ([calls[1], calls[3]], [calls[0], calls[2]])
    with pytest.raises(ValueError, match="between 0 and the 4"):
        RemoteCall.wait(calls, count=5)


@pytest.mark.parametrize("make", [RemoteCall.gather, RemoteCall.wait])
def test_many_calls_cost_linearly(make: object) -> None:
    def seconds(count: int) -> float:
        calls: list[RemoteCall[int]] = [RemoteCall() for _ in range(count)]
        started = time.thread_time()
        made = [make(calls) for _ in range(5)]  # type: ignore[operator]
        for call in calls:
            call._settle(0)
        assert all(one.done() for one in made)
        return time.thread_time() - started

    gc.disable()  # its pauses grow with what the whole process holds
    try:
        small = min(seconds(1000) for _ in range(5))
        large = min(seconds(10000) for _ in range(3))
    finally:
        gc.enable()
    assert large < 40 * small, "ten times the calls"


def test_a_loop_that_awaits_a_call_in_a_kernel_looks_up_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a signal's handler only books a callback, as ipykernel's does, the wait ends all the same."""
    monkeypatch.setitem(sys.modules, "ipykernel", sys)
    call: RemoteCall[None] = RemoteCall()

    async def cell() -> None:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None
        # From another thread without a word to the loop: it is not woken.
        threading.Timer(0.1, lambda: loop.call_soon(task.cancel)).start()
        await call

    in_vain = threading.Timer(10, call._settle)  # else the loop would wait for ever
    in_vain.start()
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(cell())
    in_vain.cancel()


def test_nobody_looks_up_for_a_call_that_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ipykernel", sys)
    monkeypatch.setattr("neoproto.runtime.call.LOOK_S", 0.01)
    booked: list[float] = []

    async def cell() -> None:
        loop = asyncio.get_running_loop()
        later = loop.call_later
        monkeypatch.setattr(loop, "call_later", lambda s, *args: booked.append(s) or later(s, *args))
        call: RemoteCall[int] = RemoteCall()
        threading.Timer(0.1, call._settle, [1]).start()
        assert await call == 1
        seen = len(booked)
        assert seen >= 2
        await asyncio.sleep(0.1)
        assert [one for one in booked[seen:] if one == 0.01] == []

    asyncio.run(cell())
