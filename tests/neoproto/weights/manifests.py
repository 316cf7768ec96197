"""Manifests and versions for tests of the registry, which never looks at their bytes."""

from __future__ import annotations

from neoproto.weights import Entry, Manifest, WeightVersion
from neoproto.weights.manifest import Box, Piece


def version(n: int, epoch: int = 0) -> WeightVersion:
    return WeightVersion(epoch=epoch, n=n)


def manifest(n: int, epoch: int = 0) -> Manifest:
    """One float32 [2] in one bucket."""
    piece = Piece(box=Box.whole((2,)), bucket=0, offset=0)
    return Manifest(
        version=version(n, epoch),
        entries=(Entry(name="w", dtype="float32", shape=(2,), pieces=(piece,)),),
        buckets=(f"weights/{epoch}.{n}/0",),
        bucket_bytes=(8,),
    )


class Clock:
    """Seconds that pass when told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now
