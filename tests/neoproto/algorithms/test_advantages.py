from __future__ import annotations

import dataclasses
import math
import statistics
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from neoproto.algorithms.advantages import AdvantageInputs, AdvantageOptions, Estimate
from neoproto.algorithms.estimators import ESTIMATORS, compute_advantages
from neoproto.algorithms.groups import group_ids_from_uids
from neoproto.algorithms.masking import masked_whiten
from tests.neoproto.algorithms.batches import FAST, generator, poison, randn, random_mask, same, seeds, widen

ROWS, WIDTH = 6, 5
kinds = st.sampled_from(list(ESTIMATORS))


def random_inputs(seed: int, *, holes: bool = False) -> AdvantageInputs:
    """Clean inputs: padding holds zeros."""
    rng = generator(seed)
    mask = random_mask(rng, ROWS, WIDTH, holes=holes)
    return AdvantageInputs(
        rewards_bt=poison(randn(rng, ROWS, WIDTH), mask, 0.0),
        mask_bt=mask,
        values_bt=poison(randn(rng, ROWS, WIDTH), mask, 0.0),
        bootstrap_values_b=randn(rng, ROWS),
        truncated_b=torch.randint(0, 2, (ROWS,), generator=rng).bool(),
        group_ids_b=torch.randint(-3, 0, (ROWS,), generator=rng),
    )


def estimate(kind: str, inputs: AdvantageInputs, **options: Any) -> Estimate:
    return compute_advantages(kind, inputs, AdvantageOptions(**options))


def row_scores(inputs: AdvantageInputs) -> list[float | None]:
    """Sum of rewards under the mask; None for a rejected row."""
    return [
        sum(float(r) for r, m in zip(rewards, mask, strict=True) if m) if bool(mask.any()) else None
        for rewards, mask in zip(inputs.rewards_bt, inputs.mask_bt, strict=True)
    ]


def peers(inputs: AdvantageInputs, row: int) -> list[int]:
    """The counted rows of the row's group."""
    assert inputs.group_ids_b is not None
    groups, scores = inputs.group_ids_b.tolist(), row_scores(inputs)
    return [i for i in range(ROWS) if groups[i] == groups[row] and scores[i] is not None]


# ---- GAE ------------------------------------------------------------------------------------------


@FAST
@given(
    seed=seeds,
    gamma=st.sampled_from([1.0, 0.9, 0.0]),
    lam=st.sampled_from([1.0, 0.95, 0.0]),
    holes=st.booleans(),
)
def test_gae_agrees_with_a_naive_loop(seed: int, gamma: float, lam: float, holes: bool) -> None:
    """The definition as a double sum: A_t = sum_l (gamma lam)^l delta_{t+l}, over generated tokens only."""
    inputs = random_inputs(seed, holes=holes)
    values, bootstrap, truncated = inputs.values_bt, inputs.bootstrap_values_b, inputs.truncated_b
    assert values is not None
    assert bootstrap is not None
    assert truncated is not None
    advantages, returns = estimate("gae", inputs, gamma=gamma, lam=lam, whiten=False)
    for b in range(ROWS):
        steps = [t for t in range(WIDTH) if inputs.mask_bt[b, t]]
        v = [float(values[b, t]) for t in steps] + [float(bootstrap[b]) if truncated[b] else 0.0]
        deltas = [float(inputs.rewards_bt[b, t]) + gamma * v[i + 1] - v[i] for i, t in enumerate(steps)]
        expected = torch.zeros(WIDTH, dtype=torch.float64)
        for i, t in enumerate(steps):
            expected[t] = sum((gamma * lam) ** k * delta for k, delta in enumerate(deltas[i:]))
        same(advantages[b], expected)
        same(returns[b], poison(expected + values[b], inputs.mask_bt[b], 0.0))


def test_gae_bootstraps_truncated_responses_only() -> None:
    """One token, reward 1, value 2, value after it 10: finished 1 - 2, truncated 1 + 0.5 * 10 - 2."""
    one = torch.ones(2, 1)
    inputs = AdvantageInputs(
        rewards_bt=one,
        mask_bt=one,
        values_bt=2 * one,
        bootstrap_values_b=torch.tensor([math.nan, 10.0]),
        truncated_b=torch.tensor([False, True]),
    )
    advantages, returns = estimate("gae", inputs, gamma=0.5, whiten=False)
    assert advantages.tolist() == [[-1.0], [4.0]]
    assert returns.tolist() == [[1.0], [6.0]]


def test_gae_with_lambda_one_has_discounted_returns() -> None:
    inputs = AdvantageInputs(
        rewards_bt=torch.tensor([[0.0, 0.0, 8.0, 99.0]]),
        mask_bt=torch.tensor([[1, 1, 1, 0]]),
        values_bt=torch.tensor([[3.0, -1.0, 4.0, 99.0]]),
        bootstrap_values_b=torch.zeros(1),
        truncated_b=torch.tensor([False]),
    )
    _, returns = estimate("gae", inputs, gamma=0.5, lam=1.0)
    assert returns.tolist() == [[2.0, 4.0, 8.0, 0.0]]


