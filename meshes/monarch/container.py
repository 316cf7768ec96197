"""The actor in every worker process: hands what arrives on the process's port for calls to the executor."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar, cast

from monarch.actor import Actor, concurrent_endpoint, context

from meshes.common.machine import machine_id
from meshes.monarch import ports
from meshes.monarch.stores import ProcessStore, StoreAccess
from neoproto.engines.monarch import pin_context
from neoproto.engines.monarch_ports import Address
from neoproto.runtime.attached import AttachedRuntime, attach_process
from neoproto.runtime.backend import ProcessInfo
from neoproto.runtime.executor import CallStatus, WorkerExecutor
from neoproto.runtime.relay import AttachSpec, Origin, Request
from neoproto.runtime.wire import CallHeader
from neoproto.runtime.worker import Rendezvous, WorkerIdentity

F = TypeVar("F", bound=Callable[..., Any])


def _endpoint(method: F) -> F:
    return cast(F, concurrent_endpoint(method))


@dataclass(frozen=True, kw_only=True, slots=True)
class ContainerSpec:
    """What every container of a group is made with.

    Attributes:
        group_name, nnodes, processes_per_node: the group.
        public: its ranks are on several machines.
        log_dir: the folder of its logs, on every machine.
        attach: what its processes know of the run.
        requests: where the root's `ports.requests()` is.
    """

    group_name: str
    nnodes: int
    processes_per_node: int
    public: bool
    log_dir: str
    attach: AttachSpec
    requests: Address


def attach(spec: AttachSpec, rank: int, requests: Address) -> AttachedRuntime:
    """Make this process a part of the run: what `current_runtime()` asks for goes to the root's port."""

    origin = Origin(key=spec.key, rank=rank)

    def send(request: Request) -> None:
        ports.send((spec.run_id, ports.replies().address, origin, request), requests)

    runtime = AttachedRuntime(spec, send)
    ports.replies().set_sink(runtime.on_answer)
    attach_process(runtime)
    return runtime


class Container(Actor):  # type: ignore[misc] # Monarch is not typed
    """Hosts one process's worker(s). Names of endpoints keep clear of those of `ActorMesh`."""

    def __init__(self, spec: ContainerSpec, store: StoreAccess) -> None:
        rank = context().actor_instance.rank.rank
        pin_context()
        identity = WorkerIdentity(
            rank=rank,
            world_size=spec.nnodes * spec.processes_per_node,
            local_rank=rank % spec.processes_per_node,
            node_rank=rank // spec.processes_per_node,
            group_name=spec.group_name,
            log_path=os.path.join(spec.log_dir, f"rank{rank}.log"),
            run_id=spec.attach.run_id,
        )
        self._rank = rank
        self._host = socket.gethostname()
        self._rendezvous = Rendezvous(is_server=rank == 0, public=spec.public)
        self._store = ProcessStore(store, identity.node_rank, identity.local_rank)
        self._executor = WorkerExecutor(identity, self._host, self._rendezvous, asyncio.get_running_loop())
        ports.calls().set_sink(self._take)
        self._runtime = attach(spec.attach, rank, spec.requests)

    def _take(self, back: Address, header: CallHeader, payload: bytes) -> None:
        """Take a call off the port."""
        self._executor.accept(
            header, payload, lambda outcome: ports.send((header.call_id, self._rank, outcome), back)
        )

    @_endpoint
    async def hello(self) -> tuple[ProcessInfo, Address]:
        """Who and where this process is, and where it takes calls."""
        info = ProcessInfo(
            rank=self._rank,
            pid=os.getpid(),
            host=self._host,
            machine=machine_id(),
            rendezvous=self._rendezvous.address,
        )
        return info, ports.calls().address

    @_endpoint
    async def call_status(self, call_id: int) -> CallStatus:
        """What this process does with a call."""
        return self._executor.status(call_id)

    @_endpoint
    async def mesh_places(self, role: str) -> dict[str, tuple[int, bool]]:
        """What the worker told `Worker.register_mesh`."""
        return self._executor.meshes(role)

    @_endpoint
    async def break_off(self, reason: str) -> None:
        """Refuse everything from now on."""
        self._executor.break_group(reason)

    @_endpoint
    async def store_failed(self, reason: str) -> None:
        """A process of the store has died."""
        self._store.fail(reason)

    @_endpoint
    async def drain(self, timeout_s: float) -> bool:
        """Wait for the calls before the last one."""
        return await self._executor.drain(timeout_s)

    async def __cleanup__(self, exc: Exception | None) -> None:
        self._runtime.shut_down("this worker is shutting down")
        self._executor.close()

    def _handle_undeliverable_message(self, message: Any) -> bool:
        # The other side is gone; what that means for its calls is judged by whoever watches its process.
        return True
