"""Weights through the object store: as values that are put, or written in place (`auto`, `shared_memory`).

In place, on one host, the store's shared memory is both ends: a bucket is written where it is read, and
reading maps it. Between hosts the store's volumes send what is asked for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from neoproto.errors import StoreError
from neoproto.weights.manifest import RemoteMemory
from neoproto.weights.transports import OpenBuckets, TransportChoice, UnsealedBuckets

if TYPE_CHECKING:
    from torch import Tensor

    from neoproto.store import ObjectRef, ObjectStore
    from neoproto.weights.manifest import BucketRef


class StoreTransport:
    """Through an object store: its shared memory on a host, its messages between hosts.

    Args:
        in_place: write straight into the store's memory where there is some; else values are put.
    """

    def __init__(self, store: ObjectStore, *, in_place: bool = True) -> None:
        self._store = store
        self._in_place = store.in_place() if in_place else None
        self._spare: list[Tensor] = []

    @property
    def domain(self) -> str:
        return "" if self._in_place is None else f"volume {self._in_place.volume}"

    def create(self, sizes: Mapping[str, int]) -> UnsealedBuckets:
        if self._in_place is not None:
            return self._in_place.create(sizes)
        wanted = list(sizes.values())
        if [buffer.numel() for buffer in self._spare] != wanted:
            import torch

            self._spare = [torch.empty(nbytes, dtype=torch.uint8) for nbytes in wanted]
        return _PutBuckets(self._store, list(sizes), self._spare)

    def open(self, handles: Sequence[Any]) -> OpenBuckets:
        if self._in_place is None:
            raise StoreError("there is no shared memory here to write weights into")
        return self._in_place.open(handles)

    def read(self, bucket: BucketRef, parts: Sequence[range] | None = None) -> list[Tensor]:
        key = _in_store(bucket)
        if parts is None:
            return [self._store.get(key)]
        values: list[Tensor] = self._store.get_batch([key] * len(parts), rows=list(parts))
        return values

    def maps(self, bucket: BucketRef) -> bool:
        return not isinstance(bucket, str | RemoteMemory) and self._store.maps(bucket)

    def delete(self, buckets: Sequence[BucketRef], *, missing_ok: bool = False) -> None:
        self._store.delete_batch([_in_store(bucket) for bucket in buckets], missing_ok=missing_ok)


def _in_store(bucket: BucketRef) -> str | ObjectRef:
    if isinstance(bucket, RemoteMemory):
        raise StoreError("these weights were published with transport 'nixl' and cannot be read without it")
    return bucket


class _PutBuckets:
    """Written in this process's own memory, the same for every version, and put from there."""

    handles: tuple[()] = ()

    def __init__(self, store: ObjectStore, keys: Sequence[str], buffers: list[Tensor]) -> None:
        self._store, self._keys, self.buffers = store, keys, buffers

    def seal(self) -> Sequence[BucketRef]:
        return self._store.put_batch(dict(zip(self._keys, self.buffers, strict=True)))

    def abort(self) -> None:
        """Nothing was put."""

    def close(self) -> None:
        """The buffers stay for the next version."""


CHOICE = TransportChoice(
    name="store",
    about="put into the store from the publisher's own memory, for comparing",
    make=lambda store: StoreTransport(store, in_place=False),
    in_store=True,
)
