"""Weight versions: their arithmetic, their layout, publishing and pulling them."""

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
