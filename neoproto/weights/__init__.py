"""Weight versions: their arithmetic, their layout, publishing and pulling them."""

from neoproto.weights.manifest import Entry, Manifest, TensorLayout, check_layout, dtype_name, parse_dtype
from neoproto.weights.options import WeightOptions
from neoproto.weights.publisher import Publisher
from neoproto.weights.puller import Pulled, Puller
from neoproto.weights.registry import Lease, LocalRegistry, Registry, RegistryState, WeightRegistry
from neoproto.weights.version import WeightVersion, lag

__all__ = [
    "Entry",
    "Lease",
    "LocalRegistry",
    "Manifest",
    "Publisher",
    "Pulled",
    "Puller",
    "Registry",
    "RegistryState",
    "TensorLayout",
    "WeightOptions",
    "WeightRegistry",
    "WeightVersion",
    "check_layout",
    "dtype_name",
    "lag",
    "parse_dtype",
]
