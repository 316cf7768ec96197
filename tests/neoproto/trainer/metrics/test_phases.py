from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from neoproto.trainer.metrics.phases import PhaseClock


class SlowGroup:
    name, world_size = "slow", 1

    async def submit(
        self,
        method: str,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        timeout: float | None = None,
    ) -> Any:
        await asyncio.sleep(args[0])
        if method == "fail":
            raise ValueError("no")
        return method, timeout


def test_call_passes_the_deadline_on_and_books_the_phase() -> None:
    clock = PhaseClock()
    assert asyncio.run(clock.call("gen", SlowGroup(), "go", 0.05, timeout=7.0)) == ("go", 7.0)
    metrics = clock.metrics()
    assert metrics["timing_s/gen"] >= 0.05
    assert metrics["timing_s/step"] >= metrics["timing_s/gen"]


def test_overlapping_calls_count_once_in_the_controllers_share() -> None:
    async def both() -> dict[str, float]:
        clock = PhaseClock()
        calls = [clock.call(phase, SlowGroup(), "go", 0.2, timeout=1.0) for phase in ("a", "b")]
        await asyncio.gather(*calls)
        await asyncio.sleep(0.2)
        return clock.metrics()

    metrics = asyncio.run(both())
    assert metrics["timing_s/a"] + metrics["timing_s/b"] >= 0.4
    # Half the step was waited for workers; counting both calls would leave the controller nothing.
    assert 0.3 <= metrics["perf/controller_share"] <= 0.7


def test_a_failing_call_still_ends_its_phase() -> None:
    clock = PhaseClock()
    with pytest.raises(ValueError, match="no"):
        asyncio.run(clock.call("gen", SlowGroup(), "fail", 0.01, timeout=1.0))
    assert clock.metrics()["timing_s/gen"] > 0
