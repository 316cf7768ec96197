from __future__ import annotations

import math

import pytest
import torch

from neoproto.trainer.metrics import batch_metrics, logprob_difference, spread


def columns() -> dict[str, torch.Tensor]:
    """Two rows: prompt lengths 2 and 3 (of 3), response lengths 1 and 2 (of 2); the second is left out."""
    zeros = torch.zeros(2, 2)
    return {
        "response_mask": torch.tensor([[1, 0], [0, 0]]),
        "attention_mask": torch.tensor([[0, 1, 1, 1, 0], [1, 1, 1, 1, 1]]),
        "truncated": torch.tensor([False, True]),
        "token_level_scores": torch.tensor([[1.0, 0.0], [0.0, 0.5]]),
        "token_level_rewards": torch.tensor([[0.75, 0.0], [0.0, 0.5]]),
        "advantages": torch.tensor([[2.0, 9.0], [9.0, 9.0]]),
        "returns": zeros,
        "old_log_probs": torch.tensor([[math.log(0.5), 0.0], [0.0, 0.0]]),
        "rollout_log_probs": torch.tensor([[math.log(0.25), 0.0], [0.0, 0.0]]),
    }


def test_lengths_come_from_the_attention_mask_even_of_rows_left_out_of_the_loss() -> None:
    figures = batch_metrics(columns())
    assert figures["response_length/mean"] == 1.5
    assert figures["prompt_length/max"] == 3
    assert figures["response_length/clip_ratio"] == 0.5
    assert figures["perf/total_num_tokens"] == 8


def test_scores_are_per_sample_and_advantages_per_token_under_the_mask() -> None:
    figures = batch_metrics(columns())
    assert figures["critic/score/mean"] == 0.75
    assert figures["critic/rewards/max"] == 0.75
    assert figures["critic/advantages/max"] == 2.0
    assert "critic/values/mean" not in figures


def test_logprob_difference_ignores_padding() -> None:
    figures = logprob_difference(
        torch.tensor([[-1.0, 5.0]]), torch.tensor([[-1.5, -5.0]]), torch.tensor([[1, 0]]).bool()
    )
    assert figures["training/rollout_log_probs_diff_max"] == pytest.approx(0.5)
    assert figures["training/rollout_probs_diff_mean"] == pytest.approx(math.exp(-1.0) - math.exp(-1.5))


def test_spread_of_nothing_is_nothing() -> None:
    assert spread("x", torch.zeros(0)) == {}
