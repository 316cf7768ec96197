"""Training samples: what is written of a step, and that a run without the option pays nothing for it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from neoproto.data import DataProto
from neoproto.trainer.metrics.samples import SampleLog


def batch() -> DataProto:
    """P = 3 and R = 3: a short prompt with a whole answer on two versions, and a short answer."""
    return DataProto.from_dict(
        tensors={
            "prompts": torch.tensor([[0, 5, 6], [7, 8, 9]]),
            "responses": torch.tensor([[1, 2, 3], [4, 5, 0]]),
            "attention_mask": torch.tensor([[0, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 0]]),
            "rollout_log_probs": torch.tensor([[-0.5, -0.25, -1.0], [-2.0, -0.125, 0.0]]),
            "weight_versions": torch.tensor([[3, 3, 4], [4, 4, -1]]),
            "token_level_scores": torch.tensor([[0.0, 0.0, 1.5], [0.0, -1.0, 0.0]]),
        },
        non_tensors={
            "uid": np.array(["a", "b"], dtype=object),
            "data_source": np.array(["letters", "words"], dtype=object),
            "raw_prompt": [
                [{"role": "system", "content": "spell"}, {"role": "user", "content": "née"}],
                [{"role": "user", "content": "b?"}],
            ],
            "reward_model": [{"ground_truth": "x"}, {"ground_truth": "y"}],
            "response_text": np.array(["é", "<b>"], dtype=object),
        },
    )


def test_rows_have_texts_and_every_generated_token(tmp_path: Path) -> None:
    log = SampleLog(tmp_path / "samples")
    assert log.on
    log.log(2, batch())
    first, second = map(json.loads, (tmp_path / "samples" / "step_2.jsonl").read_text().splitlines())
    assert first == {
        "step": 2,
        "uid": "a",
        "data_source": "letters",
        "prompt": "spell\nnée",
        "answer": "é",
        "ground_truth": "x",
        "score": 1.5,
        "prompt_ids": [5, 6],
        "response_ids": [1, 2, 3],
        "log_probs": [-0.5, -0.25, -1.0],
        "weight_versions": [3, 3, 4],
    }
    assert (second["response_ids"], second["log_probs"]) == ([4, 5], [-2.0, -0.125])
    assert (second["weight_versions"], second["score"]) == ([4, 4], -1.0)


def test_nothing_is_read_or_written_without_a_folder() -> None:
    log = SampleLog()
    assert not log.on
    log.log(1, batch().select("prompts"))


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "samples").write_text("a file")
    with pytest.raises(OSError, match="samples"):
        SampleLog(tmp_path / "samples").log(1, batch())


def test_a_score_that_is_not_finite_is_null(tmp_path: Path) -> None:
    scored = batch()
    scored.batch["token_level_scores"] = torch.tensor([[0.0, 0.0, torch.nan], [0.0, torch.inf, 0.0]])
    SampleLog(tmp_path).log(1, scored)
    rows = [json.loads(line) for line in (tmp_path / "step_1.jsonl").read_text().splitlines()]
    assert [row["score"] for row in rows] == [None, None]
