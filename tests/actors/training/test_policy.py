import json
import math
import shutil
from dataclasses import replace

import pytest
import torch
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, GPT2LMHeadModel

from actors.training.policy import Policy, PolicyOptions, PolicyWorker
from actors.training.ranks import Ranks
from actors.training.torch_model import ModelOptions, check_savable, load_model, save_hf_folder
from actors.training.updates import TrainOptions
from neoproto.config import ActorConfig, OptimConfig
from neoproto.data import DataProto
from neoproto.errors import NonFiniteLoss, StoreError
from neoproto.store import MemoryStore, use_store
from neoproto.weights import WeightOptions, WeightVersion
from neoproto.weights.puller import WeightReader
from tests.actors.tiny_llama import CHAT_TEMPLATE, VOCABULARY, make_batch


def options(folder: str, **changes) -> PolicyOptions:
    """Adam's epsilon is large, so that rounding in a tiny gradient does not become a full step."""
    actor = {
        "ppo_mini_batch_size": 8,
        "ppo_micro_batch_size_per_gpu": 8,
        "shuffle": True,
        "optim": OptimConfig(lr=1e-3, eps=1e-3, weight_decay=0.0),
    } | {name: changes.pop(name) for name in ActorConfig.model_fields.keys() & changes.keys()}
    return PolicyOptions(
        model=ModelOptions(path=folder),
        actor=ActorConfig(**actor),
        train=TrainOptions(total_steps=10),
        **changes,
    )


def weights(policy: Policy) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in policy.model.state_dict().items()}


