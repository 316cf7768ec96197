from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from neoproto.algorithms.kl import (
    AdaptiveKLController,
    FixedKLController,
    apply_kl_in_reward,
    kl_estimate,
)
from neoproto.algorithms.names import KL_NAMES
from neoproto.errors import NonFiniteLoss
from tests.neoproto.algorithms.batches import FAST, generator, poison, randn, random_mask, same, seeds, widen

ROWS, WIDTH = 4, 5
kinds = st.sampled_from(KL_NAMES)


def naive(log_prob: float, ref: float, kind: str) -> float:
    d = log_prob - ref
    by_kind = {"k1": d, "abs": abs(d), "k2": d * d / 2}
    return by_kind.get(kind, min(math.exp(-d) - 1 + d, 10.0))


@FAST
@given(seed=seeds, kind=kinds)
def test_estimates_agree_with_a_naive_loop(seed: int, kind: str) -> None:
    rng = generator(seed)
    log_probs, ref, mask = randn(rng, ROWS, WIDTH), randn(rng, ROWS, WIDTH), random_mask(rng, ROWS, WIDTH)
    estimates = kl_estimate(log_probs, ref, mask, kind)
    for b in range(ROWS):
        for t in range(WIDTH):
            expected = naive(float(log_probs[b, t]), float(ref[b, t]), kind) if mask[b, t] else 0.0
            assert float(estimates[b, t]) == pytest.approx(expected, abs=1e-12)


def test_k1_and_k3_are_unbiased_and_k2_is_close() -> None:
    """Expectations over a small policy, exactly: sum_v p_v k(v) against KL(p || q)."""
    p, q = torch.tensor([0.5, 0.3, 0.2]).double(), torch.tensor([0.4, 0.4, 0.2]).double()
    true_kl = float((p * (p / q).log()).sum())
    log_probs, ref = p.log()[None], q.log()[None]

    def mean(kind: str) -> float:
        return float((p * kl_estimate(log_probs, ref, torch.ones(1, 3), kind)).sum())

    assert mean("k1") == pytest.approx(true_kl)
    assert mean("k3") == pytest.approx(true_kl)
    assert mean("k2") == pytest.approx(true_kl, rel=0.1)


def test_k3_is_exact_for_small_differences_and_bounded_for_large_ones() -> None:
    ones = torch.ones(1, 1)
    assert float(kl_estimate(1e-4 * ones, 0 * ones, ones, "k3")) == pytest.approx(5e-9, rel=1e-2)
    for difference in (-1e4, 1e4):
        assert float(kl_estimate(difference * ones, 0 * ones, ones, "k3")) == 10.0


@FAST
@given(
    seed=seeds, kind=kinds, junk=st.sampled_from([math.nan, math.inf, -math.inf]), columns=st.integers(0, 2)
)
def test_padding_never_matters(seed: int, kind: str, junk: float, columns: int) -> None:
    rng = generator(seed)
    scores, log_probs, ref = (randn(rng, ROWS, WIDTH) for _ in range(3))
    mask = random_mask(rng, ROWS, WIDTH, holes=True)
    clean = apply_kl_in_reward(scores, log_probs, ref, mask, 0.1, kind)
    dirty_scores, dirty_log_probs, dirty_ref = (
        widen(poison(tensor, mask, junk), columns, junk) for tensor in (scores, log_probs, ref)
    )
    wide_mask = widen(mask, columns)
    dirty = apply_kl_in_reward(dirty_scores, dirty_log_probs, dirty_ref, wide_mask, 0.1, kind)
    same(dirty.rewards_bt, widen(clean.rewards_bt, columns))
    same(dirty.mean_kl, clean.mean_kl)
    leaf = dirty_log_probs.requires_grad_()
    kl_estimate(leaf, dirty_ref, wide_mask, kind).sum().backward()
    assert leaf.grad is not None
    assert bool(torch.isfinite(leaf.grad).all())


