import math

import pytest
import torch
from transformers import AutoModel

from actors.training.critic import Critic, CriticOptions, CriticWorker
from actors.training.ranks import Ranks
from actors.training.torch_model import ModelOptions
from actors.training.updates import TrainOptions
from neoproto.algorithms.value_loss import explained_variance
from neoproto.config import CriticConfig, OptimConfig
from neoproto.data import DataProto
from neoproto.errors import NonFiniteLoss
from tests.actors.tiny_llama import make_batch


def make_critic(folder: str, *, head: float = 0.3, micro_batch_size: int = 3, **changes) -> Critic:
    """A critic whose head is not zero any more."""
    critic = Critic(critic_options(folder, micro_batch_size=micro_batch_size, **changes), Ranks())
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        critic.model.head.weight.copy_(
            torch.randn(critic.model.head.weight.shape, generator=generator) * head
        )
    return critic


def critic_options(folder: str, *, micro_batch_size: int = 3, **changes) -> CriticOptions:
    critic = CriticConfig(
        ppo_mini_batch_size=8,
        ppo_micro_batch_size_per_gpu=micro_batch_size,
        shuffle=True,
        optim=OptimConfig(lr=1e-3, eps=1e-3, weight_decay=0.0),
        **changes,
    )
    return CriticOptions(model=ModelOptions(path=folder), critic=critic, train=TrainOptions(total_steps=10))


def naive_values(critic: Critic, columns, row: int) -> torch.Tensor:
    """Value of every state from the one before the first response token to the one after the last."""
    attended = columns["attention_mask"][row].bool()
    response = int(attended[-columns["responses"].shape[1] :].sum())
    ids = columns["input_ids"][row][attended].unsqueeze(0)
    hidden = critic.model.body(ids).last_hidden_state[0, -response - 1 :]
    return critic.model.head(hidden).squeeze(1)


def test_an_untrained_critic_expects_nothing(llama_folder):
    found = Critic(critic_options(llama_folder), Ranks()).values(make_batch(4))
    assert not found["values"].any()
    assert not found["bootstrap_values"].any()


def test_the_body_is_the_policys(llama_folder):
    body = Critic(critic_options(llama_folder), Ranks()).model.body
    expected = AutoModel.from_pretrained(llama_folder).state_dict()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in body.state_dict().items())


@pytest.mark.parametrize("micro_batch_size", [1, 3, 64])
def test_values_are_those_of_the_states_before_each_token_and_after_the_last(llama_folder, micro_batch_size):
    columns, critic = make_batch(8), make_critic(llama_folder, micro_batch_size=micro_batch_size)
    found = critic.values(columns)
    assert found["values"].shape == (8, 7)
    assert found["bootstrap_values"].shape == (8,)
    for row in range(8):
        expected = naive_values(critic, columns, row).detach()
        length = len(expected) - 1
        torch.testing.assert_close(found["values"][row, :length], expected[:-1], atol=1e-5, rtol=0)
        assert not found["values"][row, length:].any()
        torch.testing.assert_close(found["bootstrap_values"][row], expected[-1], atol=1e-5, rtol=0)


@pytest.mark.parametrize("cliprange_value", [0.5, 1e9])
def test_an_update_is_the_naive_one(llama_folder, cliprange_value):
    columns = make_batch(8, empty=(5,))
    critic = make_critic(llama_folder, cliprange_value=cliprange_value)
    naive = make_critic(llama_folder)
    metrics = critic.update(columns)

    loss, tokens = torch.zeros(()), columns["response_mask"].sum()
    for row, length in enumerate(columns["response_mask"].sum(dim=1).tolist()):
        if length:
            values = naive_values(naive, columns, row)[:-1]
            old, returns = columns["values"][row, :length], columns["returns"][row, :length]
            near = torch.min(torch.max(values, old - cliprange_value), old + cliprange_value)
            loss = loss + torch.max((values - returns) ** 2, (near - returns) ** 2).sum() / 2 / tokens
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(naive.model.parameters(), 1.0)
    torch.optim.AdamW(naive.model.parameters(), lr=1e-3, eps=1e-3, weight_decay=0.0).step()
    for (name, found), expected in zip(
        critic.model.named_parameters(), naive.model.parameters(), strict=True
    ):
        torch.testing.assert_close(found, expected, atol=2e-6, rtol=0, msg=name)
    assert metrics["critic/vf_loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert metrics["critic/grad_norm"] == pytest.approx(norm.item(), rel=1e-4)


def test_metrics_have_the_names_of_the_field_and_the_explained_variance_is_the_formula(llama_folder):
    columns = make_batch(8, empty=(2,))
    columns["values"] = columns["returns"] + 0.4 * columns["values"]
    metrics = make_critic(llama_folder).update(columns)
    names = "vf_loss vf_clipfrac vpred_mean vf_explained_var grad_norm lr"
    assert sorted(metrics) == sorted(f"critic/{name}" for name in names.split())
    expected = explained_variance(columns["values"], columns["returns"], columns["response_mask"])
    assert 0.5 < expected < 1
    assert metrics["critic/vf_explained_var"] == pytest.approx(expected.item(), abs=1e-5)


def test_returns_that_do_not_vary_leave_nothing_to_explain(llama_folder):
    columns = make_batch(8)
    columns["returns"] = torch.full_like(columns["returns"], 0.1) * columns["response_mask"]
    assert make_critic(llama_folder).update(columns)["critic/vf_explained_var"] == 0.0


def test_it_learns_the_returns(llama_folder):
    columns, critic = make_batch(8), Critic(critic_options(llama_folder, cliprange_value=1e9), Ranks())
    losses = []
    for _ in range(15):
        columns |= {"values": critic.values(columns)["values"]}
        losses.append(critic.update(columns)["critic/vf_loss"])
    assert losses[-1] < 0.8 * losses[0]


def test_a_loss_that_is_not_finite_leaves_the_weights_as_they_are(llama_folder):
    columns, critic = make_batch(8), make_critic(llama_folder)
    before = [parameter.detach().clone() for parameter in critic.model.parameters()]
    columns["returns"][0, 0] = math.inf
    with pytest.raises(NonFiniteLoss):
        critic.update(columns)
    assert all(map(torch.equal, before, critic.model.parameters()))


def test_the_worker_answers_with_a_batch_and_updates(llama_folder):
    worker = object.__new__(CriticWorker)
    worker.rank, worker.world_size, worker.local_rank = 0, 1, 0
    worker.__init__(critic_options(llama_folder))
    columns = make_batch(8)
    batch = DataProto.from_dict(tensors=columns)
    answer = worker.compute_values(batch)
    assert answer["values"].shape == (8, 7)
    assert answer["bootstrap_values"].shape == (8,)
    expected = Critic(critic_options(llama_folder), Ranks()).update(columns)
    assert worker.update_critic(batch) == expected
