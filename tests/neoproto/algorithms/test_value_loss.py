from __future__ import annotations

import math
import statistics

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from neoproto.algorithms.aggregate import LossDenominators
from neoproto.algorithms.value_loss import explained_variance, value_loss
from tests.neoproto.algorithms.batches import FAST, generator, poison, randn, random_mask, same, seeds, widen

ROWS, WIDTH = 4, 5


def random_batch(seed: int) -> list[torch.Tensor]:
    """vpreds, returns, old values, mask."""
    rng = generator(seed)
    return [*(randn(rng, ROWS, WIDTH) for _ in range(3)), random_mask(rng, ROWS, WIDTH, holes=True)]


def figures(batch: list[torch.Tensor], whole: LossDenominators | None = None) -> torch.Tensor:
    vpreds, returns, old, mask = batch
    result = value_loss(vpreds, returns, old, mask, 0.5, "token-mean", whole or LossDenominators.count(mask))
    return torch.stack(
        [result.loss.detach().double(), result.vf_clipfrac.double(), result.vpred_mean.double()]
    )


@FAST
@given(seed=seeds)
def test_agrees_with_a_naive_loop(seed: int) -> None:
    batch = random_batch(seed)
    total = clipped = predicted = 0.0
    for vpred, target, old, mask in zip(*(tensor.flatten().tolist() for tensor in batch), strict=True):
        if mask:
            free = (vpred - target) ** 2
            held = (min(max(vpred, old - 0.5), old + 0.5) - target) ** 2
            total += 0.5 * max(free, held)
            clipped += held > free
            predicted += vpred
    tokens = max(int(batch[3].sum()), 1)
    same(figures(batch), torch.tensor([total, clipped, predicted], dtype=torch.float64) / tokens, 1e-6)


def test_values_and_gradients_by_hand() -> None:
    """Free (4 - 1), held by the clip (2 stays within 0.5 of 0), and clipping that does not matter."""
    vpreds = torch.tensor([[4.0, 2.0, 0.2]], requires_grad=True)
    returns = torch.tensor([[1.0, 5.0, 1.2]])
    old = torch.tensor([[4.0, 0.0, 0.0]])
    mask = torch.ones(1, 3)
    result = value_loss(vpreds, returns, old, mask, 0.5, "token-mean", LossDenominators.count(mask))
    result.loss.backward()
    assert float(result.loss.detach()) == pytest.approx((3**2 + 4.5**2 + 1) / 6)
    assert float(result.vf_clipfrac) == pytest.approx(1 / 3)
    assert float(result.vpred_mean) == pytest.approx(6.2 / 3)
    assert vpreds.grad is not None
    assert vpreds.grad[0].tolist() == pytest.approx([1.0, 0.0, -1 / 3])


def test_an_infinite_range_is_no_clipping() -> None:
    vpreds, returns, old, mask = random_batch(1)
    result = value_loss(vpreds, returns, old, mask, math.inf, "token-mean", LossDenominators.count(mask))
    kept = mask != 0
    same(result.loss, 0.5 * (vpreds[kept] - returns[kept]).square().mean())
    assert float(result.vf_clipfrac) == 0.0


@FAST
@given(seed=seeds, junk=st.sampled_from([math.nan, math.inf, 1e30]), columns=st.integers(0, 2))
def test_padding_never_matters(seed: int, junk: float, columns: int) -> None:
    batch = random_batch(seed)
    mask = batch[3]
    dirty = [widen(poison(tensor, mask, junk), columns, junk) for tensor in batch[:3]] + [
        widen(mask, columns)
    ]
    same(figures(dirty), figures(batch))
    leaf = dirty[0].requires_grad_()
    value_loss(leaf, *dirty[1:], 0.5, "token-mean", LossDenominators.count(mask)).loss.backward()
    assert leaf.grad is not None
    assert bool(torch.isfinite(leaf.grad).all())
    same(explained_variance(leaf.detach(), dirty[1], dirty[3]), explained_variance(batch[0], batch[1], mask))


@FAST
@given(seed=seeds, cut=st.integers(1, ROWS - 1))
def test_micro_batches_sum_to_the_mini_batch(seed: int, cut: int) -> None:
    batch = random_batch(seed)
    whole = LossDenominators.count(batch[3])
    parts = [figures([t[:cut] for t in batch], whole), figures([t[cut:] for t in batch], whole)]
    same(parts[0] + parts[1], figures(batch), 1e-6)


def test_explained_variance_by_hand() -> None:
    returns = torch.tensor([[1.0, 2.0, 4.0, 100.0]])
    mask = torch.tensor([[1, 1, 1, 0]])
    assert float(explained_variance(returns + 3.0, returns, mask)) == pytest.approx(1.0)
    assert float(explained_variance(torch.zeros_like(returns), returns, mask)) == pytest.approx(0.0)
    values = torch.tensor([[0.0, 2.0, 1.0, math.nan]])
    expected = 1 - statistics.variance([1.0, 0.0, 3.0]) / statistics.variance([1.0, 2.0, 4.0])
    assert float(explained_variance(values, returns, mask)) == pytest.approx(expected)


@pytest.mark.parametrize("tokens", [0, 1, 4])
def test_nothing_to_explain_is_zero(tokens: int) -> None:
    mask = (torch.arange(4) < tokens)[None]
    assert float(explained_variance(torch.randn(1, 4), torch.full((1, 4), 2.0), mask)) == 0.0


def test_errors_name_what_is_wrong() -> None:
    one, denominators = torch.ones(1, 1), LossDenominators(tokens=1, sequences=1)
    with pytest.raises(ValueError, match="cliprange_value must be > 0, got 0"):
        value_loss(one, one, one, one, 0.0, "token-mean", denominators)
    with pytest.raises(ValueError, match=r"returns_bt \(1,\)"):
        value_loss(one, one[0], one, one, 0.5, "token-mean", denominators)
