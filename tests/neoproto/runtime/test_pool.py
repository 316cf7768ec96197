from __future__ import annotations

import pytest

from neoproto.runtime.placement import Block
from neoproto.runtime.pool import ResourcePool


def pool(nnodes: int, per_node: int) -> ResourcePool:
    block = Block(first_node=2, nnodes=nnodes, first_device=1, devices_per_node=per_node)
    return ResourcePool(name="p", cluster="c", block=block, device_type="cpu")


def test_a_view_lies_inside_a_node_or_covers_whole_nodes() -> None:
    whole = pool(3, 4)
    assert (whole.nnodes, whole.processes_per_node, whole.world_size) == (3, 4, 12)
    inside = whole.view(start=5, size=2)
    assert inside.block == Block(first_node=3, nnodes=1, first_device=2, devices_per_node=2)
    nodes = whole.view(start=4, size=8)
    assert nodes.block == Block(first_node=3, nnodes=2, first_device=1, devices_per_node=4)
    assert inside.name == "p[5:7]"


@pytest.mark.parametrize(("start", "size"), [(3, 2), (0, 6), (2, 8), (0, 0), (-1, 2), (10, 4)])
def test_any_other_view_is_refused(start: int, size: int) -> None:
    with pytest.raises(ValueError, match=r"range within|neither"):
        pool(3, 4).view(start=start, size=size)


def test_a_device_is_a_gpu_or_a_cpu() -> None:
    block = Block(first_node=0, nnodes=1, first_device=0, devices_per_node=1)
    with pytest.raises(ValueError, match="device_type must be 'gpu' or 'cpu', got 'cuda'"):
        ResourcePool(name="p", cluster="c", block=block, device_type="cuda")  # type: ignore[arg-type]
