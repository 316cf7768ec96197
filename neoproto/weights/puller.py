"""Reads published versions back: buckets from the store, one view per tensor."""

from __future__ import annotations

from torch import Tensor

from neoproto.errors import WeightMismatch
from neoproto.store import ObjectStore
from neoproto.weights.manifest import Manifest, TensorLayout, check_layout
from neoproto.weights.publisher import tensor_view


class Puller:
    """Pulls versions of one model for one replica.

    The first version fixes the layout; a later one with other names, shapes or dtypes is refused before
    anything is read.
    """

    def __init__(self, store: ObjectStore) -> None:
        self._store = store
        self._layout: dict[str, TensorLayout] | None = None

    def pull(self, manifest: Manifest) -> dict[str, Tensor]:
        """The version's tensors by name, in the model's order, on the CPU.

        They are views of the buckets read; names that were tied share memory.

        Raises:
            WeightMismatch: the layout is not that of the versions before, or a bucket's size is not the
                manifest's.
            KeyMissing: the version is retired.
        """
        layout = manifest.layout()
        if self._layout is not None:
            check_layout(layout, self._layout, what=f"weights {manifest.version}")
        buckets = self._store.get_batch(list(manifest.buckets))
        sizes = [0] * len(manifest.buckets)
        for entry in manifest:
            sizes[entry.bucket] = max(sizes[entry.bucket], entry.end)
        for key, bucket, size in zip(manifest.buckets, buckets, sizes, strict=True):
            if bucket.numel() != size:
                name = key if isinstance(key, str) else key.key
                raise WeightMismatch(f"bucket {name} has {bucket.numel()} bytes, its manifest says {size}")
        self._layout = layout
        return {entry.name: tensor_view(buckets[entry.bucket], entry) for entry in manifest}
