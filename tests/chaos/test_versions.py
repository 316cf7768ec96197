"""Which weights made a sample, told from log-probs; the whole check is on a real run in `test_chaos`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import LlamaConfig, LlamaForCausalLM

from tests.chaos import versions
from tests.chaos.verdict import Checked


def test_nothing_to_check(tmp_path: Path) -> None:
    assert versions.check_samples(tmp_path, {}) == Checked()


def test_rows_that_are_cut_off_are_left_out(tmp_path: Path) -> None:
    folder = tmp_path / "samples"
    folder.mkdir()
    (folder / "step_2.jsonl").write_text('{"step": 2}\n{"st')
    (folder / "step_1.jsonl").write_text('{"step": 1}\n')
    (folder / "step_1.superseded.jsonl").write_text("x")
    assert versions.sampled(tmp_path) == [{"step": 1}, {"step": 2}]


def test_only_whole_checkpoints_count_by_the_version_they_hold(tmp_path: Path) -> None:
    for step, whole in ((3, True), (4, False)):
        actor = tmp_path / "checkpoints" / f"global_step_{step}" / "actor"
        actor.mkdir(parents=True)
        (actor / "shard-00000-of-00001.safetensors").touch()
        (actor.parent / "trainer.json").write_text(json.dumps({"version": [0, step + 10]}))
        if whole:
            (actor.parent / "manifest.json").touch()
    assert list(versions.saved_versions(tmp_path)) == [13]


def test_each_token_is_compared_with_its_own_version() -> None:
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=16, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2
        )
    ).eval()
    row = {"prompt_ids": [1, 2], "response_ids": [3, 4], "weight_versions": [6, 7], "log_probs": [0.0, 0.0]}
    longer = row | {"prompt_ids": [5, 6, 7], "response_ids": [1, 2]}
    (first, other), (second, _) = (versions.differences(model, [row, longer], one, 1.0) for one in (6, 7))
    assert versions.differences(model, [longer], 6, 1.0) == pytest.approx([other], abs=1e-6)
    told = row | {"log_probs": [-first, -second]}
    assert versions.differences(model, [told, longer], 6, 1.0) == pytest.approx([0.0, other], abs=1e-6)
    assert versions.differences(model, [told], 7, 1.0) == pytest.approx([0.0], abs=1e-6)
    assert versions.differences(model, [told], 7, 0.5)[0] > 1e-3
    slightly = row | {"log_probs": [-first, -second - 0.01]}
    assert versions.differences(model, [slightly], 7, 1.0) == pytest.approx([0.01], abs=1e-6)