def test_the_penalty_by_hand() -> None:
    """Row means of KL 2 and 1; the rejected third row is not in their mean."""
    scores = torch.tensor([[0.0, 1.0], [2.0, 0.0], [9.0, 9.0]])
    log_probs = torch.tensor([[1.0, 3.0], [1.0, 8.0], [5.0, 5.0]])
    mask = torch.tensor([[1, 1], [1, 0], [0, 0]])
    result = apply_kl_in_reward(scores, log_probs, torch.zeros(3, 2), mask, 0.5, "k1")
    assert result.rewards_bt.tolist() == [[-0.5, -0.5], [1.5, 0.0], [0.0, 0.0]]
    assert float(result.mean_kl) == 1.5
    empty = apply_kl_in_reward(scores, log_probs, torch.zeros(3, 2), 0 * mask, 0.5, "k1")
    assert float(empty.mean_kl) == 0.0
    assert empty.rows == 0


def test_unknown_kind_and_shapes_are_named() -> None:
    ones = torch.ones(2, 2)
    with pytest.raises(ValueError, match=r"one of k1, k2, .* got 'full'"):
        kl_estimate(ones, ones, ones, "full")
    with pytest.raises(ValueError, match=r"ref_log_probs_bt \(2,\)"):
        kl_estimate(ones, ones[0], ones, "k1")
    with pytest.raises(ValueError, match=r"scores_bt \(2,\)"):
        apply_kl_in_reward(ones[0], ones, ones, ones, 0.1, "k1")


# ---- controllers ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("current", "factor"),
    [
        (6.0, 1.0),  # on target
        (6.6, 1.01),  # 10 % above: e = 0.1, n / horizon = 0.1
        (60.0, 1.02),  # clipped at 0.2
        (0.0, 0.98),
        (5.4, 0.99),
    ],
)
def test_adaptive_update_by_hand(current: float, factor: float) -> None:
    controller = AdaptiveKLController(0.2, target_kl=6.0, horizon=1000)
    controller.update(current, n_steps=100)
    assert controller.value == pytest.approx(0.2 * factor)


def test_adaptive_controller_reaches_its_target() -> None:
    """A policy whose KL falls with the coefficient, KL = 1 / beta."""
    controller = AdaptiveKLController(1.0, target_kl=0.1, horizon=100)
    for _ in range(400):
        controller.update(1.0 / controller.value, n_steps=50)
    assert 1.0 / controller.value == pytest.approx(0.1, rel=0.05)


def test_adaptive_state_continues() -> None:
    first = AdaptiveKLController(0.2, target_kl=6.0, horizon=1000)
    first.update(9.0, 100)
    second = AdaptiveKLController(0.7, target_kl=6.0, horizon=1000)
    second.load_state_dict(first.state_dict())
    for controller in (first, second):
        controller.update(1.0, 200)
    assert first.value == second.value


def test_fixed_controller_stays() -> None:
    controller = FixedKLController(0.05)
    controller.update(100.0, 10)
    controller.load_state_dict(controller.state_dict())
    assert controller.value == 0.05


def test_controllers_refuse_what_makes_no_sense() -> None:
    adaptive, fixed = AdaptiveKLController(0.2, 6.0, 10), FixedKLController(0.1)
    for controller in (adaptive, fixed):
        with pytest.raises(NonFiniteLoss, match="kl is nan"):
            controller.update(math.nan, 1)
    with pytest.raises(ValueError, match=r"n_steps must be in \[0, 5 \* horizon = 50\), got 50"):
        adaptive.update(1.0, 50)
    assert adaptive.value == 0.2
    with pytest.raises(ValueError, match="state is 'value', got"):
        adaptive.load_state_dict({})
    with pytest.raises(ValueError, match="has no state"):
        fixed.load_state_dict({"value": 1.0})
    with pytest.raises(ValueError, match="kl_coef must be >= 0, got -1"):
        FixedKLController(-1)
    with pytest.raises(NonFiniteLoss, match="kl_coef is inf"):
        adaptive.load_state_dict({"value": math.inf})
    with pytest.raises(ValueError, match="target_kl must be > 0"):
        AdaptiveKLController(0.1, 0.0, 10)
    with pytest.raises(ValueError, match="horizon must be > 0"):
        AdaptiveKLController(0.1, 1.0, 0)
