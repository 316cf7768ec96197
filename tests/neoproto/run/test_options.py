"""Every option of the configuration gets to where it counts, and nowhere else.

An option either changes what some workers are told or is the controller's own. Both are listed here; a new
one must be added to one of the lists.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest
from pydantic import BaseModel

from neoproto.config import RunConfig, load_config
from neoproto.run import options
from neoproto.run.environment import torch_env

ROOT = Path(__file__).resolve().parents[3]
ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
TRAINED = {"actor", "critic"}
TORCH = TRAINED | {"reference"}

TOLD: dict[str, tuple[Any, set[str]]] = {
    "data.max_prompt_length": (63, {"rollout"}),
    "data.max_response_length": (7, {"rollout"}),
    f"{ACTOR}.ppo_mini_batch_size": (32, {"actor"}),
    f"{ACTOR}.ppo_micro_batch_size_per_gpu": (32, {"actor"}),
    f"{ACTOR}.ppo_epochs": (2, {"actor"}),
    f"{ACTOR}.shuffle": (True, {"actor"}),
    f"{ACTOR}.policy_loss.loss_mode": ("gspo", {"actor"}),
    f"{ACTOR}.clip_ratio": (0.3, {"actor"}),
    f"{ACTOR}.clip_ratio_low": (0.1, {"actor"}),
    f"{ACTOR}.clip_ratio_high": (0.28, {"actor"}),
    f"{ACTOR}.clip_ratio_c": (2.0, {"actor"}),
    f"{ACTOR}.loss_agg_mode": ("seq-mean-token-sum", {"actor"}),
    f"{ACTOR}.entropy_coeff": (0.01, {"actor"}),
    f"{ACTOR}.use_kl_loss": (True, {"actor"}),
    f"{ACTOR}.kl_loss_coef": (0.5, {"actor"}),
    f"{ACTOR}.kl_loss_type": ("k1", {"actor"}),
    f"{ACTOR}.grad_clip": (0.5, {"actor"}),
    f"{ACTOR}.num_threads": (2, {"actor", "reference"}),
    "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu": (32, {"reference"}),
    f"{ROLLOUT}.name": ("hf", {"rollout"}),
    f"{ROLLOUT}.n": (2, TRAINED | {"rollout"}),
    f"{ROLLOUT}.temperature": (0.6, {"actor", "reference", "rollout"}),
    f"{ROLLOUT}.seed": (5, {"rollout"}),
    f"{ROLLOUT}.max_num_seqs": (16, {"rollout"}),
    f"{ROLLOUT}.max_model_len": (100, {"rollout"}),
    f"{ROLLOUT}.dtype": ("bfloat16", {"actor", "rollout"}),
    f"{ROLLOUT}.kv_cache_gib": (0.25, {"rollout"}),
    f"{ROLLOUT}.gpu_memory_utilization": (0.3, {"rollout"}),
    f"{ROLLOUT}.enforce_eager": (False, {"rollout"}),
    f"{ROLLOUT}.num_threads": (2, {"rollout"}),
    f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu": (32, {"actor", "rollout"}),
    f"{ROLLOUT}.val_kwargs.n": (3, {"rollout"}),
    f"{ROLLOUT}.val_kwargs.do_sample": (False, {"rollout"}),
    f"{ROLLOUT}.val_kwargs.temperature": (0.5, {"rollout"}),
    f"{ROLLOUT}.val_kwargs.top_p": (0.9, {"rollout"}),
    f"{ROLLOUT}.val_kwargs.top_k": (10, {"rollout"}),
    "algorithm.rollout_correction.rollout_is": ("token", {"actor"}),
    "critic.ppo_mini_batch_size": (32, {"critic"}),
    "critic.ppo_micro_batch_size_per_gpu": (32, {"critic"}),
    "critic.ppo_epochs": (2, {"critic"}),
    "critic.shuffle": (True, {"critic"}),
    "critic.cliprange_value": (0.2, {"critic"}),
    "critic.loss_agg_mode": ("seq-mean-token-mean", {"critic"}),
    "critic.grad_clip": (0.5, {"critic"}),
    "critic.num_threads": (2, {"critic"}),
    "reward.name": ("exact_match", {"reward"}),
    "reward.custom_reward_function.path": ("judge.py", {"reward"}),
    "reward.custom_reward_function.name": ("judge", {"reward"}),
    "reward.timeout_s": (3.0, {"reward"}),
    "reward.max_concurrency": (3, {"reward"}),
    "reward.num_processes": (3, {"reward"}),
    "reward.max_failed_share": (0.25, {"reward"}),
    "weights.rollout_dtype": ("float16", {"actor"}),
    "weights.bucket_mib": (1, {"actor"}),
    "weights.num_slots": (5, {"actor"}),
    "weights.lease_ttl": (3.0, {"rollout"}),
    "weights.transport": ("store", {"actor", "rollout"}),
    "weights.pause_mode": ("keep", {"rollout"}),
    "weights.drain_timeout": (0.5, {"rollout"}),
    "trainer.decoupled_async.min_version_lag": (2, {"rollout"}),
    "trainer.decoupled_async.poll_interval": (0.5, {"rollout"}),
    "trainer.seed": (9, TORCH),
    "trainer.timeouts.update": (33.0, TORCH),
    **{
        f"{section}.optim.{name}": (value, {role})
        for section, role in ((ACTOR, "actor"), ("critic", "critic"))
        for name, value in (
            ("lr", 0.5),
            ("lr_warmup_steps", 3),
            ("lr_scheduler_type", "cosine"),
            ("min_lr_ratio", 0.5),
            ("weight_decay", 0.5),
            ("betas", [0.5, 0.6]),
            ("eps", 1e-5),
        )
    },
}
"""Path: another value than the default, and the groups whose options it changes."""

CONTROLLER = re.compile(
    r"dry_run|runtime\..+|topology|algorithm\.(?!rollout_correction\.rollout_is$).+|data\.task\..+"
    r"|data\.(train_files|val_files|train_batch_size|val_batch_size|truncation|shuffle|seed)"
    r"|data\.(system_prompt|chat_template|date)"
    r"|actor_rollout_ref\.model\.(path|built_in|tiny\..+)|critic\.(enable|model\.path)"
    rf"|{re.escape(ROLLOUT)}\.(val_kwargs\.also_greedy|env|n_gpus_per_node)"
    r"|weights\.registry_name"
    r"|trainer\.(?!seed$|timeouts\.update$|decoupled_async\.(min_version_lag|poll_interval)$).+"
)
"""What the controller reads itself: the models' folders, the data, the arithmetic of a step, the loop."""


