"""A compiled topology: which devices every pool and every model has.

Devices are named by (node of the cluster, device of the node). A pool is a rectangle of them; its ranks count
node by node. Everything here is plain, frozen and picklable, so that workers can be given their place.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from neoproto.runtime.display import MODEL_COLUMNS, model_cells, placement_html

if TYPE_CHECKING:
    from rich.table import Table

DeviceType = Literal["gpu", "cpu"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ClusterPlacement:
    """Machines of one kind: `nnodes` of them with `devices_per_node` devices each (process slots on cpu)."""

    name: str
    nnodes: int
    devices_per_node: int
    device_type: DeviceType


@dataclass(frozen=True, kw_only=True, slots=True)
class Block:
    """A rectangle of devices: nodes [first_node, first_node + nnodes), the same devices on each."""

    first_node: int
    nnodes: int
    first_device: int
    devices_per_node: int

    @property
    def size(self) -> int:
        """Number of devices."""
        return self.nnodes * self.devices_per_node

    @property
    def nodes(self) -> range:
        """Nodes, as the cluster counts them."""
        return range(self.first_node, self.first_node + self.nnodes)

    @property
    def devices(self) -> range:
        """Devices on each node, as the node counts them."""
        return range(self.first_device, self.first_device + self.devices_per_node)

    def device_of(self, rank: int) -> tuple[int, int]:
        """(node, device) of a rank of this block; ranks count node by node.

        Raises:
            IndexError: there is no such rank.
        """
        if not 0 <= rank < self.size:
            raise IndexError(f"rank {rank} of a block of {self.size}")
        node, device = divmod(rank, self.devices_per_node)
        return self.first_node + node, self.first_device + device

    def view(self, start: int, stop: int) -> Block:
        """The block of ranks [start, stop): contiguous inside one node, or whole contiguous nodes.

        Raises:
            ValueError: the range is empty, outside this block, or neither of the two.
        """
        per_node = self.devices_per_node
        if not 0 <= start < stop <= self.size:
            raise ValueError(f"[{start}, {stop}) is not a range within {self.size} devices")
        node, device = divmod(start, per_node)
        if start % per_node == 0 and stop % per_node == 0:
            return Block(
                first_node=self.first_node + node,
                nnodes=(stop - start) // per_node,
                first_device=self.first_device,
                devices_per_node=per_node,
            )
        if (stop - 1) // per_node != node:
            raise ValueError(
                f"[{start}, {stop}) is neither inside one node nor whole nodes of {per_node} devices"
            )
        return Block(
            first_node=self.first_node + node,
            nnodes=1,
            first_device=self.first_device + device,
            devices_per_node=stop - start,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolPlacement:
    """A pool of one cluster; `attributes` are kept as given."""

    name: str
    cluster: str
    device_type: DeviceType
    block: Block
    attributes: Mapping[str, Any] = field(default_factory=dict, hash=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelPlacement:
    """One worker group: ranks [start, stop) of its pool.

    Attributes:
        config_key: the section of the configuration that describes it.
        block: its devices, in the cluster's counting.
        whole_pool: it has every device of the pool.
        colocated_with: the other models on exactly these devices, in the order of declaration.
    """

    name: str
    worker: str
    config_key: str | None
    cluster: str
    pool: str
    device_type: DeviceType
    start: int
    stop: int
    block: Block
    whole_pool: bool
    colocated_with: tuple[str, ...] = ()

    @property
    def world_size(self) -> int:
        """Ranks; one process on each device."""
        return self.stop - self.start


@dataclass(frozen=True, kw_only=True, slots=True)
class PlacementRow:
    """One line of the table that is shown before workers are created."""

    model: str
    worker: str
    cluster: str
    pool: str
    nodes: str
    devices: str
    ranks: int
    device_type: str
    colocated_with: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Placement:
    """A whole topology, placed. Names are unique within each tuple; the order is that of declaration."""

    clusters: tuple[ClusterPlacement, ...]
    pools: tuple[PoolPlacement, ...]
    models: tuple[ModelPlacement, ...]

    def cluster(self, name: str) -> ClusterPlacement:
        """The cluster of that name (`KeyError` if there is none)."""
        return _named(self.clusters, name)

    def pool(self, name: str) -> PoolPlacement:
        """The pool of that name (`KeyError` if there is none)."""
        return _named(self.pools, name)

    def model(self, name: str) -> ModelPlacement:
        """The model of that name (`KeyError` if there is none)."""
        return _named(self.models, name)

    def models_of(self, worker: str) -> tuple[ModelPlacement, ...]:
        """The models with that role, in the order of declaration."""
        return tuple(model for model in self.models if model.worker == worker)

    @property
    def num_devices(self) -> int:
        """Distinct devices that models run on."""
        blocks = {(model.cluster, model.block): model.block.size for model in self.models}
        return sum(blocks.values())

    def _repr_html_(self) -> str:
        return placement_html(self)

    def placement_rows(self) -> list[PlacementRow]:
        """One row a model, for the table."""
        return [
            PlacementRow(
                model=model.name,
                worker=model.worker,
                cluster=model.cluster,
                pool=model.pool,
                nodes=_span(model.block.nodes),
                devices=_span(model.block.devices),
                ranks=model.world_size,
                device_type=model.device_type,
                colocated_with=", ".join(model.colocated_with),
            )
            for model in self.models
        ]


def placement_table(placement: Placement | None) -> Table:
    """Where every model of a topology runs; no rows without one."""
    from rich.table import Table

    table = Table(title="Topology")
    for column in MODEL_COLUMNS:
        table.add_column(column)
    for cells in () if placement is None else model_cells(placement):
        table.add_row(*map(str, cells))
    return table


Part = TypeVar("Part", ClusterPlacement, PoolPlacement, ModelPlacement)


def _named(parts: tuple[Part, ...], name: str) -> Part:
    for part in parts:
        if part.name == name:
            return part
    raise KeyError(name)


def _span(numbers: range) -> str:
    return str(numbers[0]) if len(numbers) == 1 else f"{numbers[0]}-{numbers[-1]}"
