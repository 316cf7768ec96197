"""What a worker group says when its processes cannot be started."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest

from neoproto.errors import DeadlineExceeded
from neoproto.runtime.backend import GroupRequest, RuntimeBackend
from neoproto.runtime.group import spawn_processes
from neoproto.runtime.placement import Block
from neoproto.runtime.pool import ResourcePool


class SlowBackend:
    def spawn_group(self, request: GroupRequest, timeout_s: float) -> Any:
        raise TimeoutError


def test_processes_that_do_not_start_in_time_are_named() -> None:
    block = Block(first_node=0, nnodes=1, first_device=0, devices_per_node=2)
    request = GroupRequest(
        key="actor-1",
        name="actor",
        pool=ResourcePool(name="all", cluster="default", block=block, device_type="cpu"),
        env={},
        log_dir=Path(),
        attach=cast("Any", None),
    )
    with pytest.raises(DeadlineExceeded) as caught:
        spawn_processes(cast("RuntimeBackend", SlowBackend()), request, 120.0)
    assert str(caught.value) == "actor.start did not answer within 120.0 s; no answer from rank(s) 0, 1"
