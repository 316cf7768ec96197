"""The declarative topology: clusters, pools of their devices, and the models that run on those pools.

Here are the types, the preset, and which roles a configuration needs. Whether a topology can be placed is
judged in one go by `meshes.common.topology.compile_topology`.
"""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Collection, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from neoproto.config.base import AsTuple, Name, Section, Size

MAX_NODES = 65_536
MAX_DEVICES_PER_NODE = 1_024
Nodes = Annotated[int, Field(ge=1, le=MAX_NODES)]
DevicesPerNode = Annotated[int, Field(ge=1, le=MAX_DEVICES_PER_NODE)]

ROLES = ("actor", "rollout", "critic", "reference", "reward", "teacher")
"""What a model of the topology can do in a training run."""

SECTION_OF_ROLE = {
    "actor": "actor_rollout_ref",
    "rollout": "actor_rollout_ref",
    "reference": "actor_rollout_ref",
    "critic": "critic",
    "reward": "reward",
}
"""Which section of the configuration describes a role."""


class ClusterConfig(Section):
    """Machines of one kind."""

    name: Name
    """Unique among the clusters."""
    nnodes: Nodes = 1
    """How many nodes."""
    n_gpus_per_node: DevicesPerNode = 1
    """Devices a node; on cpu a device is one process slot."""
    device_type: Literal["gpu", "cpu"] | None = None
    """null = gpu if this machine has one."""


class DevicePoolConfig(Section):
    """A rectangular grid of devices of one cluster. Pools of a cluster share no device."""

    name: Name
    """Unique among the pools."""
    cluster: Name
    """The cluster it is taken from."""
    nnodes: Nodes = 1
    """Nodes of the grid."""
    n_gpus_per_node: DevicesPerNode = 1
    """Devices on each of its nodes."""
    attributes: dict[str, Any] = Field(default_factory=dict)
    """Kept with the pool, not enforced."""


class TopologyModelConfig(Section):
    """One worker group: what runs, and on which devices of which pool."""

    name: Name
    """Unique among the models; the name of the worker group."""
    worker: Name
    """Its role."""
    config_key: Name | None = None
    """The section of the configuration that describes it; null = the usual one of the role."""
    resource_pool: Name
    """The pool it runs on."""
    device_range: Annotated[tuple[Size, Size], AsTuple] | None = None
    """Devices [start, stop) of the pool, node by node; null = all. Inside one node, or whole nodes."""


class TopologyConfig(Section):
    """Where everything runs."""

    clusters: Annotated[tuple[ClusterConfig, ...], AsTuple] = ()
    """The machines."""
    device_pools: Annotated[tuple[DevicePoolConfig, ...], AsTuple] = ()
    """What is taken of them, in this order."""
    models: Annotated[tuple[TopologyModelConfig, ...], AsTuple] = ()
    """What runs there. Models with the same pool and range are colocated."""


def preset_topology(
    roles: Sequence[str],
    *,
    nnodes: int,
    n_gpus_per_node: int,
    rollout_gpus_per_node: int = 0,
    device_type: Literal["gpu", "cpu"] | None,
) -> TopologyConfig:
    """One cluster and one pool of training, over which all roles are spread, colocated.

    Args:
        rollout_gpus_per_node: devices a node of a second pool, which only rollout has; 0 = rollout is
            colocated with the others.
    """
    cluster = ClusterConfig(
        name="default",
        nnodes=nnodes,
        n_gpus_per_node=n_gpus_per_node + rollout_gpus_per_node,
        device_type=device_type,
    )
    pools = [
        DevicePoolConfig(name="train", cluster="default", nnodes=nnodes, n_gpus_per_node=n_gpus_per_node)
    ]
    if rollout_gpus_per_node:
        pools.append(
            DevicePoolConfig(
                name="rollout", cluster="default", nnodes=nnodes, n_gpus_per_node=rollout_gpus_per_node
            )
        )
    return TopologyConfig(
        clusters=(cluster,),
        device_pools=tuple(pools),
        models=tuple(
            TopologyModelConfig(
                name=role,
                worker=role,
                config_key=SECTION_OF_ROLE[role],
                resource_pool="rollout" if rollout_gpus_per_node and role == "rollout" else "train",
            )
            for role in roles
        ),
    )


def world_size(topology: TopologyConfig, role: str) -> int | None:
    """Ranks of the one model with this role; None where that cannot be said."""
    models = [model for model in topology.models if model.worker == role]
    pools = {pool.name: pool for pool in topology.device_pools}
    if len(models) != 1 or models[0].resource_pool not in pools:
        return None
    if models[0].device_range is not None:
        start, stop = models[0].device_range
        return stop - start if stop > start else None
    pool = pools[models[0].resource_pool]
    return pool.nnodes * pool.n_gpus_per_node


def shares_devices(topology: TopologyConfig, role: str, other: str) -> bool:
    """Whether a model of `role` has a device that a model of `other` has too."""
    sizes = {pool.name: pool.nnodes * pool.n_gpus_per_node for pool in topology.device_pools}

    def ranges(wanted: str) -> list[tuple[str, int, int]]:
        return [
            (model.resource_pool, *(model.device_range or (0, sizes.get(model.resource_pool, 0))))
            for model in topology.models
            if model.worker == wanted
        ]

    return any(
        pool == other_pool and start < other_stop and other_start < stop
        for pool, start, stop in ranges(role)
        for other_pool, other_start, other_stop in ranges(other)
    )


def role_problems(
    workers: Sequence[str], *, needed: Collection[str], allowed: Collection[str] = ()
) -> list[str]:
    """Roles that are missing, superfluous, unknown or declared twice, one sentence each.

    Args:
        workers: the `worker` of each declared model, in order.
        needed: roles of which there must be exactly one.
        allowed: roles of which there may be one.
    """
    problems = []
    for role in needed:
        if role not in workers:
            problems.append(
                f"topology.models: no model with worker {role!r}, which the configuration needs; "
                f"got {list(dict.fromkeys(workers))}"
            )
    counts = Counter(workers)
    for index, worker in enumerate(workers):
        path = f"topology.models[{index}].worker"
        if worker not in ROLES:
            problems.append(f"{path}: unknown role {worker!r}{nearest(worker, ROLES)}")
        elif worker not in needed and worker not in allowed:
            problems.append(f"{path}: {worker!r} is declared, but nothing in the configuration enables it")
        elif counts[worker] > 1 and worker in workers[:index]:
            problems.append(f"{path}: {worker!r} is declared by models[{workers.index(worker)}] already")
    return problems


def nearest(word: str, known: Collection[str]) -> str:
    """A clause that proposes the likeliest spelling, or lists what there is."""
    close = difflib.get_close_matches(word, list(known), n=1)
    if close:
        return f"; did you mean {close[0]!r}?"
    return f"; there is {', '.join(map(repr, known)) or 'none'}" if len(known) <= 12 else ""
