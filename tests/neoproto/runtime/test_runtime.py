"""What a runtime refuses or settles before it starts anything."""

from __future__ import annotations

import pytest

from neoproto.errors import ConfigError, RuntimeClosed, TopologyError
from neoproto.runtime import Runtime, current_runtime
from neoproto.runtime.settings import RuntimeSettings


def test_groups_do_not_take_the_names_of_what_is_the_runs_own() -> None:
    """They are rows of processes.json, or what lies beside the groups' folders of logs."""
    runtime = Runtime(RuntimeSettings.from_config({}), None)
    wanted = (
        "controller",
        "store-volume",
        "store-index",
        "store",
        "hosts",
        "controller.log",
        "actor",
        "actor",
    )
    given = [runtime._unique_name(name) for name in wanted]
    assert given == [*(f"{name}-2" for name in wanted[:6]), "actor", "actor-2"]


@pytest.mark.parametrize(
    ("config", "error", "said"),
    [
        ({"topology": {}}, TopologyError, r"topology\.clusters: wanted at least one cluster, got none"),
        ({"topology": 5}, TopologyError, r"topology: wanted a mapping, got 5 \(int\)"),
        ({"backend": "ray2"}, ConfigError, r"runtime\.backend: no backend 'ray2'"),
        (None, ConfigError, r"configuration: wanted a mapping"),
    ],
)
def test_what_cannot_be_is_refused_and_leaves_no_runtime(
    config: object, error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=f"^{said}"):
        Runtime.from_config(config)
    with pytest.raises(RuntimeClosed):
        current_runtime()


def test_a_pool_has_no_more_gpus_than_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    runtime = Runtime(RuntimeSettings.from_config({}), None)
    assert runtime.create_resource_pool(1, 2, device_type="gpu").device_type == "gpu"
    with pytest.raises(ValueError, match="the pool wants 3 GPUs a node, this machine has 2"):
        runtime.create_resource_pool(1, 3, device_type="gpu")
    with pytest.raises(ValueError, match="device_type must be 'gpu' or 'cpu', got 'cuda'"):
        runtime.create_resource_pool(1, 1, device_type="cuda")  # type: ignore[arg-type]
    applied = RuntimeSettings.from_config({"monarch": {"job_mode": "current"}})
    assert Runtime(applied, None).create_resource_pool(1, 3, device_type="gpu").world_size == 3
