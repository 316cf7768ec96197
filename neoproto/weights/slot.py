"""The buckets of one version while its ranks write them.

reserve (leader of each memory domain) ──handles──> open, write (every rank) ──> commit (the same leaders)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from neoproto.weights.manifest import BucketRef, parse_dtype, piece_view
from neoproto.weights.packing import PackingPlan, ShardWrite
from neoproto.weights.peers import Peers, on_all_ranks
from neoproto.weights.pinning import Pins
from neoproto.weights.sharding import local_tensor, whole_tensor
from neoproto.weights.transport import OpenBuckets, Transport, UnsealedBuckets


class SlotWriter:
    """One rank's part in writing one version.

    Args:
        prefix: first part of the buckets' keys.
    """

    def __init__(
        self, transport: Transport, plan: PackingPlan, peers: Peers, pins: Pins, prefix: str
    ) -> None:
        self._transport, self._plan, self._peers, self._pins = transport, plan, peers, pins
        domain = plan.domains[peers.rank]
        self._leader = plan.domains.index(domain)
        own = [index for index, bucket in enumerate(plan.buckets) if bucket.domain == domain]
        self._position = {index: position for position, index in enumerate(own)}
        self._sizes = {f"{prefix}/{index}": plan.buckets[index].nbytes for index in own}
        self._unsealed: UnsealedBuckets | None = None
        self._committed: Sequence[BucketRef] = ()

    @property
    def committed(self) -> Sequence[BucketRef]:
        """The buckets that this rank committed, and has to delete."""
        return self._committed

    @property
    def _is_leader(self) -> bool:
        """Whether this rank, the first of its memory domain, reserves and commits for it."""
        return self._leader == self._peers.rank

    def write(self, named_tensors: Mapping[str, Tensor]) -> None:
        """Reserve the slot and fill it; when this returns every rank's bytes are in place. Collective.

        Raises:
            StoreError: on every rank, if the slot could not be reserved or opened on one.
        """
        handles = on_all_ranks(self._peers, self._reserve)[self._leader]
        on_all_ranks(self._peers, lambda: self._open_and_fill(handles, named_tensors))

    def commit(self) -> tuple[BucketRef, ...]:
        """Make the buckets readable; returns all, in the plan's order. Collective."""
        buckets: dict[int, BucketRef] = {}
        for committed in on_all_ranks(self._peers, self._commit):
            buckets.update(committed)
        return tuple(buckets[index] for index in range(len(self._plan.buckets)))

    def undo(self) -> None:
        """Leave nothing of what this rank reserved or committed. Not collective."""
        if self._unsealed is not None:
            self._unsealed.abort()
            self._unsealed = None
        if self._committed:
            self._transport.delete(self._committed, missing_ok=True)
            self._committed = ()

    def _reserve(self) -> Sequence[object]:
        if not (self._is_leader and self._sizes):
            return ()
        self._unsealed = self._transport.create(self._sizes)
        return tuple(self._unsealed.handles)

    def _open_and_fill(self, handles: Sequence[object], named_tensors: Mapping[str, Tensor]) -> None:
        opened: OpenBuckets | None = self._unsealed
        if opened is None and handles:
            opened = self._transport.open(handles)
        try:
            self._fill([] if opened is None else opened.buffers, named_tensors)
        finally:
            if opened is not None and opened is not self._unsealed:
                opened.close()

    def _fill(self, buffers: list[Tensor], named_tensors: Mapping[str, Tensor]) -> None:
        """Copy this rank's parts, cast on the way; copies from devices are complete on return."""
        writes = {write.source: write for write in self._plan.writes[self._peers.rank]}
        devices: set[torch.device] = set()
        for index in sorted(writes.keys() | set(self._plan.gathered)):
            tensor = named_tensors[self._plan.names[index]]
            part = whole_tensor(tensor) if index in self._plan.gathered else local_tensor(tensor)
            if index in writes:
                buffer = buffers[self._position[writes[index].piece.bucket]]
                if part.device.type != "cpu":
                    devices.add(part.device)
                    self._pins.pin(buffer)
                _target(buffer, writes[index]).copy_(part, non_blocking=True)
        for device in devices:
            torch.get_device_module(device).synchronize(device)

    def _commit(self) -> dict[int, BucketRef]:
        if self._unsealed is None:
            return {}
        self._committed = self._unsealed.seal()
        self._unsealed = None
        return dict(zip(self._position, self._committed, strict=True))


def _target(buffer: Tensor, write: ShardWrite) -> Tensor:
    """Where a rank's part goes: a view of the bucket."""
    whole = piece_view(buffer, parse_dtype(write.dtype), write.piece)
    return write.box.inside(write.piece.box).of(whole)
