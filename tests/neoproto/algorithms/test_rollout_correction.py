from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from neoproto.algorithms.aggregate import LossDenominators
from neoproto.algorithms.losses import POLICY_LOSSES, policy_loss
from neoproto.algorithms.names import ROLLOUT_IS_LEVELS
from neoproto.algorithms.policy_loss import PolicyLossInputs, PolicyLossOptions
from neoproto.algorithms.rollout_correction import ImportanceWeights, RolloutCorrection, importance_weights
from tests.neoproto.algorithms.batches import FAST, generator, poison, randn, random_mask, same, seeds

ROWS, WIDTH, THRESHOLD = 5, 4, 2.0
levels = st.sampled_from(ROLLOUT_IS_LEVELS)


def log_probs(seed: int, scale: float = 1.0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(old, rollout, mask) with log-ratios of about +-scale and holes in the mask."""
    rng = generator(seed)
    return (
        scale * randn(rng, ROWS, WIDTH),
        scale * randn(rng, ROWS, WIDTH),
        random_mask(rng, ROWS, WIDTH, holes=True),
    )


def weigh(
    old: torch.Tensor, rollout: torch.Tensor, mask: torch.Tensor, level: str, threshold: float = THRESHOLD
) -> ImportanceWeights:
    return importance_weights(old, rollout, mask, level=level, threshold=threshold)


@FAST
@given(seed=seeds, scale=st.sampled_from([0.1, 1.0, 10.0]), threshold=st.sampled_from([1.0, 2.0, 5.0]))
def test_token_weights_agree_with_a_naive_loop(seed: int, scale: float, threshold: float) -> None:
    old, rollout, mask = log_probs(seed, scale)
    expected, samples, clipped = torch.zeros_like(old), [], []
    for b in range(ROWS):
        for t in range(WIDTH):
            if mask[b, t]:
                ratio = math.exp(min(max(float(old[b, t] - rollout[b, t]), -20.0), 20.0))
                expected[b, t] = min(ratio, threshold)
                samples.append(min(ratio, threshold))
                clipped.append(ratio > threshold)
    weights = weigh(old, rollout, mask, "token", threshold)
    same(weights.weights_bt, expected)
    same(weights.sample_n, torch.tensor(samples, dtype=torch.float64))
    assert weights.clipped_n.tolist() == clipped


@FAST
@given(seed=seeds, scale=st.sampled_from([0.1, 1.0, 10.0]), threshold=st.sampled_from([1.0, 2.0, 5.0]))
def test_sequence_weights_agree_with_a_naive_loop(seed: int, scale: float, threshold: float) -> None:
    old, rollout, mask = log_probs(seed, scale)
    expected, samples, clipped = torch.zeros_like(old), [], []
    for b in range(ROWS):
        steps = [t for t in range(WIDTH) if mask[b, t]]
        if not steps:
            continue
        total = sum(float(old[b, t] - rollout[b, t]) for t in steps)
        product = math.exp(min(max(total, -20.0), 20.0))
        expected[b, steps] = min(product, threshold)
        samples.append(min(product, threshold))
        clipped.append(product > threshold)
    weights = weigh(old, rollout, mask, "sequence", threshold)
    same(weights.weights_bt, expected)
    same(weights.sample_n, torch.tensor(samples, dtype=torch.float64))
    assert weights.clipped_n.tolist() == clipped


@FAST
@given(
    seed=seeds,
    level=levels,
    scale=st.sampled_from([0.0, 1.0, 1e3, 1e30]),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
def test_weights_are_above_zero_and_at_most_the_threshold(
    seed: int, level: str, scale: float, dtype: torch.dtype
) -> None:
    old, rollout, mask = log_probs(seed, scale)
    weights_bt = weigh(old.to(dtype), rollout.to(dtype), mask, level).weights_bt
    assert weights_bt.dtype == dtype
    assert bool((weights_bt[mask != 0] > 0).all())
    assert bool((weights_bt[mask != 0] <= THRESHOLD).all())
    assert not bool(weights_bt[mask == 0].any())


@FAST
@given(seed=seeds, level=levels, threshold=st.sampled_from([1.0, 2.0]))
def test_policies_that_agree_have_weight_one(seed: int, level: str, threshold: float) -> None:
    old, _, mask = log_probs(seed)
    weights = weigh(old, old.clone(), mask, level, threshold)
    same(weights.weights_bt, (mask != 0).double(), 0.0)
    assert not bool(weights.clipped_n.any())
    if len(weights.sample_n):
        assert float(weights.effective_share()) == 1.0


@FAST
@given(seed=seeds)
def test_a_sequence_has_one_weight_the_product_of_its_tokens(seed: int) -> None:
    old, rollout, mask = log_probs(seed, 0.1)
    tokens, rows = (weigh(old, rollout, mask, level, 100.0).weights_bt for level in ROLLOUT_IS_LEVELS)
    for b in range(ROWS):
        kept = mask[b] != 0
        if bool(kept.any()):
            assert rows[b][kept].unique().numel() == 1
            same(rows[b][kept][0], tokens[b][kept].prod())


@FAST
@given(seed=seeds, level=levels, junk=st.sampled_from([math.nan, math.inf, -math.inf, 1e30]))
def test_padding_content_never_matters(seed: int, level: str, junk: float) -> None:
    old, rollout, mask = log_probs(seed)
    clean = weigh(old, rollout, mask, level)
    dirty = weigh(poison(old, mask, junk), poison(rollout, mask, junk), mask, level)
    same(dirty.weights_bt, clean.weights_bt, 0.0)
    same(dirty.sample_n, clean.sample_n, 0.0)


def test_weights_carry_no_gradient() -> None:
    old, rollout, mask = log_probs(0)
    for level in ROLLOUT_IS_LEVELS:
        assert not weigh(old.requires_grad_(), rollout.requires_grad_(), mask, level).weights_bt.requires_grad


def test_a_log_prob_that_is_not_a_number_is_not_hidden() -> None:
    old, rollout, _ = log_probs(0)
    old[1, 2] = math.nan
    for level in ROLLOUT_IS_LEVELS:
        weights_bt = weigh(old, rollout, torch.ones(ROWS, WIDTH), level).weights_bt
        assert bool(weights_bt[1, 2].isnan())
        assert bool(weights_bt[[0, 2, 3, 4]].isfinite().all())


@pytest.mark.parametrize(
    ("weights", "share"), [([1.0] * 4, 1.0), ([2.0, 0.0, 0.0, 0.0], 0.25), ([1.0, 2.0], 0.9)]
)
def test_the_effective_share_by_hand(weights: list[float], share: float) -> None:
    sample_n = torch.tensor(weights)
    found = ImportanceWeights(weights_bt=sample_n, sample_n=sample_n, clipped_n=sample_n > 2.0)
    assert float(found.effective_share()) == pytest.approx(share)


# -- weights in the loss -----------------------------------------------------------------------------------


def loss_and_gradient(
    mode: str, seed: int, weights_bt: torch.Tensor | None, aggregation: str = "token-mean"
) -> tuple[torch.Tensor, torch.Tensor]:
    old, rollout, mask = log_probs(seed)
    leaf = rollout.clone().requires_grad_()
    result = policy_loss(
        mode,
        PolicyLossInputs(
            log_probs_bt=leaf,
            old_log_probs_bt=old,
            advantages_bt=randn(generator(seed + 1), ROWS, WIDTH),
            mask_bt=mask,
            denominators=LossDenominators.count(mask, WIDTH),
            weights_bt=weights_bt,
        ),
        PolicyLossOptions(loss_agg_mode=aggregation),
    )
    result.loss.backward()
    assert leaf.grad is not None
    return result.loss.detach(), leaf.grad


@FAST
@given(seed=seeds, mode=st.sampled_from(sorted(POLICY_LOSSES)), level=levels)
def test_with_identical_policies_the_corrected_loss_is_the_uncorrected_one(
    seed: int, mode: str, level: str
) -> None:
    """Value and gradient, to the bit: rollout and old agree, whatever the policy that is trained."""
    old, _, mask = log_probs(seed)
    weights_bt = weigh(old, old.clone(), mask, level).weights_bt
    corrected, uncorrected = loss_and_gradient(mode, seed, weights_bt), loss_and_gradient(mode, seed, None)
    same(corrected[0], uncorrected[0], 0.0)
    same(corrected[1], uncorrected[1], 0.0)


@FAST
@given(seed=seeds)
def test_a_weight_multiplies_its_tokens_loss_and_gradient(seed: int) -> None:
    """Of PPO, whose tokens do not touch each other: gradient t is weight t times the plain one."""
    rng = generator(seed + 2)
    weights_bt = torch.rand(ROWS, WIDTH, generator=rng, dtype=torch.float64)
    _, plain = loss_and_gradient("vanilla", seed, None)
    _, weighted = loss_and_gradient("vanilla", seed, weights_bt)
    same(weighted, weights_bt * plain)


@FAST
@given(seed=seeds, mode=st.sampled_from(sorted(POLICY_LOSSES)))
def test_the_loss_is_linear_in_a_common_weight(seed: int, mode: str) -> None:
    half = torch.full((ROWS, WIDTH), 0.5, dtype=torch.float64)
    for aggregation in ("token-mean", "seq-mean-token-mean"):
        plain = loss_and_gradient(mode, seed, None, aggregation)
        weighted = loss_and_gradient(mode, seed, half, aggregation)
        same(weighted[0], 0.5 * plain[0])
        same(weighted[1], 0.5 * plain[1])


@pytest.mark.parametrize("mode", sorted(POLICY_LOSSES))
@pytest.mark.parametrize("junk", [math.nan, math.inf])
def test_weights_of_padding_never_matter_and_get_no_gradient(mode: str, junk: float) -> None:
    _, _, mask = log_probs(7)
    clean = torch.ones(ROWS, WIDTH, dtype=torch.float64)
    dirty = poison(clean, mask, junk).requires_grad_()
    expected, found = loss_and_gradient(mode, 7, clean), loss_and_gradient(mode, 7, dirty)
    same(found[0], expected[0], 0.0)
    same(found[1], expected[1], 0.0)
    assert dirty.grad is None


@pytest.mark.parametrize(("level", "length"), [("token", 1), ("sequence", 1), ("sequence", 3)])
def test_the_expected_gradient_over_rollouts_samples_is_that_over_the_policys_own(
    level: str, length: int
) -> None:
    """All responses of three letters, exactly: sampled by rollout and weighed, or sampled by the policy."""
    rng = generator(11)
    logits, rollout_logits = randn(rng, length, 3), randn(rng, length, 3)
    responses = torch.cartesian_prod(*[torch.arange(3)] * length).reshape(-1, length)
    advantages = randn(rng, len(responses), 1).expand(-1, length)
    mask = torch.ones(len(responses), length)

    def chosen(letters: torch.Tensor) -> torch.Tensor:
        return torch.stack([letters.log_softmax(-1)[t, responses[:, t]] for t in range(length)], dim=1)

    def expected_gradient(sampler: torch.Tensor, weights_bt: torch.Tensor | None) -> torch.Tensor:
        leaf = logits.clone().requires_grad_()
        chance = sampler.sum(1, keepdim=True).exp()  # how often each response is drawn
        loss = policy_loss(
            "vanilla",
            PolicyLossInputs(
                log_probs_bt=chosen(leaf),
                old_log_probs_bt=old,
                advantages_bt=advantages * chance,
                mask_bt=mask,
                denominators=LossDenominators.count(mask),
                weights_bt=weights_bt,
            ),
            PolicyLossOptions(loss_agg_mode="seq-mean-token-sum"),
        ).loss
        return torch.autograd.grad(loss, leaf)[0]

    old, rollout = chosen(logits), chosen(rollout_logits)
    weights_bt = weigh(old, rollout, mask, level, threshold=1e6).weights_bt
    wanted = expected_gradient(old, None)
    same(expected_gradient(rollout, weights_bt), wanted)
    assert float((expected_gradient(rollout, None) - wanted).abs().max()) > 1e-3


# -- what is refused ---------------------------------------------------------------------------------------


def test_errors_name_what_is_wrong() -> None:
    old, rollout, mask = log_probs(0)
    with pytest.raises(ValueError, match="rollout_is must be one of token, sequence, got 'geometric'"):
        weigh(old, rollout, mask, "geometric")
    with pytest.raises(ValueError, match=r"rollout_log_probs_bt \(5,\)"):
        weigh(old, rollout[:, 0], mask, "token")
    with pytest.raises(ValueError, match=r"weights_bt \(5,\)"):
        loss_and_gradient("vanilla", 0, torch.ones(ROWS))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"rollout_is": "geometric"}, "rollout_is must be one of token, sequence or None, got 'geometric'"),
        ({"rollout_is_threshold": 0.5}, "rollout_is_threshold must be at least 1, got 0.5"),
        ({"rollout_is_threshold": math.nan}, "rollout_is_threshold must be at least 1, got nan"),
        ({"rollout_is": "token", "bypass_mode": True}, "bypass_mode must be off with rollout_is"),
    ],
)
def test_options_are_checked(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        RolloutCorrection(**options)
