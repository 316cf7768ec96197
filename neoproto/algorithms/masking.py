"""Sums, means and variances over the tokens of a mask.

Shapes: b = rows, t = response tokens. Masks are int64 or bool, right- or left-padded or with holes.
"""

from __future__ import annotations

import torch

WHITEN_EPSILON = 1e-8


def require_same_shape(**tensors: torch.Tensor) -> None:
    """Raise `ValueError` naming each tensor and its shape unless all shapes are equal.

    Broadcasting a [B] against a [B, T] by accident is silent when B == T; hence the check.
    """
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if len(set(shapes.values())) > 1:
        raise ValueError("shapes differ: " + ", ".join(f"{name} {shape}" for name, shape in shapes.items()))


def fill_masked(values: torch.Tensor, mask: torch.Tensor, fill: float = 0.0) -> torch.Tensor:
    """`values` where the mask is set, `fill` elsewhere; same shape and dtype as `values`.

    A selection, not a product: 0 * NaN is NaN, and padding may hold anything. Gradients under a 0 are 0.
    """
    require_same_shape(values=values, mask=mask)
    return torch.where(mask != 0, values, torch.full_like(values, fill))


def sequence_lengths(mask_bt: torch.Tensor) -> torch.Tensor:
    """Number of tokens set in each row, int64 [B]."""
    return (mask_bt != 0).sum(dim=-1)


def masked_sum(values: torch.Tensor, mask: torch.Tensor, dim: int | None = None) -> torch.Tensor:
    """Sum of `values` over the mask; over everything (scalar) or over `dim`. 0 where nothing is set."""
    kept = fill_masked(values, mask)
    return kept.sum() if dim is None else kept.sum(dim=dim)


def masked_mean(values: torch.Tensor, mask: torch.Tensor, dim: int | None = None) -> torch.Tensor:
    """Mean of `values` over the mask; over everything (scalar) or over `dim`. 0 where nothing is set."""
    count = (mask != 0).sum() if dim is None else (mask != 0).sum(dim=dim)
    return masked_sum(values, mask, dim) / count.clamp(min=1)


def masked_var(values: torch.Tensor, mask: torch.Tensor, *, unbiased: bool = True) -> torch.Tensor:
    """Variance of `values` over the whole mask, scalar; exactly 0 where they are all equal.

    Args:
        unbiased: divide by n - 1 (Bessel) instead of n. Fewer than two tokens have variance 0.
    """
    centred, _ = _centred(values, mask)
    return _variance(centred, mask, unbiased).to(values.dtype)


def masked_whiten(
    values_bt: torch.Tensor,
    mask_bt: torch.Tensor,
    *,
    shift_mean: bool = True,
    epsilon: float = WHITEN_EPSILON,
) -> torch.Tensor:
    """Scale the masked values to variance 1 and, with `shift_mean`, to mean 0; 0 outside the mask.

    Args:
        values_bt: float [B, T].
        mask_bt: [B, T].
        shift_mean: False keeps the mean where it was.
        epsilon: added to the variance, so that constant values become 0 (or their mean) and not NaN.

    Returns:
        [B, T], dtype of `values_bt`; exactly 0 (or their mean) where the values are all equal.
    """
    centred_bt, mean = _centred(values_bt, mask_bt)
    whitened_bt = centred_bt * torch.rsqrt(_variance(centred_bt, mask_bt, unbiased=True) + epsilon)
    whitened_bt = whitened_bt if shift_mean else whitened_bt + mean
    return fill_masked(whitened_bt, mask_bt).to(values_bt.dtype)


def onto_masked(values_bt: torch.Tensor, mask_bt: torch.Tensor, real_bt: torch.Tensor) -> torch.Tensor:
    """`values_bt` with what lies outside the mask added to the last token of the mask before it.

    Before the first token of the mask it is added to that one. A row without any is 0.

    Args:
        values_bt: float [B, T], for example a score for each token.
        mask_bt: [B, T].
        real_bt: [B, T], 0 on padding, whose values are not looked at.

    Returns:
        [B, T], 0 outside the mask.
    """
    require_same_shape(values_bt=values_bt, mask_bt=mask_bt, real_bt=real_bt)
    kept_bt = mask_bt != 0
    position_t = torch.arange(mask_bt.shape[1], device=mask_bt.device)
    before_bt = torch.where(kept_bt, position_t, -1).cummax(dim=1).values
    first_b1 = kept_bt.int().argmax(dim=1, keepdim=True)
    target_bt = torch.where(before_bt < 0, first_b1, before_bt)
    seen_bt = fill_masked(values_bt, (kept_bt | (real_bt != 0)) & kept_bt.any(dim=1, keepdim=True))
    return torch.zeros_like(values_bt).scatter_add(1, target_bt, seen_bt)


def _centred(values: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(values minus their mean, their mean), float64; outside the mask the first is of no meaning.

    The mean of many equal float32 values is not that value, and a variance near 0 would make an advantage of
    the difference. From one of them, equal values differ by exactly 0, and so does their mean.
    """
    wide = fill_masked(values, mask).double()
    reference = wide[mask != 0][:1].sum()
    shifted = wide - reference
    mean = masked_mean(shifted, mask)
    return shifted - mean, reference + mean


def _variance(centred: torch.Tensor, mask: torch.Tensor, unbiased: bool) -> torch.Tensor:
    count = (mask != 0).sum()
    return masked_sum(centred.square(), mask) / (count - int(unbiased)).clamp(min=1)
