from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from neoproto.algorithms import logprobs
from neoproto.algorithms.logprobs import entropy_from_logits, log_probs_from_logits
from tests.neoproto.algorithms.batches import FAST, generator, randn, same, seeds

temperatures = st.sampled_from([0.3, 0.6, 1.0, 2.0])


def naive(logits: list[float], label: int, temperature: float) -> tuple[float, float]:
    """(log-prob of the label, entropy) of one token."""
    scaled = [z / temperature for z in logits]
    total = math.fsum(math.exp(z) for z in scaled)
    probabilities = [math.exp(z) / total for z in scaled]
    entropy = -math.fsum(p * math.log(p) for p in probabilities if p > 0)
    return math.log(probabilities[label]), entropy


def inputs(
    seed: int, rows: int = 2, width: int = 3, vocabulary: int = 5
) -> tuple[torch.Tensor, torch.Tensor]:
    rng = generator(seed)
    logits = 3.0 * randn(rng, rows, width, vocabulary)
    return logits, torch.randint(0, vocabulary, (rows, width), generator=rng)


@FAST
@given(seed=seeds, temperature=temperatures)
def test_agrees_with_a_naive_loop(seed: int, temperature: float) -> None:
    logits, labels = inputs(seed)
    log_probs = log_probs_from_logits(logits, labels, temperature)
    entropy = entropy_from_logits(logits, temperature)
    for b in range(2):
        for t in range(3):
            expected = naive(logits[b, t].tolist(), int(labels[b, t]), temperature)
            assert (float(log_probs[b, t]), float(entropy[b, t])) == pytest.approx(expected)


@FAST
@given(seed=seeds, temperature=temperatures, chunk=st.integers(1, 40))
def test_chunks_and_slices_change_nothing(seed: int, temperature: float, chunk: int) -> None:
    """Forward and backward, on a view that cannot be flattened."""
    logits, labels = inputs(seed, rows=3, width=5)

    def evaluate() -> list[torch.Tensor]:
        leaf = logits.clone().requires_grad_()
        view, chosen = leaf[:, 1:-1], labels[:, 1:-1]
        log_probs, entropy = (
            log_probs_from_logits(view, chosen, temperature),
            entropy_from_logits(view, temperature),
        )
        (log_probs.square().sum() + entropy.square().sum()).backward()
        assert leaf.grad is not None
        return [log_probs.detach(), entropy.detach(), leaf.grad]

    whole = evaluate()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(logprobs, "CHUNK_ELEMENTS", chunk)
        pieces = evaluate()
    for left, right in zip(whole, pieces, strict=True):
        same(left, right)


@pytest.mark.parametrize("temperature", [0.6, 1.0])
def test_gradients_agree_with_finite_differences(temperature: float) -> None:
    logits, labels = inputs(1)
    logits.requires_grad_()
    assert torch.autograd.gradcheck(lambda z: log_probs_from_logits(z, labels, temperature), (logits,))
    assert torch.autograd.gradcheck(lambda z: entropy_from_logits(z, temperature), (logits,))


@FAST
@given(seed=seeds, offset=st.sampled_from([1e4, -1e4, 3e4]))
def test_exact_under_large_logits(seed: int, offset: float) -> None:
    """float32 logits far from 0: as exact as the same differences near 0."""
    logits, labels = inputs(seed)
    large = (logits + offset).float()
    near = large.double() - offset
    same(log_probs_from_logits(large, labels, 0.6).double(), log_probs_from_logits(near, labels, 0.6), 1e-5)
    same(entropy_from_logits(large, 0.6).double(), entropy_from_logits(near, 0.6), 1e-5)


def test_extreme_logits_stay_finite() -> None:
    logits = torch.tensor([[[1e30, 0.0, -1e30]]], requires_grad=True)
    log_probs = log_probs_from_logits(logits, torch.tensor([[0]]))
    entropy = entropy_from_logits(logits)
    (log_probs.sum() + entropy.sum()).backward()
    assert float(log_probs.detach()) == 0.0
    assert float(entropy.detach()) == 0.0
    assert logits.grad is not None
    assert logits.grad.tolist() == [[[0.0, 0.0, 0.0]]]


def test_forbidden_tokens_have_no_share_and_nan_is_not_hidden() -> None:
    logits = torch.tensor([[[0.0, 0.0, -math.inf]]], requires_grad=True)
    entropy = entropy_from_logits(logits)
    entropy.sum().backward()
    assert float(entropy.detach()) == pytest.approx(math.log(2))
    assert logits.grad is not None
    assert logits.grad.tolist() == [[[0.0, 0.0, 0.0]]]
    assert log_probs_from_logits(logits.detach(), torch.tensor([[2]])).tolist() == [[-math.inf]]
    broken = torch.tensor([[[0.0, math.nan, 1.0]]])
    assert math.isnan(float(entropy_from_logits(broken)))
    assert math.isnan(float(log_probs_from_logits(broken, torch.tensor([[0]]))))


def test_half_precision_is_computed_in_float32() -> None:
    logits, labels = inputs(3, vocabulary=50)
    half = logits.bfloat16().requires_grad_()
    log_probs = log_probs_from_logits(half, labels)
    assert log_probs.dtype == torch.float32
    same(log_probs.detach().double(), log_probs_from_logits(half.detach().double(), labels), 1e-5)
    assert entropy_from_logits(half).dtype == torch.float32
    log_probs.sum().backward()
    assert half.grad is not None
    assert half.grad.dtype == torch.bfloat16


def test_only_the_logits_are_kept_for_backward() -> None:
    """No second tensor of the logits' size."""
    logits, labels = inputs(0, rows=2, width=3, vocabulary=100)
    logits = (logits * 1.0).requires_grad_()
    sizes: list[tuple[int, int]] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        sizes.append((tensor.numel(), tensor.data_ptr()))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        log_probs_from_logits(logits, labels, 0.6)
        entropy_from_logits(logits, 0.6)
    assert {pointer for size, pointer in sizes if size >= logits.numel()} == {logits.data_ptr()}


def test_errors_name_what_is_wrong() -> None:
    logits, labels = inputs(0)
    with pytest.raises(ValueError, match="temperature must be > 0, got 0"):
        log_probs_from_logits(logits, labels, 0.0)
    with pytest.raises(ValueError, match=r"labels_bt \(2, 2\) does not fit"):
        log_probs_from_logits(logits, labels[:, :2])
    with pytest.raises(ValueError, match=r"must be \[B, T, V\]"):
        entropy_from_logits(logits[0])
