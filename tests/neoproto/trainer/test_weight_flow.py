"""Tickets: versions in order, and the two points that a loop may wait for."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from neoproto.errors import WeightsNotServed
from neoproto.trainer.metrics.phases import PhaseClock
from neoproto.trainer.tasks import owned_tasks
from neoproto.trainer.weight_flow import DrivenFlow, PulledFlow
from neoproto.weights import WeightVersion
from tests.neoproto.trainer.fakes import World

V = [WeightVersion(epoch=0, n=n) for n in range(3)]


class FakeStatus:
    def __init__(self, served: bool = True) -> None:
        self.served, self.asked = served, list[tuple[tuple[str, ...], WeightVersion, float]]()

    async def wait_serving(self, replicas: Sequence[str], version: WeightVersion, timeout: float) -> bool:
        self.asked.append((tuple(replicas), version, timeout))
        return self.served


def run(main: Any) -> None:
    asyncio.run(asyncio.wait_for(main(), 10))


def test_a_driven_version_is_committed_by_a_call_to_all_replicas() -> None:
    world = World()

    async def main() -> None:
        async with owned_tasks() as tasks:
            flow = DrivenFlow(world.workers(), tasks, limit=7.0)
            with pytest.raises(ValueError, match="no weights were published yet"):
                _ = flow.newest
            clock = PhaseClock()
            for version in V:
                ticket = flow.publish()
                assert flow.newest is ticket
                await ticket.committed(clock)
                assert world.served[-1] == ticket.version == version
            assert clock.metrics()["timing_s/update_weights"] > 0

    run(main)
    assert world.order() == ["publish_weights", "update_weights"] * 3
    assert {call.timeout for call in world.calls} == {7.0}


def test_a_pulled_version_is_committed_without_a_call_to_rollout() -> None:
    world, status = World(), FakeStatus()

    async def main() -> None:
        async with owned_tasks() as tasks:
            flow = PulledFlow(world.workers(), tasks, status, ["rollout/0", "rollout/1"], limit=7.0)
            await flow.publish().committed(PhaseClock(), limit=3.0)
            assert [call.group for call in world.calls] == ["actor"]
            assert status.asked == [(("rollout/0", "rollout/1"), V[0], 3.0)]
            status.served = False
            with pytest.raises(WeightsNotServed, match=r"0\.1 are not served by all of rollout/0, rollout/1"):
                await flow.publish().committed(PhaseClock())

    run(main)


def test_publishing_does_not_hold_up_the_trainer_and_its_failure_ends_the_run() -> None:
    world = World()
    let_go = asyncio.Event()

    async def publish(version: WeightVersion) -> None:
        await let_go.wait()
        raise OSError("no room")

    world.publish = publish  # type: ignore[method-assign,assignment]
    went_on: list[WeightVersion] = []

    async def main() -> None:
        async with owned_tasks() as tasks:
            flow = PulledFlow(world.workers(), tasks, FakeStatus(), ["rollout/0"], limit=7.0)
            went_on.append(flow.publish().version)
            let_go.set()
            await asyncio.Event().wait()

    with pytest.raises(OSError, match="no room"):
        run(main)
    assert went_on == V[:1]