def largest_difference(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> float:
    assert left.keys() == right.keys()
    return max((left[name] - right[name]).abs().max().item() for name in left)


def naive_log_probs(model, columns, row: int, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs and entropies of one row's response: forward of its real tokens alone, plain log-softmax."""
    attended = columns["attention_mask"][row].bool()
    width = columns["responses"].shape[1]
    response = int(attended[-width:].sum())
    ids = columns["input_ids"][row][attended]
    logits = model(ids.unsqueeze(0)).logits[0, -response - 1 : -1] / temperature
    log_p = torch.log_softmax(logits, dim=-1)
    chosen = log_p.gather(1, ids[-response:].unsqueeze(1)).squeeze(1)
    return chosen, -(log_p.exp() * log_p).sum(dim=1)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("micro_batch_size", [1, 3, 64])
def test_log_probs_are_those_of_an_unpadded_forward_at_the_sampling_temperature(
    llama_folder, temperature, micro_batch_size
):
    columns = make_batch(8)
    policy = Policy(
        options(llama_folder, temperature=temperature, log_prob_micro_batch_size=micro_batch_size), Ranks()
    )
    scores = policy.log_probs(columns)
    model = AutoModelForCausalLM.from_pretrained(llama_folder)
    for row in range(8):
        with torch.no_grad():
            log_probs, entropies = naive_log_probs(model, columns, row, temperature)
        for name, expected in (("old_log_probs", log_probs), ("entropys", entropies)):
            assert scores[name].dtype == torch.float32
            torch.testing.assert_close(scores[name][row, : len(expected)], expected, atol=1e-5, rtol=0)
            assert not scores[name][row, len(expected) :].any()


def test_log_probs_are_zero_outside_the_response_mask(llama_folder):
    columns = make_batch(8)
    columns["response_mask"][:, 0] = 0
    scores = Policy(options(llama_folder), Ranks()).log_probs(columns)
    assert not scores["old_log_probs"][:, 0].any()
    assert not scores["entropys"][:, 0].any()


def naive_update(
    folder: str, columns, chosen: PolicyOptions
) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    """One PPO step, row by row, from the formulas: clipped surrogate, entropy bonus, k3 to the reference."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    lengths = columns["response_mask"].sum(dim=1)
    pg_loss = entropy = kl = 0.0
    for row, length in enumerate(lengths.tolist()):
        if length == 0:
            continue
        log_probs, entropies = naive_log_probs(model, columns, row, chosen.temperature)
        old, advantages = columns["old_log_probs"][row, :length], columns["advantages"][row, :length]
        reference = columns["ref_log_prob"][row, :length]
        ratio = (log_probs - old).exp()
        loss = -torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
        loss = torch.where(advantages < 0, torch.min(loss, -3.0 * advantages), loss)
        weight = {"token-mean": 1 / lengths.sum(), "seq-mean-token-mean": 1 / length / (lengths > 0).sum()}
        weight = weight[chosen.actor.loss_agg_mode]
        pg_loss = pg_loss + loss.sum() * weight
        entropy = entropy + entropies.sum() * weight
        d = log_probs - reference
        kl = kl + ((-d).exp() - 1 + d).clamp(max=10.0).sum() * weight
    total = (
        pg_loss
        - chosen.actor.entropy_coeff * entropy
        + (chosen.actor.kl_loss_coef * kl if chosen.actor.use_kl_loss else 0)
    )
    total.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), chosen.actor.grad_clip)
    optim = chosen.actor.optim
    torch.optim.AdamW(
        model.parameters(), lr=optim.lr, eps=optim.eps, weight_decay=optim.weight_decay, betas=optim.betas
    ).step()
    metrics = {"actor/pg_loss": pg_loss.item(), "actor/kl_loss": kl.item(), "actor/grad_norm": norm.item()}
    return {name: tensor.detach() for name, tensor in model.state_dict().items()}, metrics


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"entropy_coeff": 0.3, "temperature": 0.7},
        {"use_kl_loss": True, "kl_loss_coef": 0.5},
        {"loss_agg_mode": "seq-mean-token-mean", "entropy_coeff": 0.1},
    ],
    ids=["plain", "entropy", "kl", "by-sequence"],
)
def test_an_update_is_the_naive_one(llama_folder, changes):
    columns, chosen = (
        make_batch(8, empty=(3,)),
        options(llama_folder, ppo_micro_batch_size_per_gpu=3, **changes),
    )
    policy = Policy(chosen, Ranks())
    metrics = policy.update(columns)
    expected, expected_figures = naive_update(llama_folder, columns, chosen)
    assert largest_difference(weights(policy), expected) < 2e-6
    for name, value in expected_figures.items():
        if name in metrics:
            assert metrics[name] == pytest.approx(value, rel=1e-4, abs=1e-5), name
    assert ("actor/kl_loss" in metrics) == chosen.actor.use_kl_loss


def test_weights_multiply_each_tokens_loss(llama_folder):
    """Without dual clip, a weight of the loss is one of the advantage: w max(-A r, …) = max(-w A r, …)."""
    columns = make_batch(8, empty=(3,))
    generator = torch.Generator().manual_seed(5)
    weights_bt = 2.0 * torch.rand(8, 7, generator=generator) * columns["response_mask"]
    common = {"clip_ratio_c": 1e9, "ppo_micro_batch_size_per_gpu": 3, "entropy_coeff": 0.1}
    policy = Policy(options(llama_folder, use_rollout_is=True, **dict(common)), Ranks())
    assert "rollout_is_weights" in policy.update_columns
    with pytest.raises(KeyError, match="rollout_is_weights"):
        policy.update(columns)

    by_column = policy.update(columns | {"rollout_is_weights": weights_bt})
    scaled = Policy(options(llama_folder, **dict(common)), Ranks())
    assert "rollout_is_weights" not in scaled.update_columns
    by_advantage = scaled.update(columns | {"advantages": columns["advantages"] * weights_bt})
    assert largest_difference(weights(policy), weights(scaled)) < 1e-6
    assert by_column == pytest.approx(by_advantage, abs=1e-5)
    unweighted = Policy(options(llama_folder, **dict(common)), Ranks())
    assert unweighted.update(columns)["actor/pg_loss"] != pytest.approx(by_column["actor/pg_loss"], abs=1e-3)
    assert largest_difference(weights(policy), weights(unweighted)) > 1e-4


def test_metrics_have_the_names_of_the_field(llama_folder):
    metrics = Policy(options(llama_folder, use_kl_loss=True), Ranks()).update(make_batch(8))
    names = "pg_loss pg_clipfrac pg_clipfrac_lower ppo_kl entropy kl_loss grad_norm lr"
    assert sorted(metrics) == sorted(f"actor/{name}" for name in names.split())
    assert all(math.isfinite(value) for value in metrics.values())
    assert metrics["actor/lr"] == 1e-3


def test_the_first_pass_on_fresh_log_probs_has_ratio_one(llama_folder):
    columns, policy = make_batch(8), Policy(options(llama_folder), Ranks())
    columns |= policy.log_probs(columns)
    del columns["entropys"]
    metrics = policy.update(columns)
    assert metrics["actor/ppo_kl"] == pytest.approx(0.0, abs=1e-6)
    assert metrics["actor/pg_clipfrac"] == 0.0
    mask = columns["response_mask"] == 1
    assert metrics["actor/pg_loss"] == pytest.approx(-columns["advantages"][mask].mean().item(), abs=1e-5)
    moved = (policy.log_probs(columns)["old_log_probs"] - columns["old_log_probs"])[mask]
    assert (moved * columns["advantages"][mask]).mean() > 0


def test_the_result_does_not_depend_on_micro_batches(llama_folder):
    columns, found = make_batch(16), []
    for micro_batch_size in (1, 4, 16):
        actor = {"ppo_micro_batch_size_per_gpu": micro_batch_size, "ppo_epochs": 2, "entropy_coeff": 0.1}
        policy = Policy(options(llama_folder, **actor), Ranks())
        metrics = policy.update(columns)
        found.append((weights(policy), metrics))
    for state, metrics in found[1:]:
        assert largest_difference(found[0][0], state) < 1e-6
        assert metrics == pytest.approx(found[0][1], abs=1e-5)


def test_rows_with_an_empty_mask_contribute_nothing(llama_folder):
    columns = make_batch(8, empty=(1, 6))
    kept = [0, 2, 3, 4, 5, 7]
    states = []
    for rows in (list(range(8)), kept):
        actor = {"ppo_mini_batch_size": len(rows), "loss_agg_mode": "seq-mean-token-mean"}
        policy = Policy(options(llama_folder, **actor), Ranks())
        policy.update({name: column[rows] for name, column in columns.items()})
        states.append(weights(policy))
    assert largest_difference(*states) < 1e-6


def test_the_same_seed_gives_the_same_bits(llama_folder):
    columns, states = make_batch(16), []
    for _ in range(2):
        policy = Policy(options(llama_folder, ppo_epochs=2, ppo_micro_batch_size_per_gpu=3), Ranks())
        for _ in range(2):
            metrics = policy.update(columns)
        states.append((weights(policy), metrics))
    assert largest_difference(states[0][0], states[1][0]) == 0.0
    assert states[0][1] == states[1][1]


def test_a_loss_that_is_not_finite_leaves_the_weights_as_they_are(llama_folder):
    columns, policy = make_batch(8), Policy(options(llama_folder), Ranks())
    before = weights(policy)
    columns["advantages"][3, 0] = math.nan
    with pytest.raises(NonFiniteLoss, match="loss nan"):
        policy.update(columns)
    assert largest_difference(before, weights(policy)) == 0.0


def test_gradient_checkpointing_changes_nothing(llama_folder):
    columns, states = make_batch(8), []
    for checkpointing in (False, True):
        chosen = options(llama_folder)
        chosen = replace(chosen, model=replace(chosen.model, gradient_checkpointing=checkpointing))
        policy = Policy(chosen, Ranks())
        policy.update(columns)
        states.append(weights(policy))
    assert largest_difference(*states) < 1e-6


def test_a_saved_folder_loads_with_weights_tokenizer_and_chat_template(tied_llama_folder, tmp_path):
    policy = Policy(options(tied_llama_folder), Ranks())
    target = tmp_path / "deep" / "saved"
    policy.save(str(target))
    policy.update(make_batch(8))
    policy.save(str(target))
    loaded = AutoModelForCausalLM.from_pretrained(target)
    assert largest_difference(loaded.state_dict(), weights(policy)) == 0.0
    assert loaded.config.architectures == ["LlamaForCausalLM"]
    assert loaded.lm_head.weight.data_ptr() == loaded.model.embed_tokens.weight.data_ptr()
    tokenizer = AutoTokenizer.from_pretrained(target)
    assert tokenizer.chat_template == CHAT_TEMPLATE
    assert tokenizer("w5 w6")["input_ids"] == [5, 6]
    assert [path.name for path in target.parent.iterdir()] == ["saved"]


@pytest.mark.parametrize(
    ("generation", "config", "written"),
    [
        ({"temperature": 0.6, "eos_token_id": 2}, {}, {"temperature": 0.6, "eos_token_id": 2}),
        ({"top_p": 0.9}, {"eos_token_id": [2, 30]}, {"top_p": 0.9, "eos_token_id": [2, 30]}),
        (None, {"temperature": 0.6, "eos_token_id": [2, 30]}, {"temperature": 0.6, "eos_token_id": [2, 30]}),
        (None, {"eos_token_id": 2}, {"eos_token_id": 2}),
    ],
)
def test_generation_settings_are_written_as_they_were_also_those_that_transformers_refuses_to_save(
    llama_folder, tmp_path, generation, config, written
):
    """And the end tokens that answers were trained to end with are in them, wherever they came from."""
    source, target = tmp_path / "source", tmp_path / "target"
    shutil.copytree(llama_folder, source)
    (source / "generation_config.json").unlink()
    if generation is not None:
        (source / "generation_config.json").write_text(json.dumps(generation))
    path = source / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config))
    check_savable(source, field="model")
    model = load_model(ModelOptions(path=str(source)), Ranks(), head=True)
    for _ in range(2):  # a save leaves the model as it was
        save_hf_folder(model, source, target, Ranks())
        found = json.loads((target / "generation_config.json").read_text())
        assert {name: found.get(name) for name in written} == written
    again = load_model(ModelOptions(path=str(target)), Ranks(), head=True)
    assert again.generation_config.eos_token_id == written["eos_token_id"]


def test_a_folder_that_cannot_be_written_is_named_and_removed(tied_llama_folder, tmp_path, monkeypatch):
    policy = Policy(options(tied_llama_folder), Ranks())

    def save(folder, **_):
        folder.mkdir()
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(policy.model, "save_pretrained", save)
    with pytest.raises(OSError, match=rf"^{tmp_path}/saved.unfinished: I/O error: No space left on device"):
        policy.save(str(tmp_path / "saved"))
    assert list(tmp_path.iterdir()) == []


def make_worker(chosen: PolicyOptions) -> PolicyWorker:
    """As the runtime does it: attributes first, then `__init__`."""
    worker = object.__new__(PolicyWorker)
    worker.rank, worker.world_size, worker.local_rank, worker.group_name = 0, 1, 0, "actor"
    worker.__init__(chosen)
    return worker


def test_the_worker_scores_updates_and_publishes_through_the_store(llama_folder):
    worker = make_worker(
        options(llama_folder, weights=WeightOptions(rollout_dtype="bfloat16", bucket_bytes=4096))
    )
    policy, store = Policy(options(llama_folder), Ranks()), MemoryStore("run")
    columns = make_batch(8)
    with use_store(store):
        batch = DataProto.from_dict(tensors=columns)
        scores = worker.compute_log_prob(batch)
        assert torch.equal(scores["old_log_probs"], policy.log_probs(columns)["old_log_probs"])
        assert worker.update_actor(batch) == policy.update(columns)
        manifest = worker.publish_weights(WeightVersion(epoch=0, n=1))
        pulled = WeightReader(store).read(manifest)
        expected = {name: tensor.to(torch.bfloat16) for name, tensor in weights(policy).items()}
        assert largest_difference(pulled, expected) == 0.0


class RegistryGroup:
    """A registry's worker group whose calls end at once; notes them."""

    def __init__(self):
        self.calls = []

    def submit(self, method, args=(), kwargs=None, timeout=None):
        self.calls.append((method, *args, timeout))
        return self

    def result(self):
        return ()


def test_the_worker_announces_in_the_attached_registry_and_waits_no_longer_than_its_call(llama_folder):
    worker, group = make_worker(options(llama_folder, weights=WeightOptions(num_slots=1))), RegistryGroup()
    worker.attach_registry(group)
    first, second = (WeightVersion(epoch=0, n=n) for n in range(2))
    with use_store(MemoryStore("run")):
        manifest = worker.publish_weights(first)
        worker.remaining = lambda: 12.0
        worker.publish_weights(second)
    assert [call[0] for call in group.calls] == ["publish", "retire", "wait_reclaimed", "publish"]
    assert group.calls[0][1] == manifest
    assert group.calls[2][1:3] == (first, 10.0)
    with pytest.raises(RuntimeError, match="before the first weights are published"):
        worker.attach_registry(group)


def test_publishing_without_a_store_is_an_error_that_says_so(llama_folder):
    with use_store(None), pytest.raises(StoreError, match="there is none"):
        make_worker(options(llama_folder)).publish_weights(WeightVersion(epoch=0, n=0))


def test_absolute_positions_count_real_tokens_and_dropout_is_off(tmp_path):
    """A GPT-2: positions are embedded, so left padding must not shift them; its dropout is 0.1 by default."""
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=VOCABULARY, n_positions=64, n_embd=16, n_layer=2, n_head=2, initializer_range=0.3
    )
    GPT2LMHeadModel(config).save_pretrained(tmp_path)
    chosen = options(str(tmp_path))
    policy = Policy(replace(chosen, model=replace(chosen.model, gradient_checkpointing=True)), Ranks())
    columns, model = make_batch(8), AutoModelForCausalLM.from_pretrained(tmp_path)
    scores = policy.log_probs(columns)["old_log_probs"]
    for row in range(8):
        with torch.no_grad():
            expected, _ = naive_log_probs(model, columns, row, 1.0)
        torch.testing.assert_close(scores[row, : len(expected)], expected, atol=1e-5, rtol=0)
