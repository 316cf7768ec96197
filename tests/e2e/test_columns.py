"""The table of columns and meta_info (`neoproto/data/schema.py`) is what a real step and validation have."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any, get_args

import pytest

from neoproto.data.schema import COLUMNS, META_INFO, STAGES, Column, Stage, columns_after

ROOT = Path(__file__).resolve().parents[2]
PROMPTS, SAMPLES, P, R = 8, 4, 32, 2
OPTIONS = (
    # Everything that adds a column. Two tokens are too few for any answer: rows are cut.
    f"data.max_prompt_length={P}",
    f"data.max_response_length={R}",
    "algorithm.truncated=mask",
    "algorithm.use_kl_in_reward=true",
    "algorithm.rollout_correction.rollout_is=token",
    "reward.custom_reward_function.path=reward.py",
    "trainer.log_samples=true",
    "trainer.total_training_steps=1",
    "trainer.save_freq=-1",
)
REWARD = """\
def compute_score(data_source, solution_str, ground_truth, extra_info):
    return {"score": 1.0, "length": len(solution_str)}
"""


def described(columns: dict[str, Column], rows: int) -> dict[str, list[Any]]:
    sizes = {"B": rows, "P": P, "R": R, "P+R": P + R}
    return {
        name: [[sizes[size] for size in column.shape.strip("[]").split(", ")], column.dtype]
        for name, column in columns.items()
    }


@pytest.mark.e2e
def test_a_step_and_a_validation_have_what_the_table_lists(
    tmp_path: Path, built_in_model: Path, cache: Path, user_env: dict[str, str]
) -> None:
    (tmp_path / "reward.py").write_text(REWARD, encoding="utf-8")
    env = user_env | {
        "NEOPROTO_CACHE": str(cache), "PYTHONPATH": str(ROOT), "COLUMNS_SEEN": str(tmp_path / "columns.json"),
    }  # fmt: skip
    script = ROOT / "tests" / "e2e" / "walks" / "columns.py"
    command = [sys.executable, str(script), "--config-name", "ppo_monarch", "+smoke=tiny", *OPTIONS]
    done = subprocess.run(
        [*command, f"runtime.run_dir={tmp_path / 'run'}"],
        cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    seen = json.loads((tmp_path / "columns.json").read_text(encoding="utf-8"))

    training = {one.name: one.dtype for one in META_INFO if one.kind != "validation"}
    stages: tuple[Stage, ...] = get_args(Stage)
    for stage in stages:
        expected = {name: one for name, one in columns_after(stage).items() if name != "vote"}
        assert seen[stage]["columns"] == described(expected, PROMPTS * (1 if stage == "prompts" else SAMPLES))
        assert seen[stage]["meta_info"] == training
    assert seen["update"] == seen["estimate"]

    validated = {
        one.name: one
        for one in COLUMNS
        if (STAGES[one.writer] in ("prompts", "generate") and one.last is None) or one.writer == "reward"
    }
    found = seen["validation"]
    assert found["columns"] == described(validated, found["columns"]["uid"][0][0])
    assert found["meta_info"] == {one.name: one.dtype for one in META_INFO}
