"""Metrics of a batch, under the names that users of verl expect.

Shape legend: b = samples, t = response tokens (fixed width R), p = prompt tokens, n = tokens that count.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from neoproto.algorithms.kl import kl_estimate
from neoproto.algorithms.rollout_correction import ImportanceWeights


def spread(prefix: str, values: Tensor) -> dict[str, float]:
    """`{prefix}/{mean,max,min}` of a flat tensor; empty input gives nothing."""
    if values.numel() == 0:
        return {}
    values = values.double()
    return {
        f"{prefix}/mean": values.mean().item(),
        f"{prefix}/max": values.max().item(),
        f"{prefix}/min": values.min().item(),
    }


def batch_metrics(columns: Mapping[str, Tensor]) -> dict[str, float]:
    """Scores, rewards, advantages and lengths of one batch.

    Args:
        columns: `response_mask` [b,t], `attention_mask` [b,p+t], `truncated` [b], `token_level_scores`,
            `token_level_rewards`, `advantages`, `returns` [b,t] and, with a critic, `values` [b,t]. A score
            that is not finite, which only a row that is left out of the loss can have, is left out. The 1s
            and 2s of `reward_failed` [b], if it is there, are counted as `reward/timeouts`, `reward/errors`.
    """
    mask_bt = columns["response_mask"].bool()
    # Lengths come from the attention mask: rows left out of the loss still have theirs.
    width = mask_bt.shape[1]
    lengths_b = columns["attention_mask"][:, -width:].sum(1)
    prompt_lengths_b = columns["attention_mask"][:, :-width].sum(1)
    score_b = columns["token_level_scores"].sum(1)
    metrics = spread("critic/score", score_b[torch.isfinite(score_b)])
    metrics |= spread("critic/rewards", columns["token_level_rewards"].sum(1))
    for name in ("advantages", "returns", "values"):
        if name in columns:
            metrics |= spread(f"critic/{name}", columns[name][mask_bt])
    metrics |= spread("response_length", lengths_b)
    metrics["response_length/clip_ratio"] = columns["truncated"].double().mean().item()
    metrics |= spread("prompt_length", prompt_lengths_b)
    if "reward_failed" in columns:
        for value, name in enumerate(("timeouts", "errors"), start=1):
            metrics[f"reward/{name}"] = float((columns["reward_failed"] == value).sum())
    metrics["perf/total_num_tokens"] = float(columns["attention_mask"].sum())
    return metrics


def logprob_difference(rollout_bt: Tensor, policy_bt: Tensor, mask_bt: Tensor) -> dict[str, float]:
    """How far what rollout sampled with lies from what the policy recomputes, over the tokens of the mask.

    Returns:
        Mean, max and unbiased standard deviation (0 of one token) of |p_rollout - p_policy|, mean and max of
        |log p_rollout - log p_policy|, and estimates k1 and k3 of KL(rollout || policy) in nats per token;
        nothing without tokens.
    """
    mask_bt = mask_bt.bool()
    if not bool(mask_bt.any()):
        return {}
    rollout_n, policy_n = rollout_bt[mask_bt].double(), policy_bt[mask_bt].double()
    probs_n = (rollout_n.exp() - policy_n.exp()).abs()
    logs_n = (rollout_n - policy_n).abs()
    every = torch.ones_like(rollout_n)
    return {
        "training/rollout_probs_diff_mean": probs_n.mean().item(),
        "training/rollout_probs_diff_max": probs_n.max().item(),
        "training/rollout_probs_diff_std": probs_n.std(correction=min(1, len(probs_n) - 1)).item(),
        "training/rollout_log_probs_diff_mean": logs_n.mean().item(),
        "training/rollout_log_probs_diff_max": logs_n.max().item(),
        "rollout_corr/kl": kl_estimate(rollout_n, policy_n, every, "k1").mean().item(),
        "rollout_corr/k3_kl": kl_estimate(rollout_n, policy_n, every, "k3").mean().item(),
    }


def importance_metrics(weights: ImportanceWeights) -> dict[str, float]:
    """`training/rollout_is/{mean,max,min,clipfrac,ess}` of the truncated weights, over tokens or sequences.

    clipfrac is the share that was cut down, ess the effective sample size as a share of the samples.
    """
    if weights.sample_n.numel() == 0:
        return {}
    return spread("training/rollout_is", weights.sample_n) | {
        "training/rollout_is/clipfrac": weights.clipped_n.double().mean().item(),
        "training/rollout_is/ess": weights.effective_share().item(),
    }
