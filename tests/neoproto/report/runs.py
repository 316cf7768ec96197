"""Run folders as a run would leave them, of any length, without a run."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from neoproto.run.compose import compose

NASTY = (
    '</script ></script><!-- <script> <img src=x onerror="document.title=1"><b>bold</b> & '
    '"quoted" $x^2$ é 漢字'
)
"""Text that a page must show, and not act on."""


@cache
def composed(*overrides: str) -> str:
    return yaml.safe_dump(compose("ppo_monarch", list(overrides), None), sort_keys=False)


def write_run(
    folder: Path,
    *overrides: str,
    steps: int = 6,
    test_freq: int = 3,
    questions: int = 4,
    seed: int = 0,
    answer: str = "wrong",
    nulls: bool = False,
    complete: bool = True,
) -> Path:
    """Write config, metrics and validation samples.

    Args:
        answer: what wrong answers say.
        nulls: every third step has no entropy.
        complete: with the model folder that a finished run has.
    """
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(
        composed(f"trainer.total_training_steps={steps}", *overrides), encoding="utf-8"
    )
    noise = random.Random(seed)
    rows = [validation_row(0)]
    for step in range(1, steps + 1):
        rows.append(step_row(step, steps, noise))
        if nulls and step % 3 == 0:
            rows[-1]["actor/entropy"] = None
        if step % test_freq == 0:
            rows.append(validation_row(step))
    for number, row in enumerate(rows):
        row["time"] = 1_700_000_000.0 + number
    write_rows(folder / "metrics.jsonl", rows)
    (folder / "validation").mkdir()
    for step in range(0, steps + 1, test_freq):
        write_rows(folder / "validation" / f"step_{step}.jsonl", samples(step, questions, answer))
    if complete:
        (folder / "model").mkdir()
        (folder / "model" / "config.json").write_text("{}")
    return folder


def write_rows(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def step_row(step: int, steps: int, noise: random.Random) -> dict[str, Any]:
    done = step / steps
    figures = {
        "critic/score/mean": 0.4 + 0.5 * done + noise.gauss(0, 0.03),
        "critic/rewards/mean": 0.4 + 0.5 * done,
        "critic/returns/mean": 0.5,
        "critic/values/mean": 0.5 * done,
        "actor/entropy": 0.9 * math.exp(-2 * done),
        "actor/ppo_kl": abs(noise.gauss(0, 0.01)),
        "actor/pg_loss": noise.gauss(0, 0.01),
        "actor/pg_clipfrac": 0.02,
        "actor/grad_norm": 1 + abs(noise.gauss(0, 1)),
        "actor/lr": 6e-4 * (1 - done),
        "critic/vf_loss": 0.2 * (1 - done),
        "critic/lr": 1e-3 * (1 - done),
        "reward/errors": 0.0,
        "reward/timeouts": 0.0,
        "response_length/mean": 4.5,
        "response_length/max": 8.0,
        "response_length/min": 1.0,
        "response_length/clip_ratio": 0.01,
        "timing_s/gen": 0.3 + noise.random() * 0.1,
        "timing_s/update_actor": 0.25,
        "timing_s/update_weights": 0.05,
        "timing_s/step": 0.7,
        "perf/throughput": 3500 + noise.random() * 100,
        "perf/total_num_tokens": 3200.0,
        "perf/controller_share": 0.03,
        "training/off_policy/trajectory_staleness/mean": 1.0,
        "training/off_policy/trajectory_staleness/max": 2.0,
        "training/off_policy/trajectory_staleness/min": 0.0,
        "training/off_policy/trajectory_spans/mean": 1.0,
        "training/off_policy/trajectory_spans/max": 1.0,
        "training/off_policy/trajectory_spans/min": 1.0,
        "store/bytes_in": 2_400_000.0 * step,
        "store/held_bytes": 9e6,
        "store/object_bytes": 5e6,
        "training/global_step": step,
    }
    return {"step": step, **figures}


def validation_row(step: int) -> dict[str, Any]:
    return {
        "step": step,
        "val-core/reasoning_gym/spell_backward/acc/greedy": 0.8 + 0.001 * step,
        "val-core/reasoning_gym/spell_backward/acc/mean@1": 0.5 + 0.001 * step,
        "timing_s/testing": 1.5,
    }


def samples(step: int, questions: int, answer: str) -> list[dict[str, Any]]:
    """The first question is learned after step 0, the second is always right, the others never."""
    rows = []
    for number in range(questions):
        right = number == 1 or (number == 0 and step > 0)
        rows.append(
            {
                "step": step,
                "label": "greedy",
                "uid": f"q{number}",
                "data_source": "letters",
                "prompt": f"Spell word{number} backward",
                "answer": f"{number}drow" if right else answer,
                "ground_truth": f"{number}drow",
                "score": float(right),
                "accuracy": float(right),
            }
        )
    return rows
