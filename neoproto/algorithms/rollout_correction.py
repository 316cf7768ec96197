"""Importance weights for samples that another policy drew than the one an update starts from.

Three policies meet in an update: the one that sampled (`rollout`), the one the update starts from and whose
ratio PPO clips (`old`, the proximal policy), and the one being trained. Rollout differs from old by its
numerics (another engine, another dtype) and, in asynchronous training, by its age.

    decoupled    loss_t = w_t * PPO's clipped loss of  pi / pi_old;   w = min(pi_old / pi_rollout, C)
    bypass       old := rollout, PPO's clipped loss of pi / pi_rollout; no weight, no second forward pass

Decoupled objective: Hilton, Cobbe, Schulman, "Batch size-invariance for policy optimization" (arXiv
2110.00641). Truncated weights: Ionides, "Truncated importance sampling" (2008); for rollout engines, Yao et
al., "Your efficient RL framework secretly brings you off-policy RL training" (2025). Names are those of
verl's rollout correction (its docs/algo/rollout_corr.md).

Shapes: b = rows, t = response tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from neoproto.algorithms.masking import fill_masked, masked_sum, require_same_shape, sequence_lengths
from neoproto.algorithms.names import ROLLOUT_IS_LEVELS

IS_LOG_RATIO_LIMIT = 20.0
"""Log-weights are clamped to +-20 before exp (verl's bound): a weight is never 0 and never overflows."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutCorrection:
    """Attributes:
    rollout_is: a weight per token, or one per sequence; None for no weights.
    rollout_is_threshold: C, at least 1: what the policies agree on keeps weight 1.
    bypass_mode: rollout's log-probs stand for the old ones; excludes `rollout_is`, as PPO's ratio then is the
        whole correction.
    """

    rollout_is: str | None = None
    rollout_is_threshold: float = 2.0
    bypass_mode: bool = False

    def __post_init__(self) -> None:
        if self.rollout_is not in (None, *ROLLOUT_IS_LEVELS):
            raise ValueError(
                f"rollout_is must be one of {', '.join(ROLLOUT_IS_LEVELS)} or None, got {self.rollout_is!r}"
            )
        if not self.rollout_is_threshold >= 1.0:
            raise ValueError(f"rollout_is_threshold must be at least 1, got {self.rollout_is_threshold}")
        if self.bypass_mode and self.rollout_is is not None:
            raise ValueError(f"bypass_mode must be off with rollout_is, got {self.rollout_is!r}")


@dataclass(frozen=True, kw_only=True, slots=True)
class ImportanceWeights:
    """Attributes:
    weights_bt: float [B, T], in (0, C] under the mask, 0 elsewhere; without gradient.
    sample_n: float [N], the weights that were judged: one a token, or one a row that has tokens.
    clipped_n: bool [N], which of them were cut down to C.
    """

    weights_bt: torch.Tensor
    sample_n: torch.Tensor
    clipped_n: torch.Tensor

    def effective_share(self) -> torch.Tensor:
        """(sum w)^2 / (N sum w^2), scalar in (0, 1]: the share of the samples that equal weights would need
        for the same variance (Kong's effective sample size over N). Needs N > 0."""
        sample_n = self.sample_n.double()
        return sample_n.sum().square() / (len(sample_n) * sample_n.square().sum())


@torch.no_grad()
def importance_weights(
    old_log_probs_bt: torch.Tensor,
    rollout_log_probs_bt: torch.Tensor,
    mask_bt: torch.Tensor,
    *,
    level: str,
    threshold: float,
) -> ImportanceWeights:
    """pi_old / pi_rollout, truncated at `threshold`.

        token:     w_t = min(exp(old_t - rollout_t), C)
        sequence:  w_t = min(exp(sum_s (old_s - rollout_s)), C)    the same for all tokens of a row

    Token weights leave what came before a token uncorrected (biased, little variance); sequence weights
    correct whole responses (truncation is their only bias, and they meet it often as responses get long).

    Args:
        old_log_probs_bt: float [B, T], of the policy the update starts from.
        rollout_log_probs_bt: float [B, T], as recorded at sampling.
        mask_bt: int64 or bool [B, T]; what lies outside may hold anything.
        level: one of `ROLLOUT_IS_LEVELS`.
        threshold: C, see `RolloutCorrection`.

    Returns:
        The weights, finite for any finite log-probs. NaN stays NaN: the caller has to refuse it.

    Raises:
        ValueError: unknown level, or shapes that differ.
    """
    require_same_shape(
        old_log_probs_bt=old_log_probs_bt, rollout_log_probs_bt=rollout_log_probs_bt, mask_bt=mask_bt
    )
    log_ratio_bt = old_log_probs_bt - rollout_log_probs_bt
    match level:
        case "token":
            log_weights_bt = log_ratio_bt
            log_weights_n = log_ratio_bt[mask_bt != 0]
        case "sequence":
            log_weights_b = masked_sum(log_ratio_bt, mask_bt, dim=-1)
            log_weights_bt = log_weights_b.unsqueeze(-1).expand_as(log_ratio_bt)
            log_weights_n = log_weights_b[sequence_lengths(mask_bt) > 0]
        case _:
            raise ValueError(f"rollout_is must be one of {', '.join(ROLLOUT_IS_LEVELS)}, got {level!r}")
    raw_n = _bounded_exp(log_weights_n)
    return ImportanceWeights(
        weights_bt=fill_masked(_bounded_exp(log_weights_bt).clamp(max=threshold), mask_bt),
        sample_n=raw_n.clamp(max=threshold),
        clipped_n=raw_n > threshold,
    )


def _bounded_exp(log_weights: torch.Tensor) -> torch.Tensor:
    return log_weights.clamp(-IS_LOG_RATIO_LIMIT, IS_LOG_RATIO_LIMIT).exp()
