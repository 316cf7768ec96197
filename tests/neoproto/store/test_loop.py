import asyncio
import contextvars
import threading
import time

import pytest

from neoproto.errors import StoreClosed, StoreError
from neoproto.store.loop import LoopThread, run_in_thread

MARK = contextvars.ContextVar("mark", default="unset")


@pytest.fixture
def loop():
    token = MARK.set("made here")
    loop = LoopThread("test loop")
    MARK.reset(token)
    yield loop
    loop.close()


async def mark():
    await asyncio.sleep(0)
    return MARK.get()


def test_every_task_runs_in_the_context_the_loop_was_made_in(loop):
    results = [loop.submit(mark()).result(5)]

    def elsewhere():
        MARK.set("other thread")
        results.append(loop.submit(mark()).result(5))

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert results == ["made here", "made here"]


def test_a_future_is_awaited_on_any_loop_and_waited_for_on_any_thread(loop):
    async def main():
        return await loop.submit(mark())

    assert asyncio.run(main()) == "made here"
    with pytest.raises(TimeoutError):
        loop.submit(asyncio.sleep(5)).result(0.01)


def test_errors_reach_the_waiting_thread(loop):
    async def fail():
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        loop.submit(fail()).result(5)


def test_closing_ends_what_is_under_way_and_refuses_more(loop):
    pending = loop.submit(asyncio.sleep(60))
    loop.submit(asyncio.sleep(0)).result(5)
    loop.close()
    loop.close()
    with pytest.raises(StoreClosed, match="test loop was closed before the operation ended"):
        pending.result(5)
    with pytest.raises(StoreClosed, match="test loop is closed"):
        loop.submit(asyncio.sleep(0))
    assert not any(thread.name == "test loop" for thread in threading.enumerate())


def test_who_is_cancelled_waits_for_the_thread():
    started, release, ended = threading.Event(), threading.Event(), []

    def work():
        started.set()
        assert release.wait(30)
        ended.append(True)

    async def main():
        task = asyncio.ensure_future(run_in_thread(work))
        await asyncio.to_thread(started.wait, 30)
        task.cancel()
        await asyncio.sleep(0)
        await asyncio.sleep(0)  # the cancellation has been delivered
        assert not task.done()
        release.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert ended

    asyncio.run(main())
    assert asyncio.run(run_in_thread(lambda: 7)) == 7


def test_who_is_cancelled_again_still_waits_for_the_thread(loop):
    """A lost store is failed, then closed: its operations are cancelled twice."""
    started, release, ended, left = threading.Event(), threading.Event(), [], []

    def work():
        started.set()
        assert release.wait(30)
        ended.append(True)

    async def put():
        try:
            await run_in_thread(work)
        finally:
            left.append(list(ended))

    future = loop.submit(put())
    assert started.wait(30)
    loop.fail("the store is lost")
    time.sleep(0.1)  # the first cancellation has been delivered
    closing = threading.Thread(target=loop.close)
    closing.start()
    closing.join(0.2)
    assert not left
    release.set()
    with pytest.raises(StoreError, match="the store is lost"):
        future.result(30)
    closing.join(30)
    assert left == [[True]]
