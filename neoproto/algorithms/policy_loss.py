"""Policy losses: PPO's clipped surrogate with dual clip, and GSPO's sequence-level ratio.

The figures beside a loss are aggregated like a token-mean with the mini-batch's denominators: those of the
micro-batches sum to those of the mini-batch, and the caller adds them up.

Shapes: b = rows, t = response tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from neoproto.algorithms.aggregate import LOSS_AGG_MODES, LossDenominators, aggregate_loss
from neoproto.algorithms.masking import fill_masked, masked_mean, require_same_shape

LOG_RATIO_LIMIT = 20.0
"""Per-token log-ratios are clamped to +-20 (verl's bound): exp(20) = 5e8, finite in all but half."""
SEQUENCE_LOG_RATIO_LIMIT = 10.0
"""GSPO's log-ratio is clamped from above at 10 (verl's bound)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyLossOptions:
    """Attributes:
    clip_ratio_low, clip_ratio_high: the ratio is kept in [1 - low, 1 + high]; 0 < low < 1, high > 0.
        GSPO wants them far smaller (its paper: 3e-4 and 4e-4).
    clip_ratio_c: dual clip, > 1; `math.inf` turns it off. Read by `vanilla`.
    loss_agg_mode: see `aggregate_loss`.
    """

    clip_ratio_low: float = 0.2
    clip_ratio_high: float = 0.2
    clip_ratio_c: float = 3.0
    loss_agg_mode: str = "token-mean"

    def __post_init__(self) -> None:
        if not 0.0 < self.clip_ratio_low < 1.0:
            raise ValueError(f"clip_ratio_low must be in (0, 1), got {self.clip_ratio_low}")
        if not self.clip_ratio_high > 0.0:
            raise ValueError(f"clip_ratio_high must be > 0, got {self.clip_ratio_high}")
        if not self.clip_ratio_c > 1.0:
            raise ValueError(f"clip_ratio_c must be > 1, got {self.clip_ratio_c}")
        if self.loss_agg_mode not in LOSS_AGG_MODES:
            raise ValueError(
                f"loss_agg_mode must be one of {', '.join(LOSS_AGG_MODES)}, got {self.loss_agg_mode!r}"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyLoss:
    """Scalars; only `loss` carries a gradient.

    Attributes:
        loss: to be minimised.
        pg_clipfrac: share of tokens whose ratio was clipped to the interval.
        pg_clipfrac_lower: share of tokens held by the dual clip.
        ppo_kl: mean of old_log_prob - log_prob (k1 estimate of KL(old || new)), nats.
    """

    loss: torch.Tensor
    pg_clipfrac: torch.Tensor
    pg_clipfrac_lower: torch.Tensor
    ppo_kl: torch.Tensor


class PolicyLossFn(Protocol):
    """One of `POLICY_LOSSES`; see `vanilla` for the arguments."""

    def __call__(
        self,
        log_probs_bt: torch.Tensor,
        old_log_probs_bt: torch.Tensor,
        advantages_bt: torch.Tensor,
        mask_bt: torch.Tensor,
        options: PolicyLossOptions,
        denominators: LossDenominators,
        weights_bt: torch.Tensor | None = None,
    ) -> PolicyLoss: ...


def policy_loss(
    loss_mode: str,
    *,
    log_probs_bt: torch.Tensor,
    old_log_probs_bt: torch.Tensor,
    advantages_bt: torch.Tensor,
    mask_bt: torch.Tensor,
    options: PolicyLossOptions,
    denominators: LossDenominators,
    weights_bt: torch.Tensor | None = None,
) -> PolicyLoss:
    """The loss called `loss_mode`, one of `POLICY_LOSSES`; arguments by name, as for `vanilla`.

    Raises:
        ValueError: unknown mode, or shapes that differ.
    """
    try:
        function = POLICY_LOSSES[loss_mode]
    except KeyError:
        known = ", ".join(POLICY_LOSSES)
        raise ValueError(f"policy_loss.loss_mode must be one of {known}, got {loss_mode!r}") from None
    return function(log_probs_bt, old_log_probs_bt, advantages_bt, mask_bt, options, denominators, weights_bt)


def vanilla(
    log_probs_bt: torch.Tensor,
    old_log_probs_bt: torch.Tensor,
    advantages_bt: torch.Tensor,
    mask_bt: torch.Tensor,
    options: PolicyLossOptions,
    denominators: LossDenominators,
    weights_bt: torch.Tensor | None = None,
) -> PolicyLoss:
    """PPO's clipped surrogate (arXiv 1707.06347, eq. 7) with dual clip (Ye et al., arXiv 1912.09729).

        l = max(-A r, -A clip(r, 1 - low, 1 + high));   A < 0: l = min(l, -A c);   r = exp(logp - old)

    The dual clip bounds the loss where A < 0 and r is large, the one side PPO leaves open. The log-ratio is
    clamped to +-`LOG_RATIO_LIMIT`; beyond it a token has no gradient.

    Args:
        log_probs_bt: float [B, T], of the policy that is trained, with gradient.
        old_log_probs_bt: float [B, T], of the policy the ratio is taken against.
        advantages_bt: float [B, T].
        mask_bt: int64 or bool [B, T].
        options, denominators: see there; the denominators are those of the mini-batch.
        weights_bt: float [B, T], times which each token's loss counts, see
            `neoproto.algorithms.rollout_correction`; no gradient flows into them. None for 1. The figures
            other than the loss are not weighted.
    """
    log_ratio_bt = _log_ratio(log_probs_bt, old_log_probs_bt, advantages_bt, mask_bt)
    log_ratio_bt = log_ratio_bt.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    advantages_bt = fill_masked(advantages_bt, mask_bt)
    free_bt, clipped_bt = _surrogates(log_ratio_bt.exp(), advantages_bt, options)
    upper_bt = torch.maximum(free_bt, clipped_bt)
    negative_bt = advantages_bt < 0
    # Filled where it does not apply: with c = inf, -A c would be NaN at A = 0.
    bound_bt = torch.where(negative_bt, -advantages_bt * options.clip_ratio_c, torch.inf)
    loss_bt = _weighted(torch.minimum(upper_bt, bound_bt), weights_bt)
    share = _token_share(mask_bt, denominators)
    return PolicyLoss(
        loss=aggregate_loss(loss_bt, mask_bt, options.loss_agg_mode, denominators),
        pg_clipfrac=share(clipped_bt > free_bt),
        pg_clipfrac_lower=share(upper_bt > bound_bt),
        ppo_kl=share(-log_ratio_bt),
    )


def gspo(
    log_probs_bt: torch.Tensor,
    old_log_probs_bt: torch.Tensor,
    advantages_bt: torch.Tensor,
    mask_bt: torch.Tensor,
    options: PolicyLossOptions,
    denominators: LossDenominators,
    weights_bt: torch.Tensor | None = None,
) -> PolicyLoss:
    """Group sequence policy optimisation (arXiv 2507.18071, eq. 5-7; the token form is its section 4.3).

        s_i = exp(mean_t (logp - old));   l = max(-A s_i, -A clip(s_i, 1 - low, 1 + high))

    All tokens of a row share the ratio s_i in value; each token's gradient is s_i A times that of its own
    log-prob, so that token advantages are allowed. The paper's objective is `loss_agg_mode =
    seq-mean-token-mean`; other modes weigh rows by their lengths. No dual clip: the log-ratio is clamped at
    `SEQUENCE_LOG_RATIO_LIMIT`, beyond which a row has no gradient.

    Arguments as for `vanilla`.
    """
    log_ratio_bt = _log_ratio(log_probs_bt, old_log_probs_bt, advantages_bt, mask_bt)
    row_log_ratio_b1 = masked_mean(log_ratio_bt, mask_bt, dim=-1).detach().unsqueeze(-1)
    # Zero in value, the token's own gradient: log s_i + logp - stop_gradient(logp).
    own_bt = log_ratio_bt - log_ratio_bt.detach()
    ratio_bt = (row_log_ratio_b1 + own_bt).clamp(max=SEQUENCE_LOG_RATIO_LIMIT).exp()
    advantages_bt = fill_masked(advantages_bt, mask_bt)
    free_bt, clipped_bt = _surrogates(ratio_bt, advantages_bt, options)
    loss_bt = _weighted(torch.maximum(free_bt, clipped_bt), weights_bt)
    share = _token_share(mask_bt, denominators)
    return PolicyLoss(
        loss=aggregate_loss(loss_bt, mask_bt, options.loss_agg_mode, denominators),
        pg_clipfrac=share(clipped_bt > free_bt),
        pg_clipfrac_lower=torch.zeros_like(row_log_ratio_b1.sum()),
        ppo_kl=share(-log_ratio_bt),
    )


POLICY_LOSSES: dict[str, PolicyLossFn] = {"vanilla": vanilla, "gspo": gspo}


def _log_ratio(
    log_probs_bt: torch.Tensor,
    old_log_probs_bt: torch.Tensor,
    advantages_bt: torch.Tensor,
    mask_bt: torch.Tensor,
) -> torch.Tensor:
    """logp - old [B, T] with gradient, 0 outside the mask (whatever the padding holds)."""
    require_same_shape(
        log_probs_bt=log_probs_bt,
        old_log_probs_bt=old_log_probs_bt,
        advantages_bt=advantages_bt,
        mask_bt=mask_bt,
    )
    return fill_masked(log_probs_bt - old_log_probs_bt.detach(), mask_bt)


def _surrogates(
    ratio_bt: torch.Tensor, advantages_bt: torch.Tensor, options: PolicyLossOptions
) -> tuple[torch.Tensor, torch.Tensor]:
    """(-A r, -A clip(r)), both [B, T]."""
    clipped_bt = ratio_bt.clamp(1.0 - options.clip_ratio_low, 1.0 + options.clip_ratio_high)
    return -advantages_bt * ratio_bt, -advantages_bt * clipped_bt


def _weighted(loss_bt: torch.Tensor, weights_bt: torch.Tensor | None) -> torch.Tensor:
    """Each token's loss times its weight, [B, T]; the weights are constants."""
    if weights_bt is None:
        return loss_bt
    require_same_shape(loss_bt=loss_bt, weights_bt=weights_bt)
    return loss_bt * weights_bt.detach()


def _token_share(
    mask_bt: torch.Tensor, denominators: LossDenominators
) -> Callable[[torch.Tensor], torch.Tensor]:
    """A function from [B, T] to its share of the mini-batch's token mean, without gradient."""

    def share(values_bt: torch.Tensor) -> torch.Tensor:
        return aggregate_loss(values_bt.detach().float(), mask_bt, "token-mean", denominators)

    return share
