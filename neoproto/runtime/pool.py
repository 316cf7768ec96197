"""Resource pools: ordered rectangular grids of process slots."""

from __future__ import annotations

from dataclasses import dataclass, replace

from neoproto.runtime.display import pool_html
from neoproto.runtime.placement import Block, DeviceType, Placement


@dataclass(frozen=True, kw_only=True, slots=True)
class ResourcePool:
    """A grid of nodes × processes per node; several groups may share one. It owns nothing.

    Attributes:
        name: its name in messages.
        cluster: whose nodes they are.
        block: which nodes, and which devices of each; on cpu a device is a process slot.
        device_type: "gpu" or "cpu".
        beside_controller: one CPU node on the controller's machine, apart from the clusters.
    """

    name: str
    cluster: str
    block: Block
    device_type: DeviceType
    beside_controller: bool = False

    def __post_init__(self) -> None:
        if self.device_type not in ("gpu", "cpu"):
            raise ValueError(f"device_type must be 'gpu' or 'cpu', got {self.device_type!r}")

    @property
    def nnodes(self) -> int:
        """Number of nodes."""
        return self.block.nnodes

    @property
    def processes_per_node(self) -> int:
        """Process slots on each node."""
        return self.block.devices_per_node

    @property
    def world_size(self) -> int:
        """Number of process slots."""
        return self.block.size

    def _repr_html_(self) -> str:
        return pool_html(self)

    def view(self, *, start: int, size: int) -> ResourcePool:
        """Slots `start … start+size-1`, as a pool.

        Raises:
            ValueError: the range does not fit, or is neither inside one node nor whole nodes.
        """
        return replace(
            self, name=f"{self.name}[{start}:{start + size}]", block=self.block.view(start, start + size)
        )


def model_pool(placement: Placement | None, name: str) -> ResourcePool:
    """The pool, or view of a pool, of a model of the topology.

    Raises:
        ValueError: the topology has no such model.
    """
    models = {} if placement is None else {model.name: model for model in placement.models}
    if name not in models:
        raise ValueError(f"the topology has no model {name!r}; there is: {', '.join(models) or 'none'}")
    model = models[name]
    return ResourcePool(name=name, cluster=model.cluster, block=model.block, device_type=model.device_type)
