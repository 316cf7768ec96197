"""Random small batches for the property tests, and the padding that must not matter."""

from __future__ import annotations

import math

import torch
from hypothesis import settings
from hypothesis import strategies as st

FAST = settings(max_examples=30, deadline=None)

seeds = st.integers(0, 2**31 - 1)


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def random_mask(rng: torch.Generator, rows: int, width: int, *, holes: bool = False) -> torch.Tensor:
    """int64 [rows, width], right-padded with lengths 0 … width; with `holes`, any pattern."""
    if holes:
        return torch.randint(0, 2, (rows, width), generator=rng)
    lengths = torch.randint(0, width + 1, (rows, 1), generator=rng)
    return (torch.arange(width) < lengths).long()


def randn(rng: torch.Generator, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=rng, dtype=torch.float64)


def poison(values: torch.Tensor, mask: torch.Tensor, junk: float = math.nan) -> torch.Tensor:
    """A copy with `junk` outside the mask."""
    return torch.where(mask != 0, values, torch.full_like(values, junk))


def widen(tensor: torch.Tensor, columns: int, fill: float = 0) -> torch.Tensor:
    """[B, T] -> [B, T + columns], padded on the right."""
    return torch.cat([tensor, torch.full((tensor.shape[0], columns), fill, dtype=tensor.dtype)], dim=1)


def same(left: torch.Tensor, right: torch.Tensor, tolerance: float = 1e-10) -> None:
    torch.testing.assert_close(left, right, rtol=tolerance, atol=tolerance)
