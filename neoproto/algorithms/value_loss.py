"""The critic's loss and how well it explains the returns.

Shapes: b = rows, t = response tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from neoproto.algorithms.aggregate import LossDenominators, aggregate_loss
from neoproto.algorithms.masking import fill_masked, masked_var, require_same_shape


@dataclass(frozen=True, kw_only=True, slots=True)
class ValueLoss:
    """Scalars; only `loss` carries a gradient. The other two sum over micro-batches like the loss does.

    Attributes:
        loss: to be minimised.
        vf_clipfrac: share of tokens whose clipped prediction has the larger error.
        vpred_mean: mean prediction.
    """

    loss: torch.Tensor
    vf_clipfrac: torch.Tensor
    vpred_mean: torch.Tensor


def value_loss(
    vpreds_bt: torch.Tensor,
    returns_bt: torch.Tensor,
    old_values_bt: torch.Tensor,
    mask_bt: torch.Tensor,
    cliprange_value: float,
    loss_agg_mode: str,
    denominators: LossDenominators,
) -> ValueLoss:
    """Half the squared error, clipped around the values the returns were made with.

        l = max((v - R)^2, (clip(v, v_old - eps, v_old + eps) - R)^2) / 2

    Source: the reference PPO implementation (openai/baselines, ppo2); see Engstrom et al., arXiv
    2005.12729.

    Args:
        vpreds_bt: float [B, T], predictions with gradient.
        returns_bt, old_values_bt: float [B, T].
        mask_bt: int64 or bool [B, T].
        cliprange_value: eps > 0; `math.inf` turns clipping off.
        loss_agg_mode, denominators: see `aggregate_loss`.

    Raises:
        ValueError: shapes that differ, cliprange_value <= 0, unknown mode.
    """
    require_same_shape(
        vpreds_bt=vpreds_bt, returns_bt=returns_bt, old_values_bt=old_values_bt, mask_bt=mask_bt
    )
    if not cliprange_value > 0.0:
        raise ValueError(f"cliprange_value must be > 0, got {cliprange_value}")
    vpreds_bt, returns_bt = fill_masked(vpreds_bt, mask_bt), fill_masked(returns_bt.detach(), mask_bt)
    old_values_bt = fill_masked(old_values_bt.detach(), mask_bt)
    near_bt = vpreds_bt.clamp(old_values_bt - cliprange_value, old_values_bt + cliprange_value)
    free_bt, clipped_bt = (vpreds_bt - returns_bt).square(), (near_bt - returns_bt).square()
    worse_bt = (clipped_bt > free_bt).float()
    return ValueLoss(
        loss=0.5 * aggregate_loss(torch.maximum(free_bt, clipped_bt), mask_bt, loss_agg_mode, denominators),
        vf_clipfrac=aggregate_loss(worse_bt, mask_bt, "token-mean", denominators),
        vpred_mean=aggregate_loss(vpreds_bt.detach(), mask_bt, "token-mean", denominators),
    )


@torch.no_grad()
def explained_variance(
    values_bt: torch.Tensor, returns_bt: torch.Tensor, mask_bt: torch.Tensor
) -> torch.Tensor:
    """1 - Var(R - v) / Var(R) over the masked tokens, scalar: 1 is perfect, 0 is as good as a constant.

    Returns that do not vary leave nothing to explain: 0.
    """
    require_same_shape(values_bt=values_bt, returns_bt=returns_bt, mask_bt=mask_bt)
    total = masked_var(returns_bt, mask_bt)
    left = masked_var(returns_bt - values_bt, mask_bt)
    return torch.where(total > 0, 1.0 - left / torch.where(total > 0, total, 1.0), 0.0)
