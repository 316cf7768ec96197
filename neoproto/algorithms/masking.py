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
    """Variance of `values` over the whole mask, scalar.

    Args:
        unbiased: divide by n - 1 (Bessel) instead of n. Fewer than two tokens have variance 0.
    """
    squares = (values - masked_mean(values, mask)).square()
    count = (mask != 0).sum()
    return masked_sum(squares, mask) / (count - int(unbiased)).clamp(min=1)


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
        [B, T], dtype of `values_bt`.
    """
    mean = masked_mean(values_bt, mask_bt)
    whitened = (values_bt - mean) * torch.rsqrt(masked_var(values_bt, mask_bt) + epsilon)
    return fill_masked(whitened if shift_mean else whitened + mean, mask_bt)
