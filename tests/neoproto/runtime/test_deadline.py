from __future__ import annotations

import contextvars
import math
import threading
import time
import weakref

import pytest

from neoproto.runtime.deadline import (
    DeadlineWatch,
    budget,
    deadline_after,
    deadline_of,
    remaining,
    set_deadline,
)


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


def test_a_deadline_travels_as_what_is_left_of_it() -> None:
    assert budget(math.inf) is None
    assert deadline_of(None) == math.inf
    left = budget(time.monotonic() + 5)
    assert left is not None
    assert 4 < left <= 5
    assert deadline_of(left) == pytest.approx(time.monotonic() + 5, abs=1)


def test_the_watch_runs_what_is_due_in_order_and_ends() -> None:
    watch = DeadlineWatch(lambda _: True)
    order: list[int] = []
    busy, added, done = threading.Event(), threading.Event(), threading.Event()
    now = time.monotonic()

    def hold(_: int) -> None:
        busy.set()
        added.wait(10)

    watch.add(now - 3, hold, 0)
    assert busy.wait(10)
    watch.add(now - 1, lambda number: (order.append(number), done.set())[0], 2)
    watch.add(now - 2, order.append, 1)
    watch.add(now + 60, order.append, 3)
    watch.add(math.inf, order.append, 4)
    added.set()
    assert done.wait(10)
    watch.close()
    assert "neoproto-deadlines" not in [thread.name for thread in threading.enumerate()]
    watch.add(now, order.append, 5)
    assert order == [1, 2]


def test_a_nearer_deadline_wakes_the_watch() -> None:
    watch = DeadlineWatch(lambda _: True)
    done = threading.Event()
    watch.add(time.monotonic() + 3600, print, 0)
    watch.add(time.monotonic() + 0.01, lambda _: done.set(), 1)
    assert done.wait(10)
    watch.close()


def test_the_watch_forgets_what_is_not_wanted_any_more() -> None:
    class Callback:
        def __call__(self, _: int) -> None: ...

    far = time.monotonic() + 3600
    watch = DeadlineWatch(lambda number: number == 0)
    kept, dropped = Callback(), Callback()
    watch.add(far, kept, 0)
    watch.add(far, dropped, 1)
    held = [weakref.ref(one) for one in (kept, dropped)]
    del kept, dropped
    for number in range(2, 3000):
        watch.add(far, print, number)
    assert [one() is not None for one in held] == [True, False]
    watch.close()
