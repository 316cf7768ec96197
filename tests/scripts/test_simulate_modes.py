"""Small simulations: the loops of a real run, on a virtual clock."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"


@pytest.fixture(scope="module")
def scripts() -> ModuleType:
    """`simulate_modes`, imported as a script imports its neighbours."""
    sys.path.insert(0, str(SCRIPTS))
    try:
        import simulate_modes
    finally:
        sys.path.remove(str(SCRIPTS))
    return simulate_modes


def run(scripts: ModuleType, mode: str, **options: Any) -> Any:
    usual: dict[str, Any] = {"replicas": 2, "prompts": 8, "slots": 8, "steps": 9, "per_call": 1}
    return scripts.simulate(scripts.Setup(mode=mode, **(usual | options)))


def test_decoupled_keeps_training_busy_and_the_others_wait_for_weights_or_samples(
    scripts: ModuleType,
) -> None:
    outcomes = {mode: run(scripts, mode, warmup_batches=3) for mode in scripts.MODES}
    sync, separate, decoupled = (outcomes[mode] for mode in scripts.MODES)
    assert decoupled.step_s <= 1.1 * 5.0
    assert separate.step_s >= 5.0 + 1.35 - 1e-6
    assert sync.step_s >= separate.step_s
    assert decoupled.training_idle == pytest.approx(1 - 5.0 / decoupled.step_s)
    assert sync.staleness == 0
    assert 0 < decoupled.staleness <= decoupled.staleness_max <= 4
    assert 0 < decoupled.controller_cpu_s < 5.0


def test_generation_bounds_the_steps_where_it_is_the_slower_part(scripts: ModuleType) -> None:
    setup = scripts.Setup(mode="decoupled_async", replicas=1, prompts=32, slots=8, steps=9, per_call=1)
    assert setup.bound == setup.generation_bound == pytest.approx(4 * 3.0 * 1.19722, rel=1e-4)
    outcome = scripts.simulate(setup)
    assert setup.bound <= outcome.step_s <= 1.4 * setup.bound
    assert outcome.rollout_idle < 0.3


def test_the_same_seed_gives_the_same_run(scripts: ModuleType) -> None:
    first, second, other = (
        run(scripts, "decoupled_async", prompts=32, seed=seed).rounded() for seed in (1, 1, 2)
    )
    cost = "controller_cpu_s"
    assert first | {cost: 0} == second | {cost: 0}
    assert first | {cost: 0} != other | {cost: 0}


def test_the_clock_jumps_and_waiting_for_nothing_is_an_error(scripts: ModuleType) -> None:
    async def sleep() -> float:
        await asyncio.sleep(1000.0)
        return asyncio.get_running_loop().time()

    async def wait_for_ever() -> None:
        await asyncio.Event().wait()

    with asyncio.Runner(loop_factory=scripts.VirtualLoop) as runner:
        assert runner.run(sleep()) == pytest.approx(1000.0)
    loop = scripts.VirtualLoop()
    task = loop.create_task(wait_for_ever())
    with pytest.raises(RuntimeError, match="for nothing that will ever happen"):
        loop.run_until_complete(task)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        loop.run_until_complete(task)
    loop.close()


def test_a_report_has_every_figure_and_the_goals(
    scripts: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = "--base-replicas 2 --prompts 8 --replicas 1,2 --slots 4 --per-call 1"
    scripts.main(f"{sizes} --repeats 1 --steps 8".split())
    figures = {row["name"]: row for row in json.loads(capsys.readouterr().out.splitlines()[-1])["figures"]}
    assert figures["decoupled_vs_bound"]["goal"] == "<= 1.1"
    assert figures["bound"]["value"] == 5.0
    assert {f"{mode}/{n}_replicas" for mode in scripts.MODES for n in (1, 2)} <= figures.keys()
    assert figures["controller_cpu_a_replica_1_to_2"]["goal"] == "<= 1.1"
