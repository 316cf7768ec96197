"""How buckets of weights travel: one small interface.

publisher ──create──> unsealed buckets ──seal──> references ──manifest──> puller ──read──> bytes
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor

from neoproto.weights.manifest import BucketRef


class OpenBuckets(Protocol):
    """Memory of buckets, open for writing."""

    @property
    def buffers(self) -> list[Tensor]:
        """One a bucket, uint8 [nbytes], on the CPU; not to be used once it is closed."""
        ...

    def close(self) -> None:
        """Let go of the memory. Closing twice is harmless."""
        ...


class UnsealedBuckets(OpenBuckets, Protocol):
    """Buckets that are being written."""

    @property
    def handles(self) -> Sequence[Any]:
        """What ranks of the same domain open them with."""
        ...

    def seal(self) -> Sequence[BucketRef]:
        """Make them readable."""
        ...

    def abort(self) -> None:
        """Forget them."""
        ...


class Transport(Protocol):
    """Moves buckets from publishers to pullers. All methods may block; `read` is safe from any thread.

    Raises (all methods):
        StoreError: what carries the bytes failed.
    """

    @property
    def domain(self) -> str:
        """Memory domain: ranks of equal domains can open each other's unsealed buckets; "" if none can."""
        ...

    def create(self, sizes: Mapping[str, int]) -> UnsealedBuckets:
        """Memory for buckets: key -> bytes, each > 0."""
        ...

    def open(self, handles: Sequence[Any]) -> OpenBuckets:
        """Open what a rank of the same domain started."""
        ...

    def read(self, bucket: BucketRef, parts: Sequence[range] | None = None) -> list[Tensor]:
        """A bucket, uint8 [nbytes], as the only element; or of each range of bytes its own tensor.

        Raises:
            KeyMissing: the bucket is gone.
        """
        ...

    def maps(self, bucket: BucketRef) -> bool:
        """Whether reading a whole bucket costs nothing until its bytes are touched."""
        ...

    def delete(self, buckets: Sequence[BucketRef], *, missing_ok: bool = False) -> None:
        """Delete buckets that this rank committed.

        Raises:
            KeyMissing, StoreError: one is gone already, unless that is fine.
        """
        ...
