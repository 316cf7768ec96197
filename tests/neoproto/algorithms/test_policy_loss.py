from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from neoproto.algorithms.aggregate import LossDenominators
from neoproto.algorithms.losses import POLICY_LOSSES, policy_loss
from neoproto.algorithms.policy_loss import PolicyLoss, PolicyLossInputs, PolicyLossOptions
from tests.neoproto.algorithms.batches import FAST, generator, poison, randn, random_mask, same, seeds, widen

ROWS, WIDTH = 5, 4
OPTIONS = PolicyLossOptions(clip_ratio_low=0.2, clip_ratio_high=0.3, clip_ratio_c=2.0)
SEQUENCE_OPTIONS = dataclasses.replace(OPTIONS, loss_agg_mode="seq-mean-token-mean")
modes = st.sampled_from(sorted(POLICY_LOSSES))

Batch = dict[str, torch.Tensor]


def random_batch(seed: int) -> Batch:
    """Log-ratios of about +-1: free, clipped and dual-clipped tokens all occur."""
    rng = generator(seed)
    return {
        "log_probs_bt": randn(rng, ROWS, WIDTH),
        "old_log_probs_bt": randn(rng, ROWS, WIDTH),
        "advantages_bt": randn(rng, ROWS, WIDTH),
        "mask_bt": random_mask(rng, ROWS, WIDTH, holes=True),
    }


def evaluate(
    mode: str, batch: Batch, options: PolicyLossOptions = OPTIONS, whole: LossDenominators | None = None
) -> PolicyLoss:
    denominators = whole or LossDenominators.count(batch["mask_bt"], WIDTH)
    return policy_loss(mode, PolicyLossInputs(**batch, denominators=denominators), options)


def figures(result: PolicyLoss) -> torch.Tensor:
    return torch.stack(
        [getattr(result, field.name).detach().double() for field in dataclasses.fields(result)]
    )


@FAST
@given(seed=seeds)
def test_vanilla_agrees_with_a_naive_loop(seed: int) -> None:
    batch = random_batch(seed)
    total = clipped = lower = kl = 0.0
    tokens = max(int(batch["mask_bt"].sum()), 1)
    for log_prob, old, advantage, mask in zip(
        *(tensor.flatten().tolist() for tensor in batch.values()), strict=True
    ):
        if not mask:
            continue
        ratio = math.exp(log_prob - old)
        free, held = -advantage * ratio, -advantage * min(max(ratio, 0.8), 1.3)
        loss = max(free, held)
        clipped += held > free
        if advantage < 0:
            lower += loss > -2.0 * advantage
            loss = min(loss, -2.0 * advantage)
        total, kl = total + loss, kl + old - log_prob
    expected = torch.tensor([total, clipped, lower, kl], dtype=torch.float64) / tokens
    same(figures(evaluate("vanilla", batch)), expected, 1e-6)


@FAST
@given(seed=seeds)
def test_gspo_agrees_with_a_naive_loop(seed: int) -> None:
    batch = random_batch(seed)
    rows = []
    clipped, kl = 0.0, 0.0
    for b in range(ROWS):
        steps = [t for t in range(WIDTH) if batch["mask_bt"][b, t]]
        if not steps:
            continue
        differences = [float(batch["log_probs_bt"][b, t] - batch["old_log_probs_bt"][b, t]) for t in steps]
        ratio = math.exp(sum(differences) / len(steps))
        losses = []
        for t in steps:
            advantage = float(batch["advantages_bt"][b, t])
            free, held = -advantage * ratio, -advantage * min(max(ratio, 0.8), 1.3)
            losses.append(max(free, held))
            clipped += held > free
        rows.append(sum(losses) / len(losses))
        kl -= sum(differences)
    tokens = max(int(batch["mask_bt"].sum()), 1)
    expected = [sum(rows) / max(len(rows), 1), clipped / tokens, 0.0, kl / tokens]
    result = evaluate("gspo", batch, SEQUENCE_OPTIONS)
    same(figures(result), torch.tensor(expected, dtype=torch.float64), 1e-6)


