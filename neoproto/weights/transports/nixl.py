"""Weights by NIXL: pullers read the publisher's memory themselves, over whatever network NIXL finds.

    publisher: slot buffers, registered once ──(address, agent's metadata: in the manifest)──> puller: READ

Nothing tells a reader that a slot was written again meanwhile: leases do. Needs the package `nixl`.
"""

from __future__ import annotations

import importlib
import threading
import time
import uuid
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from neoproto.errors import StoreError
from neoproto.weights.manifest import RemoteMemory
from neoproto.weights.transports import TransportChoice

if TYPE_CHECKING:
    from torch import Tensor

    from neoproto.weights.manifest import BucketRef
    from neoproto.weights.transports import OpenBuckets, UnsealedBuckets

_POLL_S = 0.0002


class NixlTransport:
    """One NIXL agent of this process, for publishing and pulling.

    Args:
        timeout_s: bound on one read.

    Raises:
        StoreError: `nixl` is not installed here, or does not start.
    """

    domain = ""
    """Only this process can write into its slots."""

    def __init__(self, timeout_s: float = 120.0) -> None:
        self._timeout_s = timeout_s
        # One read at a time: `_known` and the remote agents that the NIXL agent has must agree.
        self._lock = threading.Lock()
        self._known: dict[str, bytes] = {}
        self._free: list[Tensor] = []
        self._used: dict[str, Tensor] = {}
        try:
            api: Any = importlib.import_module("nixl._api")
            self._agent = api.nixl_agent(f"neoproto-{uuid.uuid4().hex}", api.nixl_agent_config())
        except Exception as error:
            raise StoreError(f"transport 'nixl' cannot be used: {error}") from error

    def create(self, sizes: Mapping[str, int]) -> UnsealedBuckets:
        return _NixlBuckets(self, list(sizes), [self._buffer(nbytes) for nbytes in sizes.values()])

    def open(self, handles: Sequence[Any]) -> OpenBuckets:
        raise StoreError("weights in NIXL's memory are written by their own process only")

    def read(self, bucket: BucketRef, parts: Sequence[range] | None = None) -> list[Tensor]:
        if not isinstance(bucket, RemoteMemory):
            raise StoreError("these weights were not published with transport 'nixl'")
        import torch

        wanted = [range(bucket.nbytes)] if parts is None else list(parts)
        landing = torch.empty(sum(map(len, wanted)), dtype=torch.uint8)
        found = list(torch.split(landing, [len(one) for one in wanted]))
        if landing.numel():
            with self._lock:
                self._read(bucket, wanted, landing, found)
        return found

    def maps(self, bucket: BucketRef) -> bool:
        return False

    def delete(self, buckets: Sequence[BucketRef], *, missing_ok: bool = False) -> None:
        for bucket in buckets:
            if isinstance(bucket, RemoteMemory) and bucket.key in self._used:
                self._free.append(self._used.pop(bucket.key))
            elif not missing_ok:
                raise StoreError(f"bucket {bucket!r} is not in this process's memory")

    def commit(self, keys: Sequence[str], buffers: Sequence[Tensor]) -> list[RemoteMemory]:
        """Where written buffers can be read."""
        metadata: bytes = self._agent.get_agent_metadata()
        self._used.update(zip(keys, buffers, strict=True))
        return [
            RemoteMemory(
                agent=self._agent.name,
                metadata=metadata,
                key=key,
                address=buffer.data_ptr(),
                nbytes=buffer.numel(),
            )
            for key, buffer in zip(keys, buffers, strict=True)
        ]

    def give_back(self, buffers: Sequence[Tensor]) -> None:
        """Buffers that were not committed."""
        self._free += buffers

    def _buffer(self, nbytes: int) -> Tensor:
        """A registered buffer: one that was used before, or a new one."""
        for at, buffer in enumerate(self._free):
            if buffer.numel() == nbytes:
                return self._free.pop(at)
        import torch

        buffer = torch.empty(nbytes, dtype=torch.uint8)
        self._agent.register_memory([buffer])
        return buffer

    def _read(self, bucket: RemoteMemory, wanted: list[range], landing: Tensor, found: list[Tensor]) -> None:
        agent = self._agent
        if self._known.get(bucket.agent) != bucket.metadata:  # it registered more since
            if bucket.agent in self._known:
                agent.remove_remote_agent(bucket.agent)
            agent.add_remote_agent(bucket.metadata)
            self._known[bucket.agent] = bucket.metadata
        registered = agent.register_memory([landing])
        try:
            remote = [(bucket.address + one.start, len(one), 0) for one in wanted if one]
            local = [(part.data_ptr(), part.numel(), 0) for part in found if part.numel()]
            handle = agent.initialize_xfer(
                "READ",
                agent.get_xfer_descs(local, mem_type="DRAM"),
                agent.get_xfer_descs(remote, mem_type="DRAM"),
                bucket.agent,
            )
            try:
                self._wait(handle, bucket)
            finally:
                agent.release_xfer_handle(handle)
        finally:
            # Last, on every way out: the transfer writes into this memory until its handle is released.
            agent.deregister_memory(registered)

    def _wait(self, handle: Any, bucket: RemoteMemory) -> None:
        until = time.monotonic() + self._timeout_s
        state = self._agent.transfer(handle)
        while state == "PROC" and time.monotonic() < until:
            time.sleep(_POLL_S)
            state = self._agent.check_xfer_state(handle)
        if state != "DONE":
            why = f"did not come within {self._timeout_s} s" if state == "PROC" else "could not be read"
            raise StoreError(f"bucket {bucket.key}: {bucket.nbytes} bytes {why}")


class _NixlBuckets:
    handles: tuple[()] = ()

    def __init__(self, transport: NixlTransport, keys: list[str], buffers: list[Tensor]) -> None:
        self._transport, self._keys, self.buffers = transport, keys, buffers

    def seal(self) -> Sequence[BucketRef]:
        return self._transport.commit(self._keys, self.buffers)

    def abort(self) -> None:
        self._transport.give_back(self.buffers)

    def close(self) -> None:
        """The buffers stay registered."""


CHOICE = TransportChoice(
    name="nixl",
    about="read from the publisher's memory by NIXL (RDMA, NVLink or TCP), a package of its own",
    make=lambda store: NixlTransport(),
    in_store=False,
)
