"""The rollout replicas of a run: how each is started, at first and again, and who keeps them alive."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from actors.weight_registry import GroupRegistry
from neoproto.config import RunConfig
from neoproto.run.groups import GroupSpec
from neoproto.run.handles import RolloutHandle
from neoproto.runtime import Runtime, WorkerGroup
from neoproto.runtime.runtime import SPAWN_TIMEOUT_S
from neoproto.trainer.replicas import ReplicaSet
from neoproto.trainer.supervision import SupervisionOptions, Supervisor

_GRACE_S = 30.0
"""How much later than its own deadlines a start is given up."""


def start_replica(runtime: Runtime, spec: GroupSpec, index: int, timeout: float) -> WorkerGroup:
    """Start the process of one replica on its own device; blocks.

    It is named after model and device, `rollout-0`, and `rollout-0-2` when it is started for the second time:
    nothing that is still on its way from an earlier process can be taken for a message of this one.
    """
    assert spec.model is not None, spec
    place = runtime.model_resource_pool(spec.model).view(start=index, size=1)
    name = f"{spec.name}-{index}"
    return runtime.create_worker_group(spec.workers, on=place, name=name, timeout=timeout)


def supervised(
    runtime: Runtime,
    spec: GroupSpec,
    groups: Sequence[WorkerGroup],
    registry: WorkerGroup,
    config: RunConfig,
    print_line: Callable[[str], None],
) -> tuple[ReplicaSet, Supervisor]:
    """The replicas as one thing to call, and who keeps them alive.

    Args:
        spec: of rollout.
        groups: the processes that `start_replica` started, by index.
        registry: the group of the weight registry.
        print_line: shows a person a line.
    """
    trainer = config.trainer
    start = trainer.timeouts.start
    weights = GroupRegistry(registry)
    replicas = ReplicaSet(spec.name, [RolloutHandle(group) for group in groups], weights)
    options = SupervisionOptions(
        max_restarts=trainer.max_replica_restarts,
        heartbeat_interval=trainer.heartbeat_interval,
        heartbeat_timeout=trainer.heartbeat_timeout,
        start_limit=max(SPAWN_TIMEOUT_S, start) + start + _GRACE_S,
        load_timeout=trainer.timeouts.weights,
        agents=trainer.mode == "decoupled_async",
    )
    supervisor = Supervisor(
        replicas,
        weights,
        registry,
        lambda index: RolloutHandle(start_replica(runtime, spec, index, start)),
        options,
        print_line=print_line,
    )
    return replicas, supervisor
