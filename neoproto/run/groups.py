"""The worker groups of a run or an evaluation: how each is made, and how they are started."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any

from actors.reward.worker import RewardWorker
from actors.rollout.options import rollout_env
from actors.rollout.worker import RolloutWorker
from actors.training.critic import CriticWorker
from actors.training.policy import PolicyWorker
from actors.training.reference import ReferenceWorker
from actors.weight_registry import RegistryWorker
from neoproto.errors import DeadlineExceeded, NeoProtoError
from neoproto.run import options
from neoproto.run.environment import torch_env, worker_modules
from neoproto.run.prepare import PreparedModel, PreparedRun
from neoproto.runtime import ClassWithInitArgs, Runtime, Worker, WorkerGroup
from neoproto.runtime.failures import ProcessFailure
from neoproto.runtime.placement import DeviceType, ModelPlacement, Placement
from neoproto.text import first_line
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


def run_groups(prepared: PreparedRun, placement: Placement) -> list[GroupSpec]:
    """The groups of a run, the slowest to start first.

    Raises:
        ConfigError: options that contradict each other.
    """
    config = prepared.config
    models = {model.worker: model for model in placement.models}
    found = [rollout_group(prepared, models["rollout"])]
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
    found.append(reward_group(prepared, models["reward"].name if "reward" in models else None, device))
    # Asked all the time, and for a moment each: in a trace such calls would be most of it, without use.
    registry = ClassWithInitArgs(RegistryWorker, env=torch_env(1) | {FOLDER_VARIABLE: ""})
    found.append(GroupSpec(role=REGISTRY, name=config.weights.registry_name, workers=registry, model=None))
    return found


def rollout_group(prepared: PreparedModel, model: ModelPlacement) -> GroupSpec:
    """Rollout, on the devices of `model`."""
    config, device = prepared.config, model.device_type
    rollout = options.rollout_options(
        config, prepared.model_dir, device, prepared.eos_token_ids, prepared.pad_token_id
    )
    env = rollout_env(rollout.engine) | config.actor_rollout_ref.rollout.env
    modules = worker_modules(device, rollout.engine.rollout.name)
    return _spec("rollout", model.name, RolloutWorker, rollout, env, modules)


def reward_group(prepared: PreparedModel, model: str | None, device: DeviceType) -> GroupSpec:
    """The reward worker, on the devices of `model` or beside the controller."""
    judge = options.reward_options(prepared.config, prepared.model_dir, prepared.eos_token_ids)
    return _spec("reward", model, RewardWorker, judge, torch_env(1), worker_modules(device))


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


def start_group(runtime: Runtime, spec: GroupSpec, timeout: float) -> WorkerGroup:
    """Start the processes of one group; blocks."""
    pool = (
        runtime.create_resource_pool(on="controller", name=spec.name)
        if spec.model is None
        else runtime.model_resource_pool(spec.model)
    )
    return runtime.create_worker_group(spec.workers, on=pool, name=spec.name, timeout=timeout)


def start_groups(
    starts: Sequence[Callable[[], WorkerGroup]],
    failure: ProcessFailure,
    timeout: float,
    starting: list[Future[WorkerGroup]] | None = None,
) -> list[WorkerGroup]:
    """Start all groups at once: most of a start is imports and the engine's own set-up.

    Args:
        starts: each starts one group, and blocks.
        failure: of the processes that are started, and of the store.
        timeout: seconds that each of `starts` allows its workers; named by the error.
        starting: gets the groups that are being started, for the caller to release them after an error.

    Returns:
        The groups in the order of `starts`.

    Raises:
        NeoProtoError: workers did not start in time.
        Whatever ends the first start that fails.
    """
    threads = ThreadPoolExecutor(len(starts), thread_name_prefix="start-workers")
    try:
        groups = [threads.submit(start) for start in starts]
        if starting is not None:
            starting[:] = groups
        wait_for_all(groups, failure)
    except DeadlineExceeded as error:
        more = f"trainer.timeouts.start={timeout:g} is how long workers may take to start"
        raise NeoProtoError(f"{first_line(error)}; {more}") from error
    finally:
        # After a failure or a signal the rest is not waited for: closing the runtime ends what still starts.
        threads.shutdown(wait=False, cancel_futures=True)
    return [future.result() for future in groups]


def wait_for_all(futures: Collection[Future[Any]], failure: ProcessFailure) -> None:
    """Wait until all are done. Raises the first failure, of one of them or of a process, as it happens."""
    pending: set[Future[Any]] = set(futures)
    while pending:
        done, _ = wait({*pending, failure}, return_when=FIRST_COMPLETED)
        for future in done:
            future.result()
        pending -= done
