"""A few faults of `scripts/chaos` on real runs; the long series is for people."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.chaos.harness import play
from tests.chaos.plan import Plan
from tests.chaos.verdict import PASSED, Verdict
from tests.chaos.versions import check_samples

pytestmark = pytest.mark.e2e

STEPS = {"delay": 6, "full-shm": 6, "kill-volume": 60, "full-disk": 60}
"""More than it will make where a run cannot survive: on a busy machine six are over before the fault."""


def shift_versions(run_folder: Path) -> None:
    """Have every sample name the version after its own."""
    for path in (run_folder / "samples").iterdir():
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        for row in rows:
            row["weight_versions"] = [number + 1 for number in row["weight_versions"]]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.mark.parametrize(
    ("kind", "mode", "step"),
    [
        ("delay", "decoupled_async", 2),
        ("kill-volume", "sync", 1),
        ("full-shm", "separate_async", 2),
        ("full-disk", "decoupled_async", 1),
    ],
)
def test_a_run_goes_on_or_ends_well(
    kind: str, mode: str, step: int, cache: Path, user_env: dict[str, str], tmp_path: Path
) -> None:
    plan = Plan(index=0, mode=mode, kind=kind, phase="step", step=step, delay_s=0.3, pause_s=2.0, choice=0.7)
    env = user_env | {"NEOPROTO_CACHE": str(cache)}
    words = (f"trainer.total_training_steps={STEPS[kind]}", "trainer.val_before_train=false")
    result = play(plan, tmp_path / "chaos", keep=kind == "delay", overrides=words, env=env)
    if result.verdict is Verdict.NOT_POSSIBLE:
        pytest.skip(result.detail)
    assert result.verdict in PASSED, result
    assert result.fault
    if kind == "full-disk":
        assert result.verdict is Verdict.ENDED, result
    if kind == "delay":
        assert result.tokens > 0, "every sample was compared with the weights it names"
        shift_versions(tmp_path / "chaos" / "run")
        assert "is said to be of version" in check_samples(tmp_path / "chaos" / "run", env).wrong
