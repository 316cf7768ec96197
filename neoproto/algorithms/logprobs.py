"""Log-probabilities and entropies from logits, without keeping a softmax.

For a 128k vocabulary the logits are the largest tensor of a step; every copy of them counts. Autograd would
keep two or three (scaled, shifted, exponentiated). Both functions below keep the logits they were given and
two numbers per token, and recompute the softmax in the backward pass, a bounded chunk at a time.

Exactness: log p = (z - max z) - log sum exp(z - max z). Subtracting the maximum *first* keeps the
difference exact where logits are large; `z - logsumexp(z)` would round both at the size of z (1e-3 at
z = 1e4 in fp32). Half-precision logits are computed in float32.

Shapes: b = rows, t = response tokens, v = vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import torch

CHUNK_ELEMENTS = 1 << 24
"""Elements of the largest temporary (64 MiB in float32)."""

Index = tuple[slice, slice]


def log_probs_from_logits(
    logits_btv: torch.Tensor, labels_bt: torch.Tensor, temperature: float = 1.0
) -> torch.Tensor:
    """log softmax(logits / temperature) at the labels.

    Args:
        logits_btv: float16, bfloat16, float32 or float64 [B, T, V]; need not be contiguous.
        labels_bt: int64 [B, T], each in [0, V), on padding too.
        temperature: the one the labels were sampled with, > 0.

    Returns:
        [B, T], float32 (float64 for float64 logits), nats. Differentiable once in `logits_btv`.

    Raises:
        ValueError: shapes that do not fit, or a temperature that is not positive.
    """
    _check(logits_btv, temperature)
    if labels_bt.shape != logits_btv.shape[:2]:
        raise ValueError(f"labels_bt {tuple(labels_bt.shape)} does not fit logits {tuple(logits_btv.shape)}")
    return cast(torch.Tensor, _LogProbs.apply(logits_btv, labels_bt, temperature))  # type: ignore[no-untyped-call]


def entropy_from_logits(logits_btv: torch.Tensor, temperature: float = 1.0) -> torch.Tensor:
    """Entropy of softmax(logits / temperature): -sum_v p_v log p_v.

    A logit of -inf has p = 0 and adds 0.

    Args:
        logits_btv: float16, bfloat16, float32 or float64 [B, T, V]; need not be contiguous.
        temperature: the one the labels were sampled with, > 0.

    Returns:
        [B, T], float32 (float64 for float64 logits), nats. Differentiable once in `logits_btv`.

    Raises:
        ValueError: logits that are not [B, T, V], or a temperature that is not positive.
    """
    _check(logits_btv, temperature)
    return cast(torch.Tensor, _Entropy.apply(logits_btv, temperature))  # type: ignore[no-untyped-call]


def _check(logits_btv: torch.Tensor, temperature: float) -> None:
    if logits_btv.dim() != 3 or logits_btv.shape[-1] == 0:
        raise ValueError(f"logits must be [B, T, V] with V > 0, got {tuple(logits_btv.shape)}")
    if not temperature > 0:
        raise ValueError(f"temperature must be > 0, got {temperature}")


def _chunks(logits_btv: torch.Tensor) -> Iterator[Index]:
    """Index pairs that cover [B, T] with at most `CHUNK_ELEMENTS` logits each.

    Rows and columns are cut, not a flattened view: `logits[:, a:b]` cannot be flattened without a copy.
    """
    rows, width, vocabulary = logits_btv.shape
    columns = min(max(1, CHUNK_ELEMENTS // vocabulary), max(1, width))
    height = max(1, CHUNK_ELEMENTS // (vocabulary * columns))
    for top in range(0, rows, height):
        for left in range(0, width, columns):
            yield slice(top, top + height), slice(left, left + columns)


def _compute_dtype(logits_btv: torch.Tensor) -> torch.dtype:
    return torch.float64 if logits_btv.dtype == torch.float64 else torch.float32


def _scaled(logits: torch.Tensor, maximum: torch.Tensor, temperature: float) -> torch.Tensor:
    """(logits - maximum) / temperature in the compute dtype, one temporary of the chunk's size."""
    return logits.to(maximum.dtype, copy=True).sub_(maximum.unsqueeze(-1)).div_(temperature)


class _LogProbs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, labels: torch.Tensor, temperature: float) -> torch.Tensor:
        maximum = logits.amax(dim=-1).to(_compute_dtype(logits))
        log_sum, log_probs = torch.empty_like(maximum), torch.empty_like(maximum)
        for at in _chunks(logits):
            scaled = _scaled(logits[at], maximum[at], temperature)
            chosen = scaled.gather(-1, labels[at].unsqueeze(-1)).squeeze(-1)
            log_sum[at] = scaled.exp_().sum(dim=-1).log_()
            log_probs[at] = chosen - log_sum[at]
        ctx.save_for_backward(logits, labels, maximum, log_sum)
        ctx.temperature = temperature
        return log_probs

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        """d log p_label / dz_v = (1[v = label] - p_v) / temperature."""
        logits, labels, maximum, log_sum = ctx.saved_tensors
        grad_logits = torch.empty_like(logits)
        for at in _chunks(logits):
            scaled = _scaled(logits[at], maximum[at], ctx.temperature)
            weight = (grad[at] / ctx.temperature).unsqueeze(-1)
            share = scaled.sub_(log_sum[at].unsqueeze(-1)).exp_().mul_(-weight)
            grad_logits[at] = share.scatter_add_(-1, labels[at].unsqueeze(-1), weight)
        return grad_logits, None, None


class _Entropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, temperature: float) -> torch.Tensor:
        maximum = logits.amax(dim=-1).to(_compute_dtype(logits))
        log_sum, entropy = torch.empty_like(maximum), torch.empty_like(maximum)
        for at in _chunks(logits):
            scaled = _scaled(logits[at], maximum[at], temperature)
            log_sum[at] = scaled.exp().sum(dim=-1).log_()
            log_p = _floored(scaled.sub_(log_sum[at].unsqueeze(-1)))
            entropy[at] = -log_p.exp().mul_(log_p).sum(dim=-1)
        ctx.save_for_backward(logits, maximum, log_sum, entropy)
        ctx.temperature = temperature
        return entropy

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        """dH / dz_v = -p_v (log p_v + H) / temperature."""
        logits, maximum, log_sum, entropy = ctx.saved_tensors
        grad_logits = torch.empty_like(logits)
        for at in _chunks(logits):
            scaled = _scaled(logits[at], maximum[at], ctx.temperature)
            log_p = _floored(scaled.sub_(log_sum[at].unsqueeze(-1)))
            probabilities = log_p.exp()
            slope = log_p.add_(entropy[at].unsqueeze(-1)).mul_(probabilities)
            grad_logits[at] = slope.mul_((-grad[at] / ctx.temperature).unsqueeze(-1))
        return grad_logits, None


def _floored(log_p: torch.Tensor) -> torch.Tensor:
    """-inf made finite, in place, so that p log p is 0 * finite = 0 there; NaN stays NaN and is seen."""
    return log_p.clamp_(min=torch.finfo(log_p.dtype).min)