def load(changes: dict[str, Any]) -> RunConfig:
    tree: dict[str, Any] = {"data": {"train_batch_size": 64}}
    for path, value in changes.items():
        section = tree
        *parents, last = path.split(".")
        for name in parents:
            section = section.setdefault(name, {})
        section[last] = value
    return load_config(tree)


def told(config: RunConfig) -> dict[str, str]:
    """All that each group is told, in words."""
    folder = Path("model")
    return {
        "actor": repr(options.policy_options(config, folder, "cpu", 80)),
        "critic": repr(options.critic_options(config, folder, "cpu", 80)),
        "reference": repr(options.reference_options(config, folder, "cpu")),
        "rollout": repr(options.rollout_options(config, folder, "cpu", (2,), 0)),
        "reward": repr(options.reward_options(config, folder, (2,))),
    }


def leaves(kind: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, field in kind.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from leaves(field.annotation, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", field.annotation


def may_change() -> list[str]:
    """Every option that has more than one value."""
    return [
        path
        for path, kind in leaves(RunConfig)
        if not (get_origin(kind) is Literal and len(get_args(kind)) == 1) and path != f"{ROLLOUT}.top_p"
    ]


@pytest.mark.parametrize("path", sorted(TOLD))
def test_it_changes_what_those_workers_are_told_and_nobody_else(path: str) -> None:
    value, groups = TOLD[path]
    before, after = told(load({})), told(load({path: value}))
    assert {group for group in before if before[group] != after[group]} == groups


def test_every_option_is_in_one_list_or_the_other() -> None:
    unlisted = [path for path in may_change() if path not in TOLD and not CONTROLLER.fullmatch(path)]
    assert unlisted == []
    assert [path for path in TOLD if CONTROLLER.fullmatch(path)] == []


def test_the_controllers_options_change_no_worker() -> None:
    changes = {
        "algorithm.gamma": 0.5,
        "algorithm.kl_ctrl.kl_coef": 0.5,
        "data.seed": 3,
        "data.val_batch_size": 7,
        "trainer.total_epochs": 3,
        "trainer.timeouts.generate": 5.0,
        "runtime.monarch.object_store.timeout_s": 5.0,
    }
    assert told(load(changes)) == told(load({}))


def test_no_option_is_ignored() -> None:
    """The controller's options are read somewhere, by name, outside the configuration's own package."""
    folders = ("neoproto/run", "neoproto/trainer", "neoproto/runtime", "meshes")
    source = "\n".join(file.read_text() for folder in folders for file in (ROOT / folder).rglob("*.py"))
    schema = (ROOT / "neoproto/config/schema.py").read_text()
    ignored = [
        path
        for path in may_change()
        if CONTROLLER.fullmatch(path)
        and not re.search(rf"""\.{(name := path.split(".")[-1])}\b|["']{name}["']""", source + schema)
    ]
    assert ignored == []


def test_training_knows_how_many_samples_a_prompt_has() -> None:
    config = load({f"{ROLLOUT}.n": 4})
    assert options.policy_options(config, Path("m"), "cpu", 1).train.samples_per_prompt == 4
    assert options.critic_options(config, Path("m"), "cpu", 1).train.samples_per_prompt == 4


def test_the_schedule_knows_how_long_the_run_is() -> None:
    assert options.policy_options(load({}), Path("m"), "cpu", 80).train.total_steps == 80
    assert options.critic_options(load({}), Path("m"), "cpu", 80).train.total_steps == 80


def test_log_probs_are_taken_at_the_temperature_of_sampling() -> None:
    config = load({f"{ROLLOUT}.temperature": 0.6})
    assert options.policy_options(config, Path("m"), "cpu", 1).temperature == 0.6
    assert options.reference_options(config, Path("m"), "cpu").temperature == 0.6
    assert options.rollout_options(config, Path("m"), "cpu", (2,), 0).sampling.temperature == 0.6


def test_both_sides_of_the_clip_follow_the_one_option() -> None:
    assert load({f"{ACTOR}.clip_ratio": 0.3}).actor_rollout_ref.actor.clip_range() == (0.3, 0.3)


def test_a_reward_file_is_found_from_any_working_folder() -> None:
    """Reward workers do not run where the command was typed."""
    config = load({"reward.custom_reward_function.path": "mine/judge.py"})
    path = options.reward_options(config, Path("m"), (2,)).reward.custom_reward_function.path
    assert path == str(Path.cwd() / "mine" / "judge.py")


def test_devices_are_named_as_each_library_does() -> None:
    config = load({})
    assert options.policy_options(config, Path("m"), "gpu", 1).torch.device_type == "cuda"
    assert options.rollout_options(config, Path("m"), "gpu", (2,), 0).engine.device == "gpu"


def test_threads_are_in_the_environment_before_torch_is_imported() -> None:
    assert torch_env(3)["OMP_NUM_THREADS"] == "3"
    assert "OMP_NUM_THREADS" not in torch_env(None)
    assert torch_env(None)["HF_HUB_OFFLINE"] == "1"
    assert torch_env(2)["OMP_WAIT_POLICY"] == "passive"