def one_token(log_ratio: float, advantage: float, mode: str = "vanilla") -> tuple[float, float]:
    """(loss, d loss / d log-prob) of a single token."""
    log_prob = torch.tensor([[log_ratio]], dtype=torch.float64, requires_grad=True)
    one = torch.ones_like(log_prob.detach())
    batch = {
        "log_probs_bt": log_prob,
        "old_log_probs_bt": 0 * one,
        "advantages_bt": advantage * one,
        "mask_bt": one,
    }
    result = evaluate(mode, batch)
    result.loss.backward()
    assert log_prob.grad is not None
    return float(result.loss.detach()), float(log_prob.grad)


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient"),
    [
        (1.0, 2.0, -2.0, -2.0),
        (1.25, 2.0, -2.5, -2.5),
        (1.5, 2.0, -2.6, 0.0),  # clipped above: 1.3 * 2
        (0.5, 2.0, -1.0, -1.0),  # PPO leaves this side open
        (0.5, -2.0, 1.6, 0.0),  # clipped below: 0.8 * 2
        (1.5, -2.0, 3.0, 3.0),
        (3.0, -2.0, 4.0, 0.0),  # dual clip: c * 2
        (3.0, 0.0, 0.0, 0.0),
    ],
)
def test_one_token_by_hand(ratio: float, advantage: float, loss: float, gradient: float) -> None:
    assert one_token(math.log(ratio), advantage) == pytest.approx((loss, gradient))


@pytest.mark.parametrize("mode", sorted(POLICY_LOSSES))
@pytest.mark.parametrize("log_ratio", [-1e4, -50.0, 50.0, 1e4])
@pytest.mark.parametrize("advantage", [-1.0, 0.0, 1.0])
def test_large_log_ratios_stay_finite(mode: str, log_ratio: float, advantage: float) -> None:
    assert all(math.isfinite(value) for value in one_token(log_ratio, advantage, mode))


def test_log_ratios_are_clamped_where_stated() -> None:
    """The unclipped side shows the clamp: A < 0 without dual clip, and GSPO's ratio."""
    one = torch.ones(1, 1, dtype=torch.float64)
    batch = {"log_probs_bt": 50 * one, "old_log_probs_bt": 0 * one, "advantages_bt": -one, "mask_bt": one}
    open_ended = dataclasses.replace(OPTIONS, clip_ratio_c=math.inf)
    result = evaluate("vanilla", batch, open_ended)
    assert float(result.loss) == pytest.approx(math.exp(20))
    assert float(result.pg_clipfrac_lower) == 0.0
    indifferent = evaluate("vanilla", {**batch, "advantages_bt": 0 * one}, open_ended)
    assert float(indifferent.loss) == 0.0
    assert float(evaluate("gspo", batch).loss) == pytest.approx(math.exp(10))


@pytest.mark.parametrize("mode", sorted(POLICY_LOSSES))
def test_on_policy_gradient_is_the_policy_gradient(mode: str) -> None:
    """At ratio 1 both losses are REINFORCE: d loss / d logp_t = -A_t / N."""
    batch = random_batch(3)
    batch["mask_bt"] = torch.ones(ROWS, WIDTH)
    batch["old_log_probs_bt"] = batch["log_probs_bt"].clone()
    batch["log_probs_bt"].requires_grad_()
    evaluate(mode, batch, SEQUENCE_OPTIONS).loss.backward()
    assert batch["log_probs_bt"].grad is not None
    same(batch["log_probs_bt"].grad, -batch["advantages_bt"] / (ROWS * WIDTH))


