"""The options of each worker: its section of the configuration, and what the run adds to it."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from actors.reward.worker import RewardOptions
from actors.rollout.options import EngineOptions, RolloutOptions
from actors.training.critic import CriticOptions
from actors.training.policy import PolicyOptions
from actors.training.reference import ReferenceOptions
from actors.training.torch_model import ModelOptions
from actors.training.torch_worker import TorchOptions
from actors.training.updates import TrainOptions
from neoproto.config import RunConfig
from neoproto.files import user_path
from neoproto.weights import UpdateOptions, WeightOptions

DeviceType = Literal["cpu", "gpu"]


def policy_options(config: RunConfig, model_dir: Path, device: DeviceType, total_steps: int) -> PolicyOptions:
    """Options of the policy group."""
    actor, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    return PolicyOptions(
        model=model_options(config, model_dir),
        actor=actor,
        train=train_options(config, total_steps),
        torch=torch_options(config, device, actor.num_threads),
        temperature=rollout.temperature,
        use_rollout_is=config.algorithm.rollout_correction.rollout_is is not None,
        log_prob_micro_batch_size=rollout.log_prob_micro_batch_size_per_gpu,
        weights=weight_options(config),
    )


def train_options(config: RunConfig, total_steps: int) -> TrainOptions:
    """What training needs beside the model's own section."""
    return TrainOptions(
        samples_per_prompt=config.actor_rollout_ref.rollout.n,
        seed=config.trainer.seed,
        total_steps=total_steps,
    )


def weight_options(config: RunConfig) -> WeightOptions:
    """How weights are published and pulled."""
    weights = config.weights
    return WeightOptions(
        transport=weights.transport,
        num_slots=weights.num_slots,
        rollout_dtype=config.rollout_dtype,
        bucket_bytes=weights.bucket_mib << 20,
    )


def update_options(config: RunConfig) -> UpdateOptions:
    """When and how replicas take new weights; in the other modes the trainer decides."""
    decoupled, weights = config.trainer.decoupled_async, config.weights
    return UpdateOptions(
        min_version_lag=decoupled.min_version_lag,
        poll_interval=decoupled.poll_interval,
        pause_mode=weights.pause_mode,
        drain_timeout=weights.drain_timeout,
    )


def critic_options(config: RunConfig, model_dir: Path, device: DeviceType, total_steps: int) -> CriticOptions:
    """Options of the critic group."""
    return CriticOptions(
        model=model_options(config, model_dir),
        critic=config.critic,
        train=train_options(config, total_steps),
        torch=torch_options(config, device, config.critic.num_threads),
    )


def reference_options(config: RunConfig, model_dir: Path, device: DeviceType) -> ReferenceOptions:
    """Options of the reference group."""
    return ReferenceOptions(
        model=model_options(config, model_dir),
        torch=torch_options(config, device, config.actor_rollout_ref.actor.num_threads),
        temperature=config.actor_rollout_ref.rollout.temperature,
        log_prob_micro_batch_size=config.actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu,
    )


def rollout_options(
    config: RunConfig, model_dir: Path, device: DeviceType, eos_token_ids: tuple[int, ...], pad_token_id: int
) -> RolloutOptions:
    """Options of the rollout group.

    Raises:
        ConfigError: the engine does not run on the device, or no token ends an answer.
    """
    return RolloutOptions(
        engine=EngineOptions(
            rollout=config.actor_rollout_ref.rollout,
            model=str(model_dir),
            device=device,
            max_model_len=config.max_model_len,
            eos_token_ids=eos_token_ids,
        ),
        max_prompt_length=config.data.max_prompt_length,
        max_response_length=config.data.max_response_length,
        pad_token_id=pad_token_id,
        updates=update_options(config),
        lease_ttl=config.weights.lease_ttl,
        transport=config.weights.transport,
    )


def reward_options(config: RunConfig, model_dir: Path, eos_token_ids: tuple[int, ...]) -> RewardOptions:
    """Options of the reward group."""
    reward, custom = config.reward, config.reward.custom_reward_function
    if custom.path is not None:
        path = user_path(custom.path, field="reward.custom_reward_function.path").absolute()
        custom = custom.model_copy(update={"path": str(path)})
    return RewardOptions(
        tokenizer=str(model_dir),
        eos_token_ids=eos_token_ids,
        reward=reward.model_copy(update={"custom_reward_function": custom}),
    )


def model_options(config: RunConfig, folder: Path) -> ModelOptions:
    return ModelOptions(path=str(folder), trust_remote_code=config.actor_rollout_ref.model.trust_remote_code)


def torch_options(config: RunConfig, device: DeviceType, num_threads: int | None) -> TorchOptions:
    return TorchOptions(
        seed=config.trainer.seed,
        num_threads=num_threads,
        device_type="cuda" if device == "gpu" else "cpu",
        collective_timeout_s=config.trainer.timeouts.update,
    )
