from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from neoproto.algorithms.aggregate import LossDenominators, aggregate_loss
from neoproto.algorithms.names import LOSS_AGG_MODES
from tests.neoproto.algorithms.batches import FAST, generator, poison, randn, random_mask, same, seeds, widen

HORIZON = 7.0
modes = st.sampled_from(LOSS_AGG_MODES)


def naive(loss: torch.Tensor, mask: torch.Tensor, mode: str) -> float:
    rows = [
        [float(x) for x, m in zip(row, row_mask, strict=True) if m]
        for row, row_mask in zip(loss, mask, strict=True)
    ]
    rows = [row for row in rows if row]
    if not rows:
        return 0.0
    if mode == "token-mean":
        return sum(map(sum, rows)) / sum(map(len, rows))
    if mode == "seq-mean-token-sum":
        return sum(map(sum, rows)) / len(rows)
    if mode == "seq-mean-token-mean":
        return sum(sum(row) / len(row) for row in rows) / len(rows)
    return sum(sum(row) / HORIZON for row in rows) / len(rows)


@FAST
@given(seed=seeds, mode=modes)
def test_agrees_with_a_naive_loop(seed: int, mode: str) -> None:
    rng = generator(seed)
    mask = random_mask(rng, 4, 5, holes=True)
    loss = randn(rng, 4, 5)
    result = aggregate_loss(poison(loss, mask), mask, mode, LossDenominators.count(mask, HORIZON))
    assert float(result) == pytest.approx(naive(loss, mask, mode))


@FAST
@given(seed=seeds, mode=modes, cut=st.integers(1, 5), columns=st.integers(0, 3))
def test_micro_batches_sum_to_the_mini_batch(seed: int, mode: str, cut: int, columns: int) -> None:
    """However the rows are cut, and to whatever width each piece is padded."""
    rng = generator(seed)
    mask, loss = random_mask(rng, 6, 5), randn(rng, 6, 5)
    whole = LossDenominators.count(mask, HORIZON)
    first, second = LossDenominators.count(mask[:cut], HORIZON), LossDenominators.count(mask[cut:], HORIZON)
    assert first + second == whole
    parts = [
        aggregate_loss(loss[:cut], mask[:cut], mode, whole),
        aggregate_loss(widen(loss[cut:], columns, math.inf), widen(mask[cut:], columns), mode, whole),
    ]
    same(sum(parts, torch.zeros(())).double(), aggregate_loss(loss, mask, mode, whole))


@FAST
@given(seed=seeds, mode=modes)
def test_rejected_rows_count_for_nothing(seed: int, mode: str) -> None:
    rng = generator(seed)
    mask, loss = random_mask(rng, 4, 5), randn(rng, 4, 5)
    more_mask = torch.cat([mask, torch.zeros(2, 5, dtype=torch.int64)])
    more_loss = torch.cat([loss, torch.full((2, 5), math.nan, dtype=torch.float64)])
    same(
        aggregate_loss(more_loss, more_mask, mode, LossDenominators.count(more_mask, HORIZON)),
        aggregate_loss(loss, mask, mode, LossDenominators.count(mask, HORIZON)),
    )


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
def test_a_fully_rejected_mini_batch_has_loss_zero_and_a_gradient_of_zeros(mode: str) -> None:
    loss = torch.randn(2, 3, requires_grad=True)
    mask = torch.zeros(2, 3)
    result = aggregate_loss(loss, mask, mode, LossDenominators.count(mask, HORIZON))
    result.backward()
    assert float(result.detach()) == 0.0
    assert loss.grad is not None
    assert loss.grad.tolist() == [[0.0] * 3] * 2


def test_values_by_hand() -> None:
    loss = torch.tensor([[1.0, 2.0, 3.0], [5.0, 0.0, 0.0]])
    mask = torch.tensor([[1, 1, 1], [1, 0, 0]])
    denominators = LossDenominators(tokens=4, sequences=2, horizon=10)
    got = [float(aggregate_loss(loss, mask, mode, denominators)) for mode in LOSS_AGG_MODES]
    assert got == pytest.approx([11 / 4, 11 / 2, (2 + 5) / 2, 11 / 20])


def test_errors_name_what_is_wrong() -> None:
    ones, denominators = torch.ones(2, 2), LossDenominators(tokens=4, sequences=2)
    with pytest.raises(ValueError, match=r"must be one of token-mean.*'mean'"):
        aggregate_loss(ones, ones, "mean", denominators)
    with pytest.raises(ValueError, match="horizon > 0, got None"):
        aggregate_loss(ones, ones, "seq-mean-token-sum-norm", denominators)
    with pytest.raises(ValueError, match="shapes differ"):
        aggregate_loss(torch.ones(2), ones, "token-mean", denominators)
    with pytest.raises(ValueError, match="horizons differ"):
        denominators + LossDenominators(tokens=1, sequences=1, horizon=5)
