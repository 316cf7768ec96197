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
    found.append(_spec("actor", models["actor"].name, PolicyWorker, policy, env))
    if config.uses_critic:
        critic = options.critic_options(
            config, prepared.critic_dir, models["critic"].device_type, prepared.total_steps
        )
        found.append(
            _spec("critic", models["critic"].name, CriticWorker, critic, torch_env(config.critic.num_threads))
        )
    if config.uses_reference:
        reference = options.reference_options(config, prepared.model_dir, models["reference"].device_type)
        found.append(_spec("reference", models["reference"].name, ReferenceWorker, reference, env))
    reward = models["reward"].name if "reward" in models else None
    judge = options.reward_options(config, prepared.model_dir, prepared.eos_token_ids)
    found.append(_spec("reward", reward, RewardWorker, judge, torch_env(1)))
    # Asked all the time, and for a moment each: in a trace that would be most of it, and say nothing.
    registry = ClassWithInitArgs(RegistryWorker, env=torch_env(1) | {FOLDER_VARIABLE: ""})
    found.append(GroupSpec(role=REGISTRY, name=config.weights.registry_name, workers=registry, model=None))
    return found


def torch_env(num_threads: int | None) -> dict[str, str]:
    """Environment of a worker that computes with torch: its threads, and no look at the network."""
    # Threads that spin while they wait take the cores of whoever works: policy and critic train at once.
    env = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "OMP_WAIT_POLICY": "passive"}
    return env if num_threads is None else env | {"OMP_NUM_THREADS": str(num_threads)}


def _spec(
    role: str, model: str | None, cls: type[Worker], worker_options: object, env: dict[str, str]
) -> GroupSpec:
    return GroupSpec(
        role=role, name=role, workers=ClassWithInitArgs(cls, worker_options, env=env), model=model
    )


def _rollout(prepared: PreparedRun, device: DeviceType, model: str) -> GroupSpec:
    config = prepared.config
    rollout = options.rollout_options(
        config, prepared.model_dir, device, prepared.eos_token_ids, prepared.pad_token_id
    )
    env = rollout_env(rollout.engine) | config.actor_rollout_ref.rollout.env
    return _spec("rollout", model, RolloutWorker, rollout, env)
