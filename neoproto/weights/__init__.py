"""Weight versions: their arithmetic, their layout, publishing and pulling them.

The names below are loaded when first used, so that the registry's process needs no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from neoproto.weights.agent import AgentStats, ServingEngine, UpdateAgent
    from neoproto.weights.manifest import Entry, Manifest, TensorLayout, check_layout, dtype_name, parse_dtype
    from neoproto.weights.options import PauseMode, UpdateOptions, WeightOptions
    from neoproto.weights.publisher import Publisher
    from neoproto.weights.puller import Pulled, Puller
    from neoproto.weights.registry import Lease, LocalRegistry, Registry, RegistryState, WeightRegistry
    from neoproto.weights.version import (
        WeightVersion,
        group_clock,
        lag,
        required_version,
        should_load,
        staleness,
        too_stale,
    )

_HOMES = {
    "AgentStats": "agent",
    "Entry": "manifest",
    "Lease": "registry",
    "LocalRegistry": "registry",
    "Manifest": "manifest",
    "PauseMode": "options",
    "Publisher": "publisher",
    "Pulled": "puller",
    "Puller": "puller",
    "Registry": "registry",
    "RegistryState": "registry",
    "ServingEngine": "agent",
    "TensorLayout": "manifest",
    "UpdateAgent": "agent",
    "UpdateOptions": "options",
    "WeightOptions": "options",
    "WeightRegistry": "registry",
    "WeightVersion": "version",
    "check_layout": "manifest",
    "dtype_name": "manifest",
    "group_clock": "version",
    "lag": "version",
    "parse_dtype": "manifest",
    "required_version": "version",
    "should_load": "version",
    "staleness": "version",
    "too_stale": "version",
}

__all__ = [
    "AgentStats",
    "Entry",
    "Lease",
    "LocalRegistry",
    "Manifest",
    "PauseMode",
    "Publisher",
    "Pulled",
    "Puller",
    "Registry",
    "RegistryState",
    "ServingEngine",
    "TensorLayout",
    "UpdateAgent",
    "UpdateOptions",
    "WeightOptions",
    "WeightRegistry",
    "WeightVersion",
    "check_layout",
    "dtype_name",
    "group_clock",
    "lag",
    "parse_dtype",
    "required_version",
    "should_load",
    "staleness",
    "too_stale",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