# ---- groups ---------------------------------------------------------------------------------------


@FAST
@given(seed=seeds, norm_by_std=st.booleans())
def test_grpo_agrees_with_a_naive_loop(seed: int, norm_by_std: bool) -> None:
    inputs = random_inputs(seed)
    advantages, returns = estimate("grpo", inputs, norm_by_std=norm_by_std, epsilon=1e-3)
    same(returns, advantages)
    scores = row_scores(inputs)
    for b, score in enumerate(scores):
        group = [value for i in peers(inputs, b) if (value := scores[i]) is not None]
        expected = 0.0
        if score is not None and len(group) > 1:
            expected = score - statistics.mean(group)
            expected /= statistics.stdev(group) + 1e-3 if norm_by_std else 1.0
        same(advantages[b], expected * inputs.mask_bt[b].double())


@FAST
@given(seed=seeds)
def test_rloo_agrees_with_a_naive_loop(seed: int) -> None:
    inputs = random_inputs(seed)
    advantages, _ = estimate("rloo", inputs)
    scores = row_scores(inputs)
    for b, score in enumerate(scores):
        others = [value for i in peers(inputs, b) if i != b and (value := scores[i]) is not None]
        expected = score - statistics.mean(others) if score is not None and others else 0.0
        same(advantages[b], expected * inputs.mask_bt[b].double())


def test_groups_by_hand_with_a_rejected_and_a_lonely_row() -> None:
    """Row 2 is rejected: its score of 100 is not in group 0's baseline. Row 3 is alone."""
    inputs = AdvantageInputs(
        rewards_bt=torch.tensor([[0.0, 1.0], [3.0, 0.0], [100.0, 0.0], [5.0, 0.0]]),
        mask_bt=torch.tensor([[1, 1], [1, 0], [0, 0], [1, 1]]),
        group_ids_b=torch.tensor([0, 0, 0, 7]),
    )
    dr_grpo = estimate("grpo", inputs, norm_by_std=False)[0]
    assert dr_grpo.tolist() == [[-1.0, -1.0], [1.0, 0.0], [0.0, 0.0], [0.0, 0.0]]
    assert estimate("rloo", inputs)[0].tolist() == [[-2.0, -2.0], [2.0, 0.0], [0.0, 0.0], [0.0, 0.0]]
    normed = estimate("grpo", inputs, epsilon=1e-6)[0]
    assert normed[:2, 0].tolist() == pytest.approx([-math.sqrt(0.5), math.sqrt(0.5)], rel=1e-5)


@pytest.mark.parametrize("score", [0.1, 0.7, 1e3 + 0.1])
def test_equal_scores_have_no_advantage(score: float) -> None:
    """In float32 the mean of equal scores is off by an ulp, and ulp / epsilon is not small."""
    inputs = AdvantageInputs(
        rewards_bt=torch.full((7, 1), score),
        mask_bt=torch.ones(7, 1),
        group_ids_b=torch.zeros(7, dtype=torch.int64),
    )
    advantages, _ = estimate("grpo", inputs)
    assert float(advantages.abs().max()) < 1e-5


def test_group_ids_follow_first_appearance() -> None:
    ids = group_ids_from_uids(["b", "a", "b", "c"])
    assert ids.dtype == torch.int64
    assert ids.tolist() == [0, 1, 0, 2]


@pytest.mark.parametrize("groups", [torch.zeros(3, dtype=torch.int64), torch.zeros(2)])
def test_groups_of_the_wrong_shape_or_dtype_are_refused(groups: torch.Tensor) -> None:
    with pytest.raises(ValueError, match=r"group_ids_b must be int64 \[2\]"):
        estimate(
            "rloo",
            AdvantageInputs(rewards_bt=torch.zeros(2, 2), mask_bt=torch.ones(2, 2), group_ids_b=groups),
        )


# ---- REINFORCE++ ----------------------------------------------------------------------------------


@FAST
@given(seed=seeds, gamma=st.sampled_from([1.0, 0.9]), holes=st.booleans())
def test_reinforce_plus_plus_agrees_with_a_naive_loop(seed: int, gamma: float, holes: bool) -> None:
    inputs = random_inputs(seed, holes=holes)
    expected = torch.zeros(ROWS, WIDTH, dtype=torch.float64)
    for b in range(ROWS):
        steps = [t for t in range(WIDTH) if inputs.mask_bt[b, t]]
        for i, t in enumerate(steps):
            later = [float(inputs.rewards_bt[b, s]) for s in steps[i:]]
            expected[b, t] = sum(gamma**k * reward for k, reward in enumerate(later))
    advantages, returns = estimate("reinforce_plus_plus", inputs, gamma=gamma)
    same(returns, expected)
    same(advantages, masked_whiten(expected, inputs.mask_bt))
    same(estimate("reinforce_plus_plus", inputs, gamma=gamma, whiten=False)[0], expected)


