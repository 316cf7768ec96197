"""From a declared topology to a placement, or to everything that is wrong with it. Pure: nothing is started.

    clusters ──> pools, first fit in the order declared ──> models, a range of their pool's devices each

Every check runs on what the earlier ones left readable: one mistake is one sentence and hides no other.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypeVar

from meshes.common.machine import gpu_count
from neoproto.config.load import schema_problems
from neoproto.config.topology import (
    ClusterConfig,
    DevicePoolConfig,
    TopologyConfig,
    TopologyModelConfig,
    nearest,
    role_problems,
)
from neoproto.errors import TopologyError
from neoproto.runtime.placement import (
    Block,
    ClusterPlacement,
    DeviceType,
    ModelPlacement,
    Placement,
    PoolPlacement,
)

ItemT = TypeVar("ItemT", ClusterConfig, DevicePoolConfig, TopologyModelConfig)
Range = tuple[int, int]


def compile_topology(
    topology: TopologyConfig | Mapping[str, Any],
    *,
    roles_needed: Collection[str] | None = None,
    roles_allowed: Collection[str] = (),
    device_type: DeviceType = "cpu",
    local_gpus: int | None = None,
) -> Placement:
    """Place every pool and model.

    Pools take devices in the order they are declared: the lowest node, then the lowest device, where the
    whole rectangle is free.

    Args:
        topology: validated, or a plain mapping.
        roles_needed: roles of which there must be exactly one model; None = any `worker` will do.
        roles_allowed: further roles of which there may be one.
        device_type: of a cluster that names none.
        local_gpus: GPUs of this machine, where all clusters are private hosts on it; None = not known.

    Returns:
        A placement in which the pools of a cluster share no device, and two models of a pool have either the
        same devices or none in common.

    Raises:
        TopologyError: with one sentence for each violation, naming its path and what it got.
    """
    draft = _read(topology)
    problems = draft.problems
    clusters = {
        one.name: ClusterPlacement(
            name=one.name,
            nnodes=one.nnodes,
            devices_per_node=one.n_gpus_per_node,
            device_type=one.device_type or device_type,
        )
        for one in draft.clusters.by_name.values()
    }
    problems += _too_many_gpus(draft.clusters, clusters, local_gpus)
    pools = _place_pools(draft, clusters)
    models = _place_models(draft, pools)
    if roles_needed is not None and not (draft.models.unreadable or draft.models.opaque):
        workers = [model.worker for _, model in draft.models.readable]
        problems += role_problems(workers, needed=roles_needed, allowed=roles_allowed)
    if problems:
        raise TopologyError(*problems)
    return Placement(clusters=tuple(clusters.values()), pools=tuple(pools.values()), models=tuple(models))


def compile_here(
    topology: TopologyConfig | Mapping[str, Any],
    *,
    hosts_are_here: bool,
    roles_needed: Collection[str] | None = None,
    roles_allowed: Collection[str] = (),
) -> Placement:
    """`compile_topology` with the GPUs of this machine.

    Args:
        hosts_are_here: all hosts are on it. GPUs of others are counted when a run attaches to them.

    Raises:
        TopologyError: as there, or it has no cluster.
    """
    gpus = gpu_count()
    placement = compile_topology(
        topology,
        roles_needed=roles_needed,
        roles_allowed=roles_allowed,
        device_type="gpu" if gpus else "cpu",
        local_gpus=gpus if hosts_are_here else None,
    )
    if not placement.clusters:
        raise TopologyError("topology.clusters: wanted at least one cluster, got none")
    return placement


@dataclass(kw_only=True, slots=True)
class _Items(Generic[ItemT]):
    """One list of the topology.

    Attributes:
        key: its name, which is the path of its items.
        readable: (index, item) of those that have the right types.
        by_name: the first of each name.
        opaque: names of items that are broken otherwise; a reference to one of them is no second mistake.
        unreadable: some item, or the list itself, does not even have a name.
    """

    key: str
    readable: list[tuple[int, ItemT]] = field(default_factory=list)
    by_name: dict[str, ItemT] = field(default_factory=dict)
    opaque: set[str] = field(default_factory=set)
    unreadable: bool = False

    def path(self, index: int) -> str:
        return f"topology.{self.key}[{index}]"

    def first(self) -> Iterator[tuple[str, ItemT]]:
        """(path, item) of the first item of each name."""
        for index, item in self.readable:
            if self.by_name[item.name] is item:
                yield self.path(index), item

    def missing(self, name: str) -> str | None:
        """What is wrong with a reference to `name`, if it can be known to lead nowhere."""
        if name in self.by_name or name in self.opaque or self.unreadable:
            return None
        return f"{name!r} is not in topology.{self.key}{nearest(name, self.by_name)}"


@dataclass(kw_only=True, slots=True)
class _Draft:
    """A topology as far as it can be read, and what is wrong with it so far."""

    problems: list[str]
    clusters: _Items[ClusterConfig]
    pools: _Items[DevicePoolConfig]
    models: _Items[TopologyModelConfig]


def _read(topology: TopologyConfig | Mapping[str, Any]) -> _Draft:
    """Take apart what has the right types; note what has not, and names that are used twice."""
    problems: list[str] = []
    broken: set[tuple[str | int, ...]] = set()
    raw: Any = topology
    if not isinstance(topology, TopologyConfig):
        problems, paths = schema_problems(TopologyConfig, topology, prefix=("topology",))
        broken = {path[:2] for path in paths}
        raw = topology if isinstance(topology, Mapping) else {}
    draft = _Draft(
        problems=problems,
        clusters=_items("clusters", ClusterConfig, raw, broken),
        pools=_items("device_pools", DevicePoolConfig, raw, broken),
        models=_items("models", TopologyModelConfig, raw, broken),
    )
    for items in (draft.clusters, draft.pools, draft.models):
        problems += _repeated(items)
    return draft


def _items(
    key: str, kind: type[ItemT], raw: TopologyConfig | Mapping[str, Any], broken: set[tuple[str | int, ...]]
) -> _Items[ItemT]:
    items: _Items[ItemT] = _Items(key=key, unreadable=(key,) in broken)
    listed = getattr(raw, key) if isinstance(raw, TopologyConfig) else raw.get(key, ())
    for index, one in enumerate(() if items.unreadable else listed):
        if (key, index) not in broken:
            item = kind.model_validate(one)
            items.readable.append((index, item))
            items.by_name.setdefault(item.name, item)
        elif isinstance(one, Mapping) and isinstance(one.get("name"), str):
            items.opaque.add(one["name"])
        else:
            items.unreadable = True
    return items


def _repeated(items: _Items[Any]) -> Iterator[str]:
    first_index: dict[str, int] = {}
    for index, item in items.readable:
        earlier = first_index.setdefault(item.name, index)
        if earlier != index:
            yield f"{items.path(index)}.name: {item.name!r} is the name of {items.key}[{earlier}] already"


def _too_many_gpus(
    items: _Items[ClusterConfig], clusters: Mapping[str, ClusterPlacement], local_gpus: int | None
) -> Iterator[str]:
    """Private hosts share this machine: together they have no more GPUs than it has."""
    left = local_gpus
    for path, item in items.first():
        cluster = clusters[item.name]
        if left is None or cluster.device_type != "gpu":
            continue
        wanted = cluster.nnodes * cluster.devices_per_node
        if wanted > left:
            yield (
                f"{path}: wants {cluster.nnodes} x {cluster.devices_per_node} GPUs, this machine has "
                f"{local_gpus} ({left} not taken by other clusters)"
            )
        left = max(0, left - wanted)


def _place_pools(draft: _Draft, clusters: Mapping[str, ClusterPlacement]) -> dict[str, PoolPlacement]:
    """Pools that fit, by name; those that do not are among the draft's problems."""
    free = {name: _FreeDevices(one.nnodes, one.devices_per_node) for name, one in clusters.items()}
    placed: dict[str, PoolPlacement] = {}
    for path, pool in draft.pools.first():
        missing = draft.clusters.missing(pool.cluster)
        if missing is not None:
            draft.problems.append(f"{path}.cluster: {missing}")
        cluster = clusters.get(pool.cluster)
        if cluster is None:
            continue
        too_large = list(_too_large(path, pool, cluster))
        draft.problems += too_large
        block = None if too_large else free[pool.cluster].take(pool.nnodes, pool.n_gpus_per_node)
        if block is not None:
            placed[pool.name] = PoolPlacement(
                name=pool.name,
                cluster=pool.cluster,
                device_type=cluster.device_type,
                block=block,
                attributes=dict(pool.attributes),
            )
        elif not too_large:
            others = ", ".join(repr(one.name) for one in placed.values() if one.cluster == pool.cluster)
            draft.problems.append(
                f"{path}: wants {pool.nnodes} x {pool.n_gpus_per_node} devices; cluster {pool.cluster!r} "
                f"({cluster.nnodes} x {cluster.devices_per_node}) has no such block left beside {others}"
            )
    return placed


