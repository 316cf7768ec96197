"""How buckets of weights travel: one small interface, and the object store behind it.

    publisher ──start──> draft: the slot's memory ──commit──> references ──manifest──> puller ──read──> bytes

On one host the store's shared memory is both ends: a draft is written where it is read, and reading maps it.
Between hosts the store's volumes send what is asked for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from neoproto.errors import StoreError
from neoproto.store import KeyOrRef, ObjectRef, ObjectStore
from neoproto.store.writing import drafts_of


class OpenBuckets(Protocol):
    """Memory of buckets, open for writing."""

    @property
    def buffers(self) -> list[Tensor]:
        """One a bucket, uint8 [nbytes], on the CPU; not to be used once it is closed."""
        ...

    def close(self) -> None:
        """Let go of the memory. Closing twice is harmless."""
        ...


class BucketDraft(OpenBuckets, Protocol):
    """Buckets that are being written."""

    @property
    def spaces(self) -> Sequence[Any]:
        """What ranks of the same place open them with."""
        ...

    def commit(self) -> Sequence[KeyOrRef]:
        """Make them readable."""
        ...

    def discard(self) -> None:
        """Forget them."""
        ...


class Transport(Protocol):
    """Moves buckets from publishers to pullers. All methods may block; `read` is safe from any thread.

    Raises (all methods):
        StoreError: what carries the bytes failed.
    """

    @property
    def place(self) -> str:
        """Ranks whose places are equal can open each other's drafts; "" if nobody else can."""
        ...

    def start(self, sizes: Mapping[str, int]) -> BucketDraft:
        """Memory for buckets: key -> bytes, each > 0."""
        ...

    def open(self, spaces: Sequence[Any]) -> OpenBuckets:
        """Open what a rank of the same place started."""
        ...

    def read(self, bucket: KeyOrRef, parts: Sequence[range] | None = None) -> list[Tensor]:
        """A bucket, uint8 [nbytes], as the only element; or of each range of bytes its own tensor.

        Raises:
            KeyMissing: the bucket is gone.
        """
        ...

    def maps(self, bucket: KeyOrRef) -> bool:
        """Whether reading a whole bucket costs nothing until its bytes are touched."""
        ...

    def delete(self, buckets: Sequence[KeyOrRef], *, missing_ok: bool = False) -> None:
        """Delete buckets, of any rank."""
        ...


class StoreTransport:
    """Through an object store: its shared memory on a host, its messages between hosts."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store
        self._drafts = drafts_of(store)
        self._maps = getattr(store, "maps", None)
        self._spare: list[Tensor] = []

    @property
    def place(self) -> str:
        return "" if self._drafts is None else f"volume {self._drafts.volume}"

    def start(self, sizes: Mapping[str, int]) -> BucketDraft:
        if self._drafts is not None:
            return self._drafts.start(sizes)
        wanted = list(sizes.values())
        if [buffer.numel() for buffer in self._spare] != wanted:
            self._spare = [torch.empty(nbytes, dtype=torch.uint8) for nbytes in wanted]
        return _PutDraft(self._store, list(sizes), self._spare)

    def open(self, spaces: Sequence[Any]) -> OpenBuckets:
        if self._drafts is None:
            raise StoreError("there is no shared memory here to write weights into")
        return self._drafts.open(spaces)

    def read(self, bucket: KeyOrRef, parts: Sequence[range] | None = None) -> list[Tensor]:
        if parts is None:
            return [self._store.get(bucket)]
        values: list[Tensor] = self._store.get_batch([bucket] * len(parts), rows=list(parts))
        return values

    def maps(self, bucket: KeyOrRef) -> bool:
        return self._maps is not None and isinstance(bucket, ObjectRef) and bool(self._maps(bucket))

    def delete(self, buckets: Sequence[KeyOrRef], *, missing_ok: bool = False) -> None:
        self._store.delete_batch(list(buckets), missing_ok=missing_ok)


class _PutDraft:
    """Written in this process's own memory, the same for every version, and put from there."""

    spaces: tuple[()] = ()

    def __init__(self, store: ObjectStore, keys: Sequence[str], buffers: list[Tensor]) -> None:
        self._store, self._keys, self.buffers = store, keys, buffers

    def commit(self) -> Sequence[KeyOrRef]:
        return self._store.put_batch(dict(zip(self._keys, self.buffers, strict=True)))

    def discard(self) -> None:
        """Nothing was put."""

    def close(self) -> None:
        """The buffers stay for the next version."""