def test_gspo_clips_whole_sequences() -> None:
    """Row ratio exp(0.5) > 1.3: with A > 0 no token has a gradient, not even one whose own ratio is 1."""
    log_probs = torch.tensor([[1.0, 0.0]], requires_grad=True)
    ones = torch.ones(1, 2)
    batch = {"log_probs_bt": log_probs, "old_log_probs_bt": 0 * ones, "advantages_bt": ones, "mask_bt": ones}
    result = evaluate("gspo", batch)
    result.loss.backward()
    assert log_probs.grad is not None
    assert log_probs.grad.tolist() == [[0.0, 0.0]]
    assert float(result.loss.detach()) == pytest.approx(-1.3)
    assert float(result.pg_clipfrac) == 1.0


@FAST
@given(seed=seeds, mode=modes, junk=st.sampled_from([math.nan, math.inf, -math.inf, 1e30]))
def test_padding_content_never_matters(seed: int, mode: str, junk: float) -> None:
    """Neither for the figures nor for the gradient."""
    clean = random_batch(seed)
    dirty = {
        name: poison(tensor, clean["mask_bt"], junk) if name != "mask_bt" else tensor
        for name, tensor in clean.items()
    }
    gradients = []
    for batch in (clean, dirty):
        batch["log_probs_bt"].requires_grad_()
        evaluate(mode, batch).loss.backward()
        assert batch["log_probs_bt"].grad is not None
        gradients.append(batch["log_probs_bt"].grad)
    same(gradients[1], gradients[0])
    assert not bool(gradients[1][clean["mask_bt"] == 0].any())
    same(figures(evaluate(mode, dirty)), figures(evaluate(mode, clean)))


@FAST
@given(seed=seeds, mode=modes, cut=st.integers(1, ROWS - 1), columns=st.integers(0, 2))
def test_micro_batches_sum_to_the_mini_batch(seed: int, mode: str, cut: int, columns: int) -> None:
    """Loss and figures alike, at any cut and padded width."""
    batch = random_batch(seed)
    whole = LossDenominators.count(batch["mask_bt"])
    first = {name: tensor[:cut] for name, tensor in batch.items()}
    second = {name: widen(tensor[cut:], columns) for name, tensor in batch.items()}
    total = figures(evaluate(mode, first, SEQUENCE_OPTIONS, whole)) + figures(
        evaluate(mode, second, SEQUENCE_OPTIONS, whole)
    )
    same(total, figures(evaluate(mode, batch, SEQUENCE_OPTIONS)), 1e-6)


@FAST
@given(seed=seeds, mode=modes, order=st.permutations(range(ROWS)))
def test_rows_may_come_in_any_order(seed: int, mode: str, order: list[int]) -> None:
    batch = random_batch(seed)
    shuffled = {name: tensor[order] for name, tensor in batch.items()}
    same(figures(evaluate(mode, shuffled)), figures(evaluate(mode, batch)), 1e-6)


def test_only_the_loss_carries_a_gradient() -> None:
    batch = random_batch(0)
    batch["log_probs_bt"].requires_grad_()
    batch["old_log_probs_bt"].requires_grad_()
    for mode in POLICY_LOSSES:
        result = evaluate(mode, batch)
        carried = [
            field.name for field in dataclasses.fields(result) if getattr(result, field.name).requires_grad
        ]
        assert carried == ["loss"]
        result.loss.backward()
        assert batch["old_log_probs_bt"].grad is None


def test_errors_name_what_is_wrong() -> None:
    batch = random_batch(0)
    with pytest.raises(ValueError, match="must be one of gspo, vanilla, got 'clip_cov'"):
        evaluate("clip_cov", batch)
    batch["advantages_bt"] = batch["advantages_bt"][:, 0]
    with pytest.raises(ValueError, match=r"advantages_bt \(5,\)"):
        evaluate("vanilla", batch)


@pytest.mark.parametrize(
    ("field", "value"),
    [("clip_ratio_low", 1.0), ("clip_ratio_high", 0.0), ("clip_ratio_c", 1.0), ("loss_agg_mode", "mean")],
)
def test_options_are_checked(field: str, value: float | str) -> None:
    with pytest.raises(ValueError, match=f"{field} must be .* got '?{value}"):
        dataclasses.replace(OPTIONS, **{field: value})