def _too_large(path: str, pool: DevicePoolConfig, cluster: ClusterPlacement) -> Iterator[str]:
    for name, wants, has in (
        ("nnodes", pool.nnodes, cluster.nnodes),
        ("n_gpus_per_node", pool.n_gpus_per_node, cluster.devices_per_node),
    ):
        if wants > has:
            yield f"{path}.{name}: wants {wants}, cluster {pool.cluster!r} has {has}"


class _FreeDevices:
    """The devices of a cluster that no pool has."""

    def __init__(self, nnodes: int, devices_per_node: int) -> None:
        self._nnodes, self._devices = nnodes, devices_per_node
        self._taken: list[Block] = []

    def take(self, nnodes: int, devices: int) -> Block | None:
        """Occupy the first free block of this size, by node and then by device; None if there is none.

        The first one begins at the edge, or where a taken one ends: else it could begin one earlier.
        """
        for node in sorted({0, *(one.first_node + one.nnodes for one in self._taken)}):
            for device in sorted({0, *(one.first_device + one.devices_per_node for one in self._taken)}):
                if node + nnodes > self._nnodes or device + devices > self._devices:
                    continue
                block = Block(first_node=node, nnodes=nnodes, first_device=device, devices_per_node=devices)
                if not any(_overlap(block, other) for other in self._taken):
                    self._taken.append(block)
                    return block
        return None


