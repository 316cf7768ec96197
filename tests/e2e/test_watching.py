"""A run that is watched in every way at once: services, a trace, a report; and what they leave behind."""

from __future__ import annotations

import json
from importlib import util
from itertools import product
from typing import Any

import pytest

from neoproto.report.cli import main as report
from tests.e2e.command import BOUND_S, Start

pytestmark = pytest.mark.e2e
SERVICES = [name for name in ("wandb", "mlflow") if util.find_spec(name) is not None]


def intervals(events: list[dict[str, Any]], lane: str, name: str) -> list[tuple[float, float]]:
    """Start and end of the events of one name in the lanes that begin so."""
    lanes = {
        one["pid"] for one in events if one["name"] == "process_name" and one["args"]["name"].startswith(lane)
    }
    return [
        (one["ts"], one["ts"] + one["dur"]) for one in events if one["pid"] in lanes and one["name"] == name
    ]


def test_a_run_is_logged_traced_and_reported(
    start: Start, user_env: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    user_env |= {"WANDB_MODE": "offline", "MLFLOW_DISABLE_TELEMETRY": "true"}
    command = start(
        "+smoke=tiny",
        "trainer.mode=decoupled_async",
        "trainer.total_training_steps=20",  # in a few of them, on a busy machine, nothing may overlap
        "trainer.trace=true",
        f"trainer.logger=[{','.join(['console', *SERVICES])}]",
    )
    done = command.wait()
    assert (done.code, done.errors) == (0, ""), done.out
    assert command.left_after(BOUND_S) == []
    events = json.loads((done.folder / "trace.json").read_text())["traceEvents"]
    for lane, name, least in (
        ("actor", "update_actor", 5),
        ("actor", "publish_weights", 6),
        ("critic", "update_critic", 5),
        ("rollout", "pull weights", 3),
        ("rollout", "load weights", 3),
        ("reward", "compute_score", 5),
        ("controller", "gen", 5),
        ("controller", "step 5", 1),
    ):
        assert len(intervals(events, lane, name)) >= least, (lane, name)
    generating = intervals(events, "rollout", "generate_sequences")
    training = [
        one
        for lane, name in (
            ("actor", "compute_log_prob"),
            ("actor", "update_actor"),
            ("critic", "compute_values"),
            ("critic", "update_critic"),
        )
        for one in intervals(events, lane, name)
    ]
    assert any(a < d and c < b for (a, b), (c, d) in product(generating, training))
    for name in SERVICES:
        assert f"\n{name}: " in done.out
    assert "wandb" not in SERVICES or any(done.folder.glob("wandb/offline-run-*/run-*.wandb"))
    assert "mlflow" not in SERVICES or any((done.folder / "mlruns").rglob("critic/score/mean"))
    assert report([str(done.folder)]) == 0
    assert capsys.readouterr().out.startswith(f"{done.folder / 'report.html'} (")
