"""From a manifest back to tensors: buckets from the store, one view per tensor."""

from __future__ import annotations

import threading

from torch import Tensor

from neoproto.errors import WeightMismatch
from neoproto.store import KeyOrRef, ObjectStore
from neoproto.weights.manifest import Manifest, TensorLayout, check_layout
from neoproto.weights.publisher import tensor_view


class ReadStopped(Exception):
    """A read was told to stop before it was complete."""


class WeightReader:
    """Reads versions of one model. Knows nothing of leases: see `Puller`.

    The first version fixes the layout; a later one with other names, shapes or dtypes is refused before
    anything is read.
    """

    def __init__(self, store: ObjectStore) -> None:
        self._store = store
        self._layout: dict[str, TensorLayout] | None = None

    def read(self, manifest: Manifest, stop: threading.Event | None = None) -> dict[str, Tensor]:
        """The version's tensors by name, in the model's order, on the CPU.

        They are views of the buckets read; names that were tied share memory.

        Args:
            stop: read no further bucket once it is set.

        Raises:
            WeightMismatch: the layout is not that of the versions before, or a bucket's size is not the
                manifest's.
            KeyMissing: the version is gone from the store.
            ReadStopped: `stop` was set.
        """
        layout = manifest.layout()
        if self._layout is not None:
            check_layout(layout, self._layout, what=f"weights {manifest.version}")
        sizes = [0] * len(manifest.buckets)
        for entry in manifest:
            sizes[entry.bucket] = max(sizes[entry.bucket], entry.end)
        buckets = []
        for key, size in zip(manifest.buckets, sizes, strict=True):
            if stop is not None and stop.is_set():
                raise ReadStopped
            buckets.append(self._bucket(key, size))
        self._layout = layout
        return {entry.name: tensor_view(buckets[entry.bucket], entry) for entry in manifest}

    def _bucket(self, key: KeyOrRef, size: int) -> Tensor:
        bucket: Tensor = self._store.get(key)
        if bucket.numel() != size:
            name = key if isinstance(key, str) else key.key
            raise WeightMismatch(f"bucket {name} has {bucket.numel()} bytes, its manifest says {size}")
        return bucket
