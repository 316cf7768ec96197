"""How buckets of weights travel. A transport is one file: how it works, and what is known of it (`CHOICE`).

    publisher ──create──> unsealed buckets ──seal──> references ──manifest──> puller ──read──> bytes

A new file here is a new value of `weights.transport`: checks and help follow from its entry. torch and NumPy
are imported inside the functions, as the configuration reads the entries.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from neoproto.choices import Choice, Choices

if TYPE_CHECKING:
    from torch import Tensor

    from neoproto.store import ObjectStore
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


@dataclass(frozen=True, kw_only=True, slots=True)
class TransportChoice(Choice):
    """A way for weights to travel.

    Attributes:
        make: the transport of this process. Raises StoreError where it does not work here.
        in_store: published versions lie in the store's memory; else in that of their publisher.
    """

    make: Callable[[ObjectStore], Transport]
    in_store: bool


TRANSPORTS = Choices(__name__, TransportChoice)


def make_transport(store: ObjectStore, name: str) -> Transport:
    """The transport of that name, one of `TRANSPORTS`.

    Raises:
        StoreError: it does not work in this process: no shared memory, or no NIXL.
    """
    return TRANSPORTS[name].make(store)
