from __future__ import annotations

from meshes.monarch.jobs import Node


def test_a_device_is_called_as_its_host_calls_it() -> None:
    assert Node(env={}, gpus=("4", "5")).gpu(1) == "5"
    assert Node(env={}).gpu(1) == "1"
