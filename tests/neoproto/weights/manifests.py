"""Manifests and versions for tests of the registry, which never looks at their bytes."""

from __future__ import annotations

from typing import Any

from neoproto.weights import Entry, Manifest, WeightRegistry, WeightVersion
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


class AtOnce:
    """A registry's methods without an event loop; those named `wait_…` with a timeout of 0 only.

    That they end without a suspension is a promise of the registry: each message is judged as a whole.
    """

    def __init__(self, registry: WeightRegistry) -> None:
        self._registry = registry

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._registry, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            coroutine = method(*args, **kwargs)
            try:
                coroutine.send(None)
            except StopIteration as end:
                return end.value
            coroutine.close()
            raise AssertionError(f"{name} was suspended")

        return call