def _overlap(one: Block, other: Block) -> bool:
    return (
        one.first_node < other.first_node + other.nnodes
        and other.first_node < one.first_node + one.nnodes
        and one.first_device < other.first_device + other.devices_per_node
        and other.first_device < one.first_device + one.devices_per_node
    )


def _place_models(draft: _Draft, pools: Mapping[str, PoolPlacement]) -> list[ModelPlacement]:
    """Models whose range is a view of their pool; the others are among the draft's problems."""
    placed: list[tuple[str, ModelPlacement]] = []
    for path, model in draft.models.first():
        missing = draft.pools.missing(model.resource_pool)
        if missing is not None:
            draft.problems.append(f"{path}.resource_pool: {missing}")
        declared = draft.pools.by_name.get(model.resource_pool)
        if declared is None:
            if model.device_range is not None and model.device_range[0] >= model.device_range[1]:
                draft.problems.append(f"{path}.device_range: {list(model.device_range)} is empty")
            continue
        start, stop = model.device_range or (0, declared.nnodes * declared.n_gpus_per_node)
        try:
            _shape(declared).view(start, stop)
        except ValueError as error:
            draft.problems.append(f"{path}.device_range: pool {declared.name!r}: {error}")
            continue
        pool = pools.get(model.resource_pool)
        block = (pool.block if pool else _shape(declared)).view(start, stop)
        placed.append((path, _model(model, declared, pool, start, stop, block)))
    draft.problems += _partial_overlaps(placed)
    return _with_colocation([model for _, model in placed])


def _shape(pool: DevicePoolConfig) -> Block:
    """The pool's own rectangle, wherever it may lie."""
    return Block(first_node=0, nnodes=pool.nnodes, first_device=0, devices_per_node=pool.n_gpus_per_node)


def _model(
    model: TopologyModelConfig,
    declared: DevicePoolConfig,
    pool: PoolPlacement | None,
    start: int,
    stop: int,
    block: Block,
) -> ModelPlacement:
    return ModelPlacement(
        name=model.name,
        worker=model.worker,
        config_key=model.config_key,
        cluster=declared.cluster,
        pool=declared.name,
        device_type=pool.device_type if pool else "cpu",
        start=start,
        stop=stop,
        block=block,
        whole_pool=stop - start == declared.nnodes * declared.n_gpus_per_node,
    )


def _partial_overlaps(placed: Sequence[tuple[str, ModelPlacement]]) -> Iterator[str]:
    """One sentence for each range that shares devices with other ranges of its pool declared before it."""
    first: dict[tuple[str, Range], tuple[int, str, ModelPlacement]] = {}
    for order, (path, model) in enumerate(placed):
        first.setdefault((model.pool, (model.start, model.stop)), (order, path, model))
    earlier: dict[int, list[int]] = {}
    open_ranges: list[tuple[int, str, ModelPlacement]] = []
    for one in sorted(first.values(), key=lambda item: (item[2].pool, item[2].start)):
        model = one[2]
        open_ranges = [
            other for other in open_ranges if other[2].pool == model.pool and other[2].stop > model.start
        ]
        for other in open_ranges:
            earlier.setdefault(max(one[0], other[0]), []).append(min(one[0], other[0]))
        open_ranges.append(one)
    for order in sorted(earlier):
        path, model = placed[order]
        other_model = placed[min(earlier[order])][1]
        more = f" and {len(earlier[order]) - 1} more range(s)" if len(earlier[order]) > 1 else ""
        yield (
            f"{path}.device_range: [{model.start}, {model.stop}) overlaps [{other_model.start}, "
            f"{other_model.stop}) of {other_model.name!r}{more} in pool {model.pool!r} without being the same"
        )


def _with_colocation(models: Sequence[ModelPlacement]) -> list[ModelPlacement]:
    """The same models, each knowing the others on its devices."""
    together: dict[tuple[str, Range], list[str]] = {}
    for model in models:
        together.setdefault((model.pool, (model.start, model.stop)), []).append(model.name)
    return [
        replace(
            model,
            colocated_with=tuple(
                name for name in together[model.pool, (model.start, model.stop)] if name != model.name
            ),
        )
        for model in models
    ]
