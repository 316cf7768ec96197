"""Metrics of a batch, under the names that users of verl expect.

Shape legend: b = samples, t = response tokens (fixed width R), p = prompt tokens.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor


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
    """Scores, rewards, advantages, lengths and the rollout/policy log-prob difference of one batch.

    Args:
        columns: `response_mask` [b,t], `attention_mask` [b,p+t], `truncated` [b], `token_level_scores`,
            `token_level_rewards`, `advantages`, `returns`, `old_log_probs`, `rollout_log_probs` [b,t] and,
            with a critic, `values` [b,t].
    """
    mask_bt = columns["response_mask"].bool()
    # Lengths come from the attention mask: rows left out of the loss still have theirs.
    width = mask_bt.shape[1]
    lengths_b = columns["attention_mask"][:, -width:].sum(1)
    prompt_lengths_b = columns["attention_mask"][:, :-width].sum(1)
    figures = spread("critic/score", columns["token_level_scores"].sum(1))
    figures |= spread("critic/rewards", columns["token_level_rewards"].sum(1))
    for name in ("advantages", "returns", "values"):
        if name in columns:
            figures |= spread(f"critic/{name}", columns[name][mask_bt])
    figures |= spread("response_length", lengths_b)
    figures["response_length/clip_ratio"] = columns["truncated"].double().mean().item()
    figures |= spread("prompt_length", prompt_lengths_b)
    figures["perf/total_num_tokens"] = float(columns["attention_mask"].sum())
    figures |= logprob_difference(columns["rollout_log_probs"], columns["old_log_probs"], mask_bt)
    return figures


def logprob_difference(rollout_bt: Tensor, policy_bt: Tensor, mask_bt: Tensor) -> dict[str, float]:
    """How far what vLLM sampled with lies from what the policy recomputes, in probabilities and log-probs."""
    if not bool(mask_bt.any()):
        return {}
    rollout, policy = rollout_bt[mask_bt].double(), policy_bt[mask_bt].double()
    probs = (rollout.exp() - policy.exp()).abs()
    return {
        "training/rollout_probs_diff_mean": probs.mean().item(),
        "training/rollout_probs_diff_max": probs.max().item(),
        "training/rollout_log_probs_diff_max": (rollout - policy).abs().max().item(),
    }
