"""Blocking work beside an event loop."""

from __future__ import annotations

import asyncio
import contextvars
import threading

import pytest

from neoproto.threads import on_thread

WHO = contextvars.ContextVar("WHO", default="nobody")


def test_a_thread_hands_on_its_result_and_has_the_context() -> None:
    async def body() -> tuple[str, str]:
        WHO.set("the caller")
        return await on_thread(lambda: (WHO.get(), threading.current_thread().name), name="beside")

    assert asyncio.run(body()) == ("the caller", "beside")


@pytest.mark.parametrize("error", [OSError("disk"), TimeoutError("its own"), SystemExit(3)])
def test_a_thread_hands_on_its_error_as_it_is(error: BaseException) -> None:
    def fail() -> None:
        raise error

    with pytest.raises(type(error)) as caught:
        asyncio.run(on_thread(fail, name="beside"))
    assert caught.value is error


def test_a_result_that_came_too_late_is_given_back() -> None:
    begun, go, given = threading.Event(), threading.Event(), threading.Event()
    back: list[str] = []

    def work() -> str:
        begun.set()
        go.wait(10)
        return "late"

    def take(result: str) -> None:
        back.append(result)
        given.set()

    async def body() -> None:
        task = asyncio.create_task(on_thread(work, name="beside", unwanted=take))
        await asyncio.to_thread(begun.wait, 10)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(body())  # ends although the thread has not
    go.set()
    assert given.wait(10)
    assert back == ["late"]


def test_a_result_that_came_in_the_same_turn_as_the_cancellation_is_given_back() -> None:
    ended, given = threading.Event(), threading.Event()
    back: list[str] = []

    def work() -> str:
        ended.set()
        return "just in time"

    def take(result: str) -> None:
        back.append(result)
        given.set()

    async def body() -> None:
        task = asyncio.create_task(on_thread(work, name="beside", unwanted=take))
        await asyncio.sleep(0)
        assert ended.wait(10)
        for thread in threading.enumerate():
            if thread.name == "beside":
                thread.join(10)  # the loop stands still: the result waits for its next turn
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(body())
    assert given.wait(10)
    assert back == ["just in time"]
