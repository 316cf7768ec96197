from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace
from typing import Any

import pytest

from neoproto.trainer.metrics import phases
from neoproto.trainer.metrics.phases import PhaseClock


class Seconds:
    """Time that passes as the test says."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(phases, "time", SimpleNamespace(perf_counter=lambda: self.now))

    async def work(self, ends: asyncio.Event, seconds: float = 0.0, error: Exception | None = None) -> str:
        await ends.wait()
        self.now += seconds
        if error is not None:
            raise error
        return "done"


@pytest.fixture
def seconds(monkeypatch: pytest.MonkeyPatch) -> Seconds:
    return Seconds(monkeypatch)


def test_a_wait_is_booked_under_its_phase(seconds: Seconds) -> None:
    async def main() -> dict[str, float]:
        clock, ends = PhaseClock(), asyncio.Event()
        ends.set()
        assert await clock.wait("gen", seconds.work(ends, 2.0)) == "done"
        assert await clock.wait("gen", seconds.work(ends, 1.0)) == "done"
        seconds.now += 1.0
        return clock.metrics()

    assert asyncio.run(main()) == {"timing_s/gen": 3.0, "timing_s/step": 4.0, "perf/controller_share": 0.25}


def test_overlapping_waits_count_once_in_the_controllers_share(seconds: Seconds) -> None:
    async def main() -> dict[str, float]:
        clock, ends = PhaseClock(), asyncio.Event()
        waits = [asyncio.create_task(clock.wait(phase, seconds.work(ends))) for phase in ("a", "b")]
        await asyncio.sleep(0)
        seconds.now += 2.0
        ends.set()
        await asyncio.gather(*waits)
        seconds.now += 2.0
        return clock.metrics()

    assert asyncio.run(main()) == {
        "timing_s/a": 2.0,
        "timing_s/b": 2.0,
        "timing_s/step": 4.0,
        "perf/controller_share": 0.5,
    }


def test_a_wait_that_fails_ends_its_phase(seconds: Seconds) -> None:
    async def main() -> PhaseClock:
        clock, ends = PhaseClock(), asyncio.Event()
        ends.set()
        with pytest.raises(ValueError, match="no"):
            await clock.wait("gen", seconds.work(ends, 1.0, ValueError("no")))
        return clock

    assert asyncio.run(main()).metrics()["timing_s/gen"] == 1.0


def test_a_method_can_be_called_by_its_name() -> None:
    class Workers:
        def within(self, timeout: float) -> Any:
            async def go(value: int) -> tuple[int, float]:
                return value, timeout

            return SimpleNamespace(go=go)

    clock, started = PhaseClock(), time.perf_counter()
    assert asyncio.run(clock.call("gen", Workers(), "go", 3, timeout=7.0)) == (3, 7.0)
    assert clock.started <= started
    assert "timing_s/gen" in clock.metrics()