# ---- what holds for all ---------------------------------------------------------------------------


def discounted(kind: str, inputs: AdvantageInputs) -> Estimate:
    return estimate(kind, inputs, gamma=0.9, lam=0.95, epsilon=1e-3)


@FAST
@given(seed=seeds, kind=kinds, holes=st.booleans(), junk=st.sampled_from([math.nan, math.inf, -1e30]))
def test_padding_content_never_matters(seed: int, kind: str, holes: bool, junk: float) -> None:
    clean = random_inputs(seed, holes=holes)
    assert clean.values_bt is not None
    dirty = dataclasses.replace(
        clean,
        rewards_bt=poison(clean.rewards_bt, clean.mask_bt, junk),
        values_bt=poison(clean.values_bt, clean.mask_bt, junk),
    )
    for left, right in zip(discounted(kind, dirty), discounted(kind, clean), strict=True):
        same(left, right)
        assert bool((left[clean.mask_bt == 0] == 0).all())


@FAST
@given(seed=seeds, kind=kinds, columns=st.integers(1, 3))
def test_padding_columns_change_nothing(seed: int, kind: str, columns: int) -> None:
    inputs = random_inputs(seed)
    assert inputs.values_bt is not None
    wide = dataclasses.replace(
        inputs,
        rewards_bt=widen(inputs.rewards_bt, columns, math.nan),
        values_bt=widen(inputs.values_bt, columns, math.nan),
        mask_bt=widen(inputs.mask_bt, columns),
    )
    for left, right in zip(discounted(kind, wide), discounted(kind, inputs), strict=True):
        same(left, widen(right, columns))


@FAST
@given(seed=seeds, kind=kinds, order=st.permutations(range(ROWS)))
def test_rows_may_come_in_any_order(seed: int, kind: str, order: list[int]) -> None:
    inputs = random_inputs(seed)
    shuffled = AdvantageInputs(
        **{field.name: getattr(inputs, field.name)[order] for field in dataclasses.fields(inputs)}
    )
    for left, right in zip(discounted(kind, shuffled), discounted(kind, inputs), strict=True):
        same(left, right[order])


@FAST
@given(seed=seeds, kind=kinds)
def test_a_rejected_row_moves_nobody(seed: int, kind: str) -> None:
    """Rejecting the first row equals leaving it out."""
    inputs = random_inputs(seed)
    mask = inputs.mask_bt.clone()
    mask[0] = 0
    rejected = dataclasses.replace(inputs, mask_bt=mask)
    without = AdvantageInputs(
        **{field.name: getattr(inputs, field.name)[1:] for field in dataclasses.fields(inputs)}
    )
    for left, right in zip(discounted(kind, rejected), discounted(kind, without), strict=True):
        same(left[1:], right)
        assert not bool(left[0].any())


def test_whitening_leaves_the_returns_alone() -> None:
    inputs = random_inputs(5)
    plain, returns = estimate("gae", inputs, whiten=False)
    white, white_returns = estimate("gae", inputs, whiten=True)
    same(white, masked_whiten(plain, inputs.mask_bt))
    same(white_returns, returns)


def test_float32_stays_float32() -> None:
    inputs = random_inputs(6)
    single = AdvantageInputs(
        **{
            field.name: value.float() if (value := getattr(inputs, field.name)).is_floating_point() else value
            for field in dataclasses.fields(inputs)
        }
    )
    for kind in ESTIMATORS:
        assert [tensor.dtype for tensor in discounted(kind, single)] == [torch.float32] * 2


@pytest.mark.parametrize(
    ("kind", "missing"),
    [
        ("gae", "values_bt"),
        ("gae", "truncated_b"),
        ("gae", "bootstrap_values_b"),
        ("grpo", "group_ids_b"),
        ("rloo", "group_ids_b"),
    ],
)
def test_a_missing_input_is_named(kind: str, missing: str) -> None:
    inputs = dataclasses.replace(random_inputs(0), **{missing: None})
    with pytest.raises(ValueError, match=f"'{kind}' needs {missing}"):
        estimate(kind, inputs)


def test_options_and_kinds_are_checked() -> None:
    with pytest.raises(ValueError, match=r"one of gae, .* got 'vtrace'"):
        estimate("vtrace", random_inputs(0))
    with pytest.raises(ValueError, match="gamma must be in"):
        AdvantageOptions(gamma=1.1)
    with pytest.raises(ValueError, match="lam must be in"):
        AdvantageOptions(lam=-0.1)
    with pytest.raises(ValueError, match="epsilon must be > 0"):
        AdvantageOptions(epsilon=0.0)
