from __future__ import annotations

import math
import statistics

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from neoproto.algorithms.masking import (
    fill_masked,
    masked_mean,
    masked_sum,
    masked_var,
    masked_whiten,
    onto_masked,
    require_same_shape,
    sequence_lengths,
)
from tests.neoproto.algorithms.batches import FAST, generator, poison, randn, random_mask, same, seeds, widen


def kept(values: torch.Tensor, mask: torch.Tensor) -> list[float]:
    return [
        float(v)
        for row, row_mask in zip(values, mask, strict=True)
        for v, m in zip(row, row_mask, strict=True)
        if m
    ]


@FAST
@given(seed=seeds, junk=st.sampled_from([math.nan, math.inf, -math.inf, 1e30]))
def test_statistics_equal_those_of_the_kept_values(seed: int, junk: float) -> None:
    rng = generator(seed)
    mask = random_mask(rng, 4, 5, holes=True)
    clean = randn(rng, 4, 5)
    values, numbers = poison(clean, mask, junk), kept(clean, mask)
    assert float(masked_sum(values, mask)) == pytest.approx(sum(numbers))
    assert float(masked_mean(values, mask)) == pytest.approx(sum(numbers) / max(len(numbers), 1))
    if len(numbers) >= 2:
        assert float(masked_var(values, mask)) == pytest.approx(statistics.variance(numbers))
        assert float(masked_var(values, mask, unbiased=False)) == pytest.approx(statistics.pvariance(numbers))
    else:
        assert float(masked_var(values, mask)) == 0.0


@FAST
@given(seed=seeds, columns=st.integers(1, 3))
def test_padding_columns_change_nothing(seed: int, columns: int) -> None:
    rng = generator(seed)
    mask, values = random_mask(rng, 3, 4), randn(rng, 3, 4)
    wide_values, wide_mask = widen(values, columns, math.nan), widen(mask, columns)
    for function in (masked_sum, masked_mean, masked_var):
        same(function(wide_values, wide_mask), function(values, mask))
    same(masked_whiten(wide_values, wide_mask), widen(masked_whiten(values, mask), columns))
    same(sequence_lengths(wide_mask), sequence_lengths(mask))


def test_rows_by_hand() -> None:
    values = torch.tensor([[1.0, 2.0, 9.0], [4.0, math.nan, math.nan], [math.inf, 0.0, 0.0]])
    mask = torch.tensor([[1, 1, 0], [1, 0, 0], [0, 0, 0]])
    assert masked_sum(values, mask, dim=-1).tolist() == [3.0, 4.0, 0.0]
    assert masked_mean(values, mask, dim=-1).tolist() == [1.5, 4.0, 0.0]
    assert sequence_lengths(mask).tolist() == [2, 1, 0]
    assert sequence_lengths(mask.bool()).dtype == torch.int64
    assert fill_masked(values, mask, -1.0).tolist() == [
        [1.0, 2.0, -1.0],
        [4.0, -1.0, -1.0],
        [-1.0, -1.0, -1.0],
    ]


def test_whitened_values_have_mean_zero_and_variance_one() -> None:
    rng = generator(0)
    mask = random_mask(rng, 8, 16)
    values = 5.0 + 3.0 * randn(rng, 8, 16)
    white = masked_whiten(values, mask)
    assert float(masked_mean(white, mask)) == pytest.approx(0.0, abs=1e-9)
    assert float(masked_var(white, mask)) == pytest.approx(1.0, abs=1e-6)
    assert bool((white[mask == 0] == 0).all())
    unshifted = masked_whiten(values, mask, shift_mean=False)
    assert float(masked_mean(unshifted, mask)) == pytest.approx(float(masked_mean(values, mask)))


@pytest.mark.parametrize("tokens", [0, 1, 3])
def test_whitening_constants_gives_zeros(tokens: int) -> None:
    mask = (torch.arange(4) < tokens).long()[None]
    assert masked_whiten(torch.full((1, 4), 7.0), mask).tolist() == [[0.0] * 4]


@pytest.mark.parametrize("value", [0.1, -1e-3, 70.3, 1e30])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equal_values_have_no_spread_at_all(value: float, dtype: torch.dtype) -> None:
    values = torch.full((256, 512), value, dtype=dtype)
    mask = (torch.rand(256, 512, generator=generator(1)) < 0.9).long()
    assert masked_var(values, mask).item() == 0.0
    assert int(masked_whiten(values, mask).count_nonzero()) == 0
    assert torch.equal(masked_whiten(values, mask, shift_mean=False), fill_masked(values, mask))


def test_whitening_is_as_exact_as_float64_far_from_zero() -> None:
    values = 70.0 + 1e-3 * randn(generator(2), 64, 128).float()
    mask = torch.ones(64, 128)
    white = masked_whiten(values.double(), mask)
    torch.testing.assert_close(masked_whiten(values, mask), white.float())
    assert masked_whiten(values, mask).dtype == torch.float32


def test_what_lies_outside_the_mask_goes_onto_the_last_token_before_it() -> None:
    nan = math.nan
    values = torch.tensor([[1.0, 2, 4, 8, nan], [1, 2, 4, 8, 16], [nan, 1, 1, 1, 1], [0, 0, 0, 5, nan]])
    mask = torch.tensor([[1, 0, 1, 0, 0], [0, 0, 1, 1, 0], [0, 0, 0, 0, 0], [1, 1, 1, 1, 0]])
    real = torch.tensor([[1, 1, 1, 1, 0], [1, 1, 1, 1, 1], [1, 1, 1, 1, 1], [1, 1, 1, 1, 0]])
    assert onto_masked(values, mask, real).tolist() == [
        [3.0, 0, 12, 0, 0],
        [0, 0, 7, 24, 0],
        [0, 0, 0, 0, 0],
        [0, 0, 0, 5, 0],
    ]


def test_gradient_does_not_reach_masked_values() -> None:
    values = torch.tensor([[1.0, math.nan]], requires_grad=True)
    masked_mean(values, torch.tensor([[1, 0]])).backward()
    assert values.grad is not None
    assert values.grad.tolist() == [[1.0, 0.0]]


def test_different_shapes_are_named() -> None:
    with pytest.raises(ValueError, match=r"a \(2, 3\), b \(2,\)"):
        require_same_shape(a=torch.zeros(2, 3), b=torch.zeros(2))
    with pytest.raises(ValueError, match="shapes differ"):
        masked_sum(torch.zeros(2, 2), torch.ones(2))
