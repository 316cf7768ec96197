"""Values that do not go together, each with the sentence that says so."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from neoproto.config import RunConfig, load_config
from neoproto.errors import ConfigError

A, R = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
GRPO = {"algorithm.adv_estimator": "grpo", f"{R}.n": 4}
OWN = {"algorithm.adv_estimator": "custom", "algorithm.custom_advantage_function.path": "a.py"}


def build(values: dict[str, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for path, value in values.items():
        *parents, last = path.split(".")
        section = tree
        for key in parents:
            section = section.setdefault(key, {})
        section[last] = copy.deepcopy(value)
    return tree


def load(values: dict[str, Any]) -> RunConfig:
    return load_config(build(values))


def topology(*workers: str, devices: int = 2, nnodes: int = 1, **ranges: tuple[int, int]) -> dict[str, Any]:
    return {
        "clusters": [{"name": "c", "nnodes": nnodes, "n_gpus_per_node": devices, "device_type": "cpu"}],
        "device_pools": [{"name": "p", "cluster": "c", "nnodes": nnodes, "n_gpus_per_node": devices}],
        "models": [
            {"name": worker, "worker": worker, "resource_pool": "p", "device_range": ranges.get(worker)}
            for worker in workers
        ],
    }


PPO = topology("actor", "rollout", "critic")
APART = topology("actor", "rollout", "critic", actor=(0, 1), rollout=(1, 2), critic=(0, 1))
ASYNC = {"trainer.mode": "decoupled_async"}


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"data.train_files": []}, ["data.train_files: wanted a file or null"]),
        ({"data.val_files": "v.parquet"}, ["data.val_files: got ['v.parquet'] without data.train_files"]),
        (
            {"data.task": {"size": 63}},
            ["data.task.size: got 63, less than one batch (data.train_batch_size=64)"],
        ),
        (
            {
                "algorithm.use_kl_in_reward": True,
                "algorithm.kl_ctrl": {"type": "adaptive", "horizon": 50},
                f"{R}.n": 4,
            },
            ["algorithm.kl_ctrl.horizon: got 50, wanted more than a fifth of the 256 samples"],
        ),
        (
            {f"{R}.max_model_len": 71},
            [f"{R}.max_model_len: got 71, wanted at least 72 = data.max_prompt_length=64"],
        ),
        (
            ASYNC | {"trainer.n_gpus_per_node": 1000, f"{R}.n_gpus_per_node": 25},
            [f"{R}.n_gpus_per_node: got 25, with trainer.n_gpus_per_node=1000 that is 1025 devices a node"],
        ),
        ({f"{R}.val_kwargs": {"n": 2, "do_sample": False}}, [f"{R}.val_kwargs.n: got 2 greedy answers"]),
        ({"actor_rollout_ref.model.path": ""}, ["actor_rollout_ref.model.path: wanted a folder"]),
        ({"critic.model.path": ""}, ["critic.model.path: wanted a folder"]),
        (
            {"actor_rollout_ref.model.tiny.num_heads": 3},
            ["actor_rollout_ref.model.tiny.hidden_size: got 128"],
        ),
        (
            {f"{A}.ppo_mini_batch_size": 24, f"{A}.ppo_micro_batch_size_per_gpu": 24},
            [
                f"{A}.ppo_mini_batch_size: got 24 prompts, "
                "wanted a divisor of data.train_batch_size=64 prompts"
            ],
        ),
        (
            {"critic.ppo_mini_batch_size": 24, "critic.ppo_micro_batch_size_per_gpu": 24},
            ["critic.ppo_mini_batch_size: got 24 prompts"],
        ),
        (
            {f"{R}.n": 4, f"{A}.ppo_micro_batch_size_per_gpu": 48},
            [
                f"{A}.ppo_micro_batch_size_per_gpu: got 48 samples, wanted a divisor of the 64 samples "
                "that a rank trains on in one mini batch (16 prompts x n=4 / 1 ranks)"
            ],
        ),
        (
            {"trainer.n_gpus_per_node": 3, "data.train_batch_size": 48},
            [
                f"{A}.ppo_mini_batch_size: got 16 prompts, with {R}.n=1 that is 16 samples; "
                "wanted a multiple of the 3 ranks of 'actor'",
                "critic.ppo_mini_batch_size: got 16 prompts",
            ],
        ),
        (
            {"trainer.nnodes": 2, "trainer.n_gpus_per_node": 8, "data.train_batch_size": 8, f"{R}.n": 2}
            | {f"{A}.ppo_mini_batch_size": 8, "critic.ppo_mini_batch_size": 8},
            ["data.train_batch_size: got 8 prompts, wanted a multiple of the 16 ranks of 'rollout'"],
        ),
        (
            GRPO
            | {f"{A}.use_kl_loss": True, "data.train_batch_size": 4, f"{A}.ppo_mini_batch_size": 4}
            | {
                "topology": topology(
                    "actor", "rollout", "reference", devices=6, actor=(0, 1), rollout=(0, 1), reference=(1, 6)
                )
            },
            [
                f"data.train_batch_size: got 4 prompts x {R}.n=4 samples, "
                "wanted a multiple of the 5 ranks of 'reference'"
            ],
        ),
        (
            {"algorithm.adv_estimator": "grpo"},
            [f"{R}.n: got 1, wanted at least 2: algorithm.adv_estimator=grpo"],
        ),
        (
            {"algorithm.adv_estimator": "rloo"},
            [f"{R}.n: got 1, wanted at least 2: algorithm.adv_estimator=rloo"],
        ),
        (
            GRPO | {"algorithm.truncated": "bootstrap"},
            ["algorithm.truncated: got 'bootstrap', which needs the critic"],
        ),
        (
            GRPO | {"critic.enable": True},
            ["critic.enable: got true, but algorithm.adv_estimator=grpo has no use"],
        ),
        (
            {"critic.enable": False},
            ["critic.enable: got false, but algorithm.adv_estimator=gae needs a critic"],
        ),
        (
            {"algorithm.adv_estimator": "custom"},
            ["algorithm.custom_advantage_function.path: got None, but algorithm.adv_estimator=custom needs"],
        ),
        (
            {"algorithm.custom_advantage_function.path": "a.py"},
            ["algorithm.custom_advantage_function.path: got 'a.py' with algorithm.adv_estimator=gae, which"],
        ),
        (
            OWN | {"algorithm.truncated": "bootstrap"},
            ["algorithm.truncated: got 'bootstrap', which needs a critic (critic.enable=true) (got custom)"],
        ),
        (
            {"algorithm.rollout_correction": {"rollout_is": "token", "bypass_mode": True}},
            [
                "algorithm.rollout_correction.rollout_is: got 'token' with "
                "algorithm.rollout_correction.bypass_mode=true"
            ],
        ),
        ({f"{A}.clip_ratio": 1.5}, [f"{A}.clip_ratio: got 1.5, which must be below 1 on the lower side"]),
        (
            {"reward.name": "exact_match", "reward.custom_reward_function.path": "r.py"},
            ["reward.name: got 'exact_match' beside reward.custom_reward_function.path='r.py'"],
        ),
        (
            {"reward.custom_reward_function.path": ""},
            ["reward.custom_reward_function.path: wanted a Python file"],
        ),
        (
            {
                "topology": PPO,
                "trainer.nnodes": 2,
                "trainer.n_gpus_per_node": 1,
                "trainer.device_type": "gpu",
            },
            [
                "trainer.nnodes: got 2, but topology.clusters has 1 node(s)",
                "trainer.n_gpus_per_node: got 1, but topology.clusters[0].n_gpus_per_node is 2",
                "trainer.device_type: got 'gpu', but topology.clusters[0].device_type is 'cpu'",
            ],
        ),
        (
            {"topology": topology("actor", "rollout")},
            ["topology.models: no model with worker 'critic', which the configuration needs"],
        ),
        (
            GRPO | {"topology": PPO},
            ["topology.models[2].worker: 'critic' is declared, but nothing in the configuration enables it"],
        ),
        (
            {"topology": topology("actor", "rollout", "critic", "teacher")},
            ["topology.models[3].worker: 'teacher' is declared, but nothing in the configuration enables it"],
        ),
        (
            {"topology": PPO, "algorithm.use_kl_in_reward": True},
            ["topology.models: no model with worker 'reference'"],
        ),
        (
            {"topology": topology("actor", "rolout", "critic")},
            [
                "topology.models: no model with worker 'rollout'",
                "topology.models[1].worker: unknown role 'rolout'; did you mean 'rollout'?",
            ],
        ),
        (
            {"topology": topology("actor", "rollout", "critic", "actor")},
            ["topology.models[3].worker: 'actor' is declared by models[0] already"],
        ),
        (
            {"topology": PPO | {"models": [*PPO["models"][:2], PPO["models"][2] | {"config_key": "reward"}]}},
            ["topology.models[2].config_key: got 'reward', wanted 'critic' for worker 'critic'"],
        ),
        (
            {f"{R}.n_gpus_per_node": 2},
            [f"{R}.n_gpus_per_node: got 2, but trainer.mode=sync shares its devices"],
        ),
        (
            ASYNC | {f"{R}.n_gpus_per_node": 2, "topology": APART},
            [f"{R}.n_gpus_per_node: got 2, but topology says where rollout runs"],
        ),
        (
            ASYNC | {"topology": PPO},
            [
                "topology.models: rollout shares devices with 'actor'; trainer.mode=decoupled_async",
                "topology.models: rollout shares devices with 'critic'; trainer.mode=decoupled_async",
            ],
        ),
        (
            ASYNC | {"trainer.decoupled_async": {"min_version_lag": 2}},
            ["trainer.decoupled_async.min_version_lag: got 2, wanted less than trainer.replay_buffer."],
        ),
        (
            {"trainer.mode": "separate_async", "trainer.separate_async": {"num_warmup_batches": 3}},
            ["trainer.separate_async.num_warmup_batches: got 3; with trainer.replay_buffer."],
        ),
        (
            {"weights.registry_name": "actor"},
            ["weights.registry_name: got 'actor', which is the name of another worker group"],
        ),
        (
            {"trainer.heartbeat_interval": 20.0},
            ["trainer.heartbeat_interval: got 20, wanted less than trainer.heartbeat_timeout=20"],
        ),
    ],
)
def test_what_does_not_go_together_is_refused(values: dict[str, Any], said: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        load(values)
    assert len(caught.value.problems) == len(said), caught.value
    for problem, start in zip(caught.value.problems, said, strict=True):
        assert problem.startswith(start)


@pytest.mark.parametrize(
    ("values", "roles"),
    [
        ({}, ("actor", "rollout", "critic")),
        ({"critic.enable": True}, ("actor", "rollout", "critic")),
        (GRPO, ("actor", "rollout")),
        (GRPO | {"critic.enable": False}, ("actor", "rollout")),
        ({"algorithm.adv_estimator": "reinforce_plus_plus"}, ("actor", "rollout")),
        (OWN, ("actor", "rollout")),
        (OWN | {"critic.enable": False}, ("actor", "rollout")),
        (
            OWN | {"critic.enable": True, "algorithm.truncated": "bootstrap"},
            ("actor", "rollout", "critic"),
        ),
        (GRPO | {f"{A}.use_kl_loss": True}, ("actor", "rollout", "reference")),
        ({"algorithm.use_kl_in_reward": True}, ("actor", "rollout", "critic", "reference")),
        ({"topology": topology("critic", "actor", "rollout", "reward")}, ("actor", "rollout", "critic")),
    ],
)
def test_what_is_enabled_decides_the_roles(values: dict[str, Any], roles: tuple[str, ...]) -> None:
    config = load(values)
    assert config.roles == roles
    declared = {model.worker for model in config.resolved_topology().models}
    assert declared - {"reward"} == set(roles)


def test_units_are_prompts_for_mini_and_samples_for_micro_batches() -> None:
    """16 prompts x 4 samples on 2 ranks are 32 samples a rank; a larger micro batch is all of them."""
    for micro in (1, 8, 32, 64, 1000):
        load(
            {
                "trainer.n_gpus_per_node": 2,
                f"{R}.n": 4,
                f"{A}.ppo_micro_batch_size_per_gpu": micro,
                "critic.ppo_micro_batch_size_per_gpu": micro,
            }
        )


def test_the_critic_of_an_algorithm_without_one_is_not_judged() -> None:
    assert load(GRPO | {"critic.ppo_mini_batch_size": 7}).roles == ("actor", "rollout")


def test_the_tiny_model_is_not_judged_when_a_folder_is_given() -> None:
    load({"actor_rollout_ref.model.path": "some/folder", "actor_rollout_ref.model.tiny.num_heads": 3})


@pytest.mark.parametrize(
    "options",
    [
        {"rollout_is": "token"},
        {"rollout_is": "sequence", "rollout_is_threshold": 1, "bypass_mode": False},
        {"rollout_is": None, "bypass_mode": True},
    ],
)
def test_off_policy_correction_is_a_weight_or_a_bypass(options: dict[str, Any]) -> None:
    correction = load({"algorithm.rollout_correction": options}).algorithm.rollout_correction
    assert correction.model_dump(exclude_unset=True) == options


def test_files_take_the_place_of_the_task() -> None:
    load({"data.train_files": "t.jsonl", "data.task.size": 1})


def test_the_preset_is_sized_by_the_trainer() -> None:
    config = load({"trainer.nnodes": 2, "trainer.n_gpus_per_node": 4, "trainer.device_type": "cpu"})
    preset = config.resolved_topology()
    assert [(one.nnodes, one.n_gpus_per_node, one.device_type) for one in preset.clusters] == [(2, 4, "cpu")]
    assert {model.resource_pool for model in preset.models} == {preset.device_pools[0].name}
    assert load({}).resolved_topology().clusters[0].device_type is None


def test_rollout_has_devices_of_its_own_in_the_asynchronous_presets() -> None:
    config = load(ASYNC | {"trainer.n_gpus_per_node": 2, f"{R}.n_gpus_per_node": 3})
    preset = config.resolved_topology()
    assert preset.clusters[0].n_gpus_per_node == 5
    assert {model.worker: model.resource_pool for model in preset.models} == {
        "actor": "train",
        "critic": "train",
        "rollout": "rollout",
    }
    assert {pool.name: pool.n_gpus_per_node for pool in preset.device_pools} == {"train": 2, "rollout": 3}


@pytest.mark.parametrize(
    "values",
    [
        ASYNC | {"topology": APART},
        ASYNC | {f"{R}.n_gpus_per_node": 3},  # no divisor of the batch: prompts are dealt as they come
        ASYNC
        | {"trainer.decoupled_async.min_version_lag": 2, "trainer.replay_buffer.max_off_policy_threshold": 3},
        {"trainer.decoupled_async.min_version_lag": 9},  # not in use
        {
            "trainer.mode": "separate_async",
            "trainer.separate_async": {"num_warmup_batches": 4, "parameter_sync_step": 2},
        },
        ASYNC
        | {
            "trainer.decoupled_async.num_warmup_batches": 5,
            "trainer.replay_buffer.max_off_policy_strategy": "wait",
        },
    ],
)
def test_what_the_asynchronous_modes_can_do(values: dict[str, Any]) -> None:
    assert load(values).async_options.num_warmup_batches >= 1


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"resume_mode": "path"}, "trainer.resume_from_path: got None, but trainer.resume_mode=path needs"),
        ({"resume_mode": "path", "resume_from_path": ""}, "trainer.resume_from_path: got '', but"),
        (
            {"resume_from_path": "runs/a"},
            "trainer.resume_from_path: got 'runs/a' with trainer.resume_mode=auto",
        ),
        ({"resume_mode": "disable", "resume_from_path": "a"}, "with trainer.resume_mode=disable"),
    ],
)
def test_a_path_to_resume_from_goes_with_its_mode(values: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load({f"trainer.{name}": value for name, value in values.items()})
    assert said in str(caught.value)
    assert load({"trainer.resume_mode": "path", "trainer.resume_from_path": "a"}).trainer.resume_from_path


def test_an_explicit_topology_of_the_same_size_is_no_conflict() -> None:
    values = {
        "topology": PPO,
        "trainer.nnodes": 1,
        "trainer.n_gpus_per_node": 2,
        "trainer.device_type": "cpu",
    }
    assert load(values).resolved_topology() == load({"topology": PPO}).topology


def test_derived_values_follow_what_is_set() -> None:
    config = load({f"{R}.dtype": "bfloat16", f"{A}.clip_ratio": 0.1, f"{A}.clip_ratio_high": 0.3})
    assert config.max_model_len == 72
    assert config.rollout_dtype == "bfloat16"
    assert config.actor_rollout_ref.actor.clip_range() == (0.1, 0.3)
    assert load({"weights.rollout_dtype": "float16", f"{R}.max_model_len": 100}).rollout_dtype == "float16"
    assert load({f"{R}.max_model_len": 100}).max_model_len == 100


def test_verls_names_of_kl_estimators_are_understood() -> None:
    names = {"kl": "k1", "mse": "k2", "low_var_kl": "k3", "abs": "abs", "k2": "k2"}
    for theirs, ours in names.items():
        assert load({"algorithm.kl_penalty": theirs}).algorithm.kl_penalty == ours
