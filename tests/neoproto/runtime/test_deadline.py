from __future__ import annotations

import contextvars
import math
import threading
import time

import pytest

from neoproto.runtime.deadline import DeadlineWatch, deadline_after, remaining, set_deadline


def test_without_a_call_there_is_no_deadline() -> None:
    assert remaining() == math.inf
    assert deadline_after(None) == math.inf
    assert deadline_after(5) == pytest.approx(time.monotonic() + 5, abs=0.5)
    with pytest.raises(ValueError, match="timeout"):
        deadline_after(-1)
    with pytest.raises(ValueError, match="timeout"):
        deadline_after(math.nan)


def test_nested_calls_inherit_the_smaller_deadline() -> None:
    def body() -> None:
        set_deadline(time.monotonic() + 2.0)
        assert 1.5 < remaining() <= 2.0
        assert deadline_after(100) - time.monotonic() <= 2.0
        assert deadline_after(None) - time.monotonic() <= 2.0
        assert deadline_after(0.5) - time.monotonic() <= 0.5

    contextvars.copy_context().run(body)
    assert remaining() == math.inf


def test_the_watch_runs_callbacks_in_time_and_ends() -> None:
    watch = DeadlineWatch()
    order: list[str] = []
    done = threading.Event()
    now = time.monotonic()
    watch.add(now + 0.2, lambda: (order.append("second"), done.set())[0])
    watch.add(now + 0.05, lambda: order.append("first"))
    watch.add(now + 60, lambda: order.append("never"))
    watch.add(math.inf, lambda: order.append("never"))
    assert done.wait(10)
    assert order == ["first", "second"]
    watch.close()
    assert "neoproto-deadlines" not in [thread.name for thread in threading.enumerate()]
    watch.add(now, lambda: order.append("never"))
    assert order == ["first", "second"]


def test_the_watch_forgets_what_needs_no_watching() -> None:
    watch = DeadlineWatch()
    ran: list[int] = []

    def keep() -> None:
        ran.append(1)

    def drop() -> None:
        ran.append(2)

    watch.add(time.monotonic() + 0.2, keep)
    watch.add(time.monotonic() + 0.1, drop)
    watch.prune(lambda callback: callback is keep)
    time.sleep(0.4)
    watch.close()
    assert ran == [1]
