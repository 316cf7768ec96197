"""Publishes a model's tensors as one version: every rank writes its own part, straight into the slot.

    every rank                     the leader of each memory domain       rank 0
    ──────────                     ────────────────────────────────       ──────
                                                                          make room: retire, wait, delete
    describe ──> plan
                                   reserve the slot ──spaces──┐
    copy + cast into the slot <───────────────────────────────┘
    fence
                                   commit ──references──┐
                                                        └───────────────> manifest ──> registry

One pass over the weights, no rank holds more than its part, and a failure anywhere ends all ranks alike with
nothing of the version left.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from neoproto.errors import WeightsInUse
from neoproto.store import ObjectStore
from neoproto.weights.manifest import BucketRef, Manifest, parse_dtype, piece_view
from neoproto.weights.options import WeightOptions
from neoproto.weights.packing import PackingPlan, RankLayout, ShardWrite, describe, plan_packing
from neoproto.weights.peers import Alone, Peers, on_all_ranks
from neoproto.weights.pinning import Pins
from neoproto.weights.registry import LeaseInfo
from neoproto.weights.sharding import local_tensor, whole_tensor
from neoproto.weights.transports import OpenBuckets, Transport, UnsealedBuckets, make_transport
from neoproto.weights.version import WeightVersion


class Announcements(Protocol):
    """Where a publisher announces its versions; blocks. `actors.weight_registry.GroupRegistry` is one."""

    def announce(self, manifest: Manifest) -> None:
        """Let the version be acquired."""
        ...

    def withdraw(self, version: WeightVersion, timeout: float) -> tuple[LeaseInfo, ...]:
        """Refuse new leases on the version, and wait until its leases have ended.

        Returns:
            (), and its bytes may go; or, when `timeout` seconds passed first, the leases that are left.
        """
        ...


class Publisher:
    """Publishes versions of one model and deletes them again.

    Every rank that holds a part of a sharded model has one; all methods are collective.

    Args:
        store: where the bytes go.
        registry: where rank 0 announces versions; None: nowhere, the manifest is handed on.
        options: see there.
        prefix: first part of the store keys; two publishers on one store need different ones.
        peers: the ranks that publish together.
    """

    def __init__(
        self,
        store: ObjectStore,
        registry: Announcements | None = None,
        options: WeightOptions | None = None,
        *,
        prefix: str = "weights",
        peers: Peers | None = None,
    ) -> None:
        self._prefix, self._peers = prefix, peers or Alone()
        self._registry = registry
        self._options = options or WeightOptions()
        self._transport: Transport = make_transport(store, self._options.transport)
        self._domain = self._transport.domain or f"rank {self._peers.rank}"
        self._pins = Pins()
        dtype = self._options.rollout_dtype
        self._rollout_dtype = None if dtype is None else parse_dtype(dtype)
        self._planned: tuple[RankLayout, PackingPlan] | None = None
        self._live: dict[WeightVersion, Sequence[BucketRef]] = {}
        self._newest: WeightVersion | None = None

    @property
    def live(self) -> tuple[WeightVersion, ...]:
        """Versions published and not deleted, oldest first."""
        return tuple(sorted(self._live))

    @torch.no_grad()
    def publish(
        self, version: WeightVersion, named_tensors: Mapping[str, Tensor], *, timeout: float = 60.0
    ) -> Manifest:
        """Store the tensors as `version` and announce it; every byte is readable when this returns.

        If all slots are taken, the oldest version is retired first, and deleted when its last lease ends.

        Args:
            named_tensors: plain tensors of any device, the same on all ranks, or DTensors.
            timeout: seconds to wait for leases on the oldest version.

        Raises:
            ValueError: `version` is not newer than the last one published here, or there are no tensors.
            WeightsInUse: the oldest version is still being read; names the holders. It stays retired.
            WeightMismatch: the ranks do not hold the same model; names what differs.
            StoreError: the store refused the bytes; nothing of this version remains.
        """
        if self._newest is not None and version <= self._newest:
            raise ValueError(f"weights {version} cannot be published after {self._newest}")
        if not named_tensors:
            raise ValueError(f"weights {version} have no tensors")
        while len(self._live) >= self._options.num_slots:
            self.retire(self.live[0], timeout=timeout)
        plan = self._plan(named_tensors)
        slot = SlotWriter(self._transport, plan, self._peers, self._pins, f"{self._prefix}/{version}")
        try:
            # Every byte is in place on every rank, then readable, and only then announced.
            slot.write(named_tensors)
            manifest = Manifest(
                version=version,
                entries=plan.entries,
                buckets=slot.commit(),
                bucket_bytes=tuple(bucket.nbytes for bucket in plan.buckets),
            )
            self._on_rank_0(lambda registry: registry.announce(manifest))
        except BaseException:
            slot.undo()
            raise
        self._live[version] = slot.committed
        self._newest = version
        return manifest

    def retire(self, version: WeightVersion, *, timeout: float = 60.0) -> None:
        """Retire a version, wait for its leases to end, and delete its bytes.

        Raises:
            ValueError: `version` was never published here, or is deleted already.
            WeightsInUse: `timeout` seconds passed first; names the holders. It stays retired.
        """
        if version not in self._live:
            known = ", ".join(map(str, self.live)) or "none"
            raise ValueError(f"weights {version} are not published here; published: {known}")

        def withdraw(registry: Announcements) -> None:
            leases = registry.withdraw(version, timeout)
            if leases:
                raise WeightsInUse(version, [str(lease) for lease in leases], timeout)

        # The order is the protocol: once this returns no lease lives, and only then do the bytes go.
        self._on_rank_0(withdraw)
        own = self._live.pop(version)
        on_all_ranks(self._peers, lambda: self._transport.delete(own))

    def _on_rank_0(self, work: Callable[[Announcements], None]) -> None:
        """What rank 0 does with the registry, if there is one; if it fails, all ranks fail. Collective."""
        registry = self._registry if self._peers.rank == 0 else None
        on_all_ranks(self._peers, lambda: None if registry is None else work(registry))

    def _plan(self, named_tensors: Mapping[str, Tensor]) -> PackingPlan:
        """The plan of the last version if no rank's layout has changed, else a new one."""
        layout = describe(named_tensors, rollout_dtype=self._rollout_dtype, domain=self._domain)
        known = self._planned is not None and self._planned[0] == layout
        if not all(self._peers.exchange(known)):
            layouts = self._peers.exchange(layout)
            plan = plan_packing(layouts, bucket_bytes=self._options.bucket_bytes)
            self._planned = (layout, plan)
        assert self._planned is not None
        return self._planned[1]


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
        # Two exchanges: no rank opens memory that its leader has not reserved, and none commits before the
        # last one has written.
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
        # Copies from devices are under way until here; the version must not be announced before they end.
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
