from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence

import pytest

from neoproto.trainer.metrics.background import BackgroundTracker, NotOpened
from neoproto.trainer.metrics.service_runs import RunStart


class Service:
    """A tracker that notes what it is told, and does what it is told to."""

    def __init__(
        self,
        on_log: Callable[[int], object] = lambda step: None,
        on_begin: Callable[[], object] = lambda: None,
    ) -> None:
        self.rows: list[tuple[int, dict[str, float]]] = []
        self.closed: bool | None = None
        self.thread: str | None = None
        self._on_log, self._on_begin = on_log, on_begin

    def begin(self, starts: Sequence[RunStart]) -> None:
        self._on_begin()
        self.rows.append((-starts[-1].start, {}))

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self.thread = threading.current_thread().name
        self._on_log(step)
        self.rows.append((step, dict(metrics)))

    def close(self, failed: bool) -> None:
        self.closed = failed


def test_a_service_gets_every_row_in_order_in_a_thread_of_its_own() -> None:
    said: list[str] = []
    service = Service()
    tracker = BackgroundTracker("there", lambda: service, said.append)
    for step in range(50):
        tracker.log({"a": float(step)}, step)
    tracker.close(failed=True)
    assert service.rows == [(step, {"a": float(step)}) for step in range(50)]
    assert service.thread == "tracker-there"
    assert (service.closed, said) == (True, [])


def test_a_service_that_fails_is_said_once_and_tried_again() -> None:
    def flaky(step: int) -> None:
        if step in (1, 2):
            raise ConnectionError("no route\nto host")

    said: list[str] = []
    service = Service(flaky)
    tracker = BackgroundTracker("there", lambda: service, said.append)
    for step in range(5):
        tracker.log({}, step)
    tracker.close()
    assert [step for step, _ in service.rows] == [0, 3, 4]
    assert said == [
        "warning: there failed, the run continues without it: ConnectionError: no route to host",
        "warning: 2 rows of metrics did not reach there",
    ]


def test_a_service_is_told_of_a_start_before_its_rows_and_again_until_it_took_it() -> None:
    failures = iter([ConnectionError("no route"), None, None])

    def flaky() -> None:
        if (error := next(failures)) is not None:
            raise error

    said: list[str] = []
    service = Service(on_begin=flaky)
    tracker = BackgroundTracker("there", lambda: service, said.append)
    starts = [RunStart(start=number, step=0, time=0.0) for number in (1, 2)]
    tracker.begin(starts[:1])
    tracker.log({}, 1)
    tracker.log({}, 2)
    tracker.begin(starts)
    tracker.log({}, 1)
    tracker.close()
    assert [step for step, _ in service.rows] == [1, -1, 2, -2, 1]
    # No row is lost.
    assert said == ["warning: there failed, the run continues without it: ConnectionError: no route"]


def test_a_service_that_hangs_holds_nobody_up() -> None:
    stuck = threading.Event()
    said: list[str] = []
    tracker = BackgroundTracker(
        "there",
        lambda: Service(lambda step: stuck.wait(30)),
        said.append,
        close_timeout=0.2,
        most_waiting=3,
    )
    started = time.monotonic()
    for step in range(10):
        tracker.log({}, step)
    tracker.close()
    assert time.monotonic() - started < 10
    stuck.set()
    assert said[0] == "warning: there failed, the run continues without it: it is too slow"
    assert "warning: there did not finish within 0.2 s and is left behind" in said
    assert said[-1].endswith("rows of metrics did not reach there")


def test_a_service_that_cannot_be_opened_says_why() -> None:
    def refuse() -> Service:
        raise PermissionError("no key\nis set")

    with pytest.raises(NotOpened, match=r"^PermissionError: no key is set$"):
        BackgroundTracker("there", refuse, print)


def test_opening_is_bounded() -> None:
    stuck = threading.Event()

    def hang() -> Service:
        stuck.wait(30)
        return Service()

    with pytest.raises(NotOpened, match=r"did not open within 0\.2 s"):
        BackgroundTracker("there", hang, print, open_timeout=0.2)
    stuck.set()
