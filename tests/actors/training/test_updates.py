import math

import pytest
import torch
from torch import nn

from actors.training.padded_batch import MicroBatch, PaddedBatch
from actors.training.ranks import Ranks
from actors.training.updates import LossShare, TrainLoop, TrainOptions
from neoproto.algorithms.aggregate import LossDenominators
from neoproto.config import OptimConfig
from neoproto.config.optim import UpdateConfig
from neoproto.errors import NonFiniteLoss
from tests.actors.tiny_llama import make_batch


class Scale(nn.Module):
    """Predicts `factor * values`, so that losses and gradients can be written down."""

    def __init__(self, start: float = 0.5) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.tensor([start]))


def train_loop(model: nn.Module, *, seed: int = 0, samples: int = 1, **changes) -> TrainLoop:
    values = {
        "ppo_mini_batch_size": 8,
        "ppo_micro_batch_size_per_gpu": 3,
        "shuffle": True,
        "grad_clip": 1e9,
        "optim": OptimConfig(lr=0.1, weight_decay=0.0, **changes.pop("optim", {})),
    }
    config = UpdateConfig(**(values | changes))
    return TrainLoop(
        model, config, TrainOptions(seed=seed, total_steps=10, samples_per_prompt=samples), Ranks()
    )


def squared_error(model: Scale):
    def loss(micro: MicroBatch, denominators: LossDenominators) -> LossShare:
        error = (model.factor * micro["values"] - micro["returns"]) * micro["response_mask"]
        share = error.square().sum() / denominators.tokens
        return LossShare(loss=share, metrics={"mse": share.detach(), "rows": torch.tensor(len(micro.rows))})

    return loss


def test_one_step_is_adamw_on_the_gradient_of_the_whole_mini_batch():
    columns = make_batch(8)
    model, naive = Scale(), Scale()
    metrics = train_loop(model).update(PaddedBatch(columns), squared_error(model))

    mask = columns["response_mask"] == 1
    error = naive.factor * columns["values"][mask] - columns["returns"][mask]
    error.square().mean().backward()
    torch.optim.AdamW(naive.parameters(), lr=0.1, weight_decay=0.0).step()
    torch.testing.assert_close(model.factor, naive.factor, atol=1e-6, rtol=0)
    assert metrics["mse"] == pytest.approx(error.square().mean().item(), abs=1e-6)
    assert metrics["grad_norm"] == pytest.approx(naive.factor.grad.abs().item(), abs=1e-6)
    assert metrics["rows"] == 8


def test_denominators_are_those_of_the_mini_batch_not_of_the_piece():
    columns, model, seen = make_batch(8, empty=(2, 5)), Scale(), []

    def loss(micro, denominators):
        seen.append(denominators)
        return squared_error(model)(micro, denominators)

    train_loop(model).update(PaddedBatch(columns), loss)
    whole = LossDenominators(tokens=float(columns["response_mask"].sum()), sequences=6.0, horizon=7.0)
    assert seen == [whole] * 3


def test_epochs_and_mini_batches_each_make_a_step_and_figures_are_their_means():
    model, sizes = Scale(), []

    def loss(micro, denominators):
        sizes.append(len(micro.rows))
        return squared_error(model)(micro, denominators)

    loop = train_loop(model, ppo_mini_batch_size=4, ppo_epochs=3)
    metrics = loop.update(PaddedBatch(make_batch(8)), loss)
    assert sizes == [3, 1] * 2 * 3
    assert loop.optimizer.state[model.factor]["step"] == 6
    assert metrics["rows"] == 4


def test_a_mini_batch_counts_prompts_and_a_micro_batch_samples():
    model, sizes = Scale(), []

    def loss(micro, denominators):
        sizes.append(len(micro.rows))
        return squared_error(model)(micro, denominators)

    loop = train_loop(model, samples=4, ppo_mini_batch_size=1)
    loop.update(PaddedBatch(make_batch(8)), loss)
    assert sizes == [3, 1] * 2


def test_the_learning_rate_moves_once_per_update_and_never_starts_at_zero():
    model = Scale()
    optim = {"lr_warmup_steps": 2, "lr_scheduler_type": "linear"}
    loop = train_loop(model, ppo_mini_batch_size=4, ppo_epochs=2, optim=optim)
    batch, loss = PaddedBatch(make_batch(8)), squared_error(model)
    rates = [loop.update(batch, loss)["lr"] for _ in range(4)]
    assert rates == pytest.approx([0.05, 0.1, 0.1, 0.1 * 7 / 8])
    assert loop.updates == 4
    assert loop.optimizer.param_groups[0]["lr"] == rates[-1]


def test_the_gradient_is_clipped_and_its_norm_reported_before_clipping():
    model = Scale()
    loop = train_loop(model, grad_clip=1e-3)
    metrics = loop.update(PaddedBatch(make_batch(8)), squared_error(model))
    assert metrics["grad_norm"] > 0.1
    assert model.factor.grad.norm() == pytest.approx(1e-3, rel=1e-3)


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("where", ["loss", "gradient"])
def test_what_is_not_finite_raises_and_changes_nothing(value, where):
    model = Scale()
    loop = train_loop(model)

    def loss(micro, denominators):
        share = squared_error(model)(micro, denominators).loss
        if where == "gradient":
            model.factor.register_hook(lambda gradient: gradient * value)
        return LossShare(loss=share * value if where == "loss" else share, metrics={})

    with pytest.raises(NonFiniteLoss, match=r"update 0, epoch 0, mini-batch 0"):
        loop.update(PaddedBatch(make_batch(8)), loss)
    assert model.factor.item() == 0.5
    assert model.factor.grad is None
    assert not loop.optimizer.state
    assert loop.updates == 0


def test_a_mini_batch_without_tokens_is_no_step():
    model = Scale()
    loop = train_loop(model, ppo_mini_batch_size=4, shuffle=False)
    metrics = loop.update(PaddedBatch(make_batch(8, empty=(0, 2, 4, 6))), squared_error(model))
    assert loop.optimizer.state[model.factor]["step"] == 1
    assert metrics["rows"] == 4

    metrics = loop.update(PaddedBatch(make_batch(8, empty=tuple(range(8)))), squared_error(model))
    assert loop.optimizer.state[model.factor]["step"] == 1
    assert metrics == {"grad_norm": 0.0, "lr": 0.1}


def test_shuffling_is_drawn_anew_in_every_epoch_and_update_and_repeats_with_the_seed():
    def drawn(seed: int, shuffle: bool = True) -> list[tuple[int, ...]]:
        model, rows = Scale(), []

        def loss(micro, denominators):
            rows.append(tuple(sorted(micro.rows.tolist())))
            return squared_error(model)(micro, denominators)

        sizes = {"ppo_mini_batch_size": 4, "ppo_micro_batch_size_per_gpu": 4, "ppo_epochs": 2}
        loop = train_loop(model, seed=seed, shuffle=shuffle, **sizes)
        for _ in range(2):
            loop.update(PaddedBatch(make_batch(16)), loss)
        return rows

    assert drawn(1) == drawn(1)
    assert drawn(1) != drawn(2)
    epochs = {tuple(drawn(1)[start : start + 4]) for start in range(0, 16, 4)}
    assert len(epochs) == 4
    assert drawn(1, shuffle=False)[:4] * 4 == drawn(1, shuffle=False)


@pytest.mark.parametrize("field", ["samples_per_prompt", "total_steps"])
def test_useless_options_are_refused(field):
    with pytest.raises(ValueError, match=f"{field} must be"):
        TrainOptions(**{field: 0})
