from __future__ import annotations

import math

import pytest
import torch

from neoproto.algorithms.rollout_correction import importance_weights
from neoproto.trainer.metrics.batch import batch_metrics, importance_metrics, logprob_difference, spread


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
    }


def test_lengths_come_from_the_attention_mask_even_of_rows_left_out_of_the_loss() -> None:
    metrics = batch_metrics(columns())
    assert metrics["response_length/mean"] == 1.5
    assert metrics["prompt_length/max"] == 3
    assert metrics["response_length/clip_ratio"] == 0.5
    assert metrics["perf/total_num_tokens"] == 8


def test_scores_are_per_sample_and_advantages_per_token_under_the_mask() -> None:
    metrics = batch_metrics(columns())
    assert metrics["critic/score/mean"] == 0.75
    assert metrics["critic/rewards/max"] == 0.75
    assert metrics["critic/advantages/max"] == 2.0
    assert "critic/values/mean" not in metrics


def test_answers_without_a_score_are_counted_by_kind() -> None:
    assert "reward/timeouts" not in batch_metrics(columns())
    failed = torch.tensor([1, 0], dtype=torch.int8)
    metrics = batch_metrics(columns() | {"reward_failed": failed})
    assert (metrics["reward/timeouts"], metrics["reward/errors"]) == (1.0, 0.0)


def test_logprob_difference_agrees_with_a_naive_loop_and_ignores_padding() -> None:
    rollout, policy = [-1.0, -2.0, -0.5], [-1.5, -1.75, -0.5]
    metrics = logprob_difference(
        torch.tensor([[*rollout[:2], 5.0], [rollout[2], math.nan, math.inf]]),
        torch.tensor([[*policy[:2], -5.0], [policy[2], 0.0, math.inf]]),
        torch.tensor([[1, 1, 0], [1, 0, 0]]),
    )
    probs = [abs(math.exp(r) - math.exp(p)) for r, p in zip(rollout, policy, strict=True)]
    logs = [r - p for r, p in zip(rollout, policy, strict=True)]
    mean = sum(probs) / 3
    assert metrics == pytest.approx(
        {
            "training/rollout_probs_diff_mean": mean,
            "training/rollout_probs_diff_max": max(probs),
            "training/rollout_probs_diff_std": math.sqrt(sum((p - mean) ** 2 for p in probs) / 2),
            "training/rollout_log_probs_diff_mean": 0.75 / 3,
            "training/rollout_log_probs_diff_max": 0.5,
            "rollout_corr/kl": sum(logs) / 3,
            "rollout_corr/k3_kl": sum(math.exp(-d) - 1 + d for d in logs) / 3,
        }
    )


def test_importance_metrics_agree_with_a_naive_loop() -> None:
    log_ratios = torch.tensor([[math.log(4.0), math.log(0.5), 9.0], [0.0, math.nan, 0.0]])
    weights = importance_weights(
        log_ratios,
        torch.zeros(2, 3),
        torch.tensor([[1, 1, 0], [1, 0, 0]]),
        level="token",
        threshold=2.0,
    )
    assert importance_metrics(weights) == pytest.approx(
        {
            "training/rollout_is/mean": 3.5 / 3,
            "training/rollout_is/max": 2.0,
            "training/rollout_is/min": 0.5,
            "training/rollout_is/clipfrac": 1 / 3,
            "training/rollout_is/ess": 3.5**2 / (3 * (4 + 0.25 + 1)),
        }
    )


def test_the_distance_of_one_token_does_not_spread() -> None:
    metrics = logprob_difference(
        torch.tensor([[-1.0, 0.0]]), torch.tensor([[-2.0, 0.0]]), torch.tensor([[1, 0]])
    )
    assert metrics["training/rollout_probs_diff_std"] == 0.0


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_without_tokens_there_is_no_distance_and_no_weight_to_report(level: str) -> None:
    nothing = torch.zeros(2, 3)
    assert logprob_difference(nothing, nothing, nothing) == {}
    weights = importance_weights(nothing, nothing, nothing, level=level, threshold=2.0)
    assert importance_metrics(weights) == {}


def test_spread_of_nothing_is_nothing() -> None:
    assert spread("x", torch.zeros(0)) == {}
