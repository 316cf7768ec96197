"""Which worker groups a run has, and how each is made."""

from __future__ import annotations

from dataclasses import dataclass

from actors.reward.worker import RewardWorker
from actors.rollout.options import rollout_env
from actors.rollout.worker import RolloutWorker
from actors.training.critic import CriticWorker
from actors.training.policy import PolicyWorker
from actors.training.reference import ReferenceWorker
from actors.weight_registry import RegistryWorker
from neoproto.run import options
from neoproto.run.environment import torch_env, worker_modules
from neoproto.run.prepare import PreparedRun
from neoproto.runtime import ClassWithInitArgs, Worker
from neoproto.runtime.placement import DeviceType, Placement
from neoproto.trace import FOLDER_VARIABLE

REGISTRY = "registry"
"""The role of the group that keeps the list of weight versions."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupSpec:
    """One worker group.

    Attributes:
        role: what it does.
        name: of the group.
        workers: the class with its arguments and environment.
        model: the model of the topology whose devices it takes; None is a process beside the controller.
    """

    role: str
    name: str
    workers: ClassWithInitArgs
    model: str | None


def group_specs(prepared: PreparedRun, placement: Placement) -> list[GroupSpec]:
    """The groups of a run, the slowest to start first.

    Raises:
        ConfigError: options that contradict each other.
    """
    config = prepared.config
    models = {model.worker: model for model in placement.models}
    found = [_rollout(prepared, models["rollout"].device_type, models["rollout"].name)]
    device = models["actor"].device_type
    policy = options.policy_options(config, prepared.model_dir, device, prepared.total_steps)
    env = torch_env(config.actor_rollout_ref.actor.num_threads)
    modules = worker_modules(device)
    found.append(_spec("actor", models["actor"].name, PolicyWorker, policy, env, modules))
    if config.uses_critic:
        model = models["critic"]
        critic = options.critic_options(config, prepared.critic_dir, model.device_type, prepared.total_steps)
        critic_env = torch_env(config.critic.num_threads)
        modules = worker_modules(model.device_type)
        found.append(_spec("critic", model.name, CriticWorker, critic, critic_env, modules))
    if config.uses_reference:
        model = models["reference"]
        reference = options.reference_options(config, prepared.model_dir, model.device_type)
        modules = worker_modules(model.device_type)
        found.append(_spec("reference", model.name, ReferenceWorker, reference, env, modules))
    reward = models["reward"].name if "reward" in models else None
    judge = options.reward_options(config, prepared.model_dir, prepared.eos_token_ids)
    found.append(_spec("reward", reward, RewardWorker, judge, torch_env(1), worker_modules(device)))
    # Asked all the time, and for a moment each: in a trace that would be most of it, and say nothing.
    registry = ClassWithInitArgs(RegistryWorker, env=torch_env(1) | {FOLDER_VARIABLE: ""})
    found.append(GroupSpec(role=REGISTRY, name=config.weights.registry_name, workers=registry, model=None))
    return found


def _spec(
    role: str,
    model: str | None,
    cls: type[Worker],
    worker_options: object,
    env: dict[str, str],
    modules: tuple[str, ...],
) -> GroupSpec:
    workers = ClassWithInitArgs(cls, worker_options, env=env, preload=modules)
    return GroupSpec(role=role, name=role, workers=workers, model=model)


def _rollout(prepared: PreparedRun, device: DeviceType, model: str) -> GroupSpec:
    config = prepared.config
    rollout = options.rollout_options(
        config, prepared.model_dir, device, prepared.eos_token_ids, prepared.pad_token_id
    )
    env = rollout_env(rollout.engine) | config.actor_rollout_ref.rollout.env
    modules = worker_modules(device, rollout.engine.rollout.name)
    return _spec("rollout", model, RolloutWorker, rollout, env, modules)
