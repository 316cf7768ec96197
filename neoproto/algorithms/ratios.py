"""What the policy losses are made of: the ratio of two policies, its clipping, and metrics of a mini-batch.

Shapes: b = rows, t = response tokens.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from neoproto.algorithms.aggregate import LossDenominators, aggregate_loss
from neoproto.algorithms.masking import fill_masked, require_same_shape
from neoproto.algorithms.policy_loss import PolicyLossInputs, PolicyLossOptions


def log_ratio(inputs: PolicyLossInputs) -> torch.Tensor:
    """logp - old [B, T] with gradient, 0 outside the mask (whatever the padding holds)."""
    require_same_shape(
        log_probs_bt=inputs.log_probs_bt,
        old_log_probs_bt=inputs.old_log_probs_bt,
        advantages_bt=inputs.advantages_bt,
        mask_bt=inputs.mask_bt,
    )
    return fill_masked(inputs.log_probs_bt - inputs.old_log_probs_bt.detach(), inputs.mask_bt)


def surrogates(
    ratio_bt: torch.Tensor, advantages_bt: torch.Tensor, options: PolicyLossOptions
) -> tuple[torch.Tensor, torch.Tensor]:
    """(-A r, -A clip(r)), both [B, T]."""
    clipped_bt = ratio_bt.clamp(1.0 - options.clip_ratio_low, 1.0 + options.clip_ratio_high)
    return -advantages_bt * ratio_bt, -advantages_bt * clipped_bt


def weighted(loss_bt: torch.Tensor, weights_bt: torch.Tensor | None) -> torch.Tensor:
    """Each token's loss times its weight, [B, T]; the weights are constants."""
    if weights_bt is None:
        return loss_bt
    require_same_shape(loss_bt=loss_bt, weights_bt=weights_bt)
    return loss_bt * weights_bt.detach()


def token_share(
    mask_bt: torch.Tensor, denominators: LossDenominators
) -> Callable[[torch.Tensor], torch.Tensor]:
    """A function from [B, T] to its share of the mini-batch's token mean, without gradient."""

    def share(values_bt: torch.Tensor) -> torch.Tensor:
        return aggregate_loss(values_bt.detach().float(), mask_bt, "token-mean", denominators)

    return share
