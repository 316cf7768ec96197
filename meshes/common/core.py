"""The core of a backend's container: one process of a group, whatever carries its messages.

    backend ──call──> take ──> WorkerExecutor ──outcome──> backend
            <──request── AttachedRuntime (`current_runtime()` in this process) <──answer──

A backend makes one core in each process, hands it what arrives, and gives it two functions that send.
"""

from __future__ import annotations

import asyncio
import contextvars
import os
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from meshes.common.bootstrap import PARENT_VARIABLE
from meshes.common.machine import machine_id
from neoproto.runtime.attached import AttachedRuntime, attach_process
from neoproto.runtime.backend import ProcessInfo
from neoproto.runtime.executor import CallStatus, Reply, WorkerExecutor
from neoproto.runtime.relay import AttachSpec, Origin, Request
from neoproto.runtime.wire import CallHeader
from neoproto.runtime.worker import Rendezvous, WorkerIdentity
from neoproto.store.base import ObjectStore, set_process_store


@dataclass(frozen=True, kw_only=True, slots=True)
class ContainerSpec:
    """What every container of a group is made with.

    Attributes:
        group_name, nnodes, processes_per_node: the group.
        public: its ranks are on several machines.
        log_dir: the folder of its logs, on every machine.
        attach: what its processes know of the run.
    """

    group_name: str
    nnodes: int
    processes_per_node: int
    public: bool
    log_dir: str
    attach: AttachSpec


class ContainerCore:
    """Hosts one process's worker(s), and makes the process a part of the run.

    Attributes:
        identity: which process of which group this is.
        runtime: takes the root's answers (`on_answer`).
    """

    def __init__(
        self,
        spec: ContainerSpec,
        rank: int,
        attach_store: Callable[[WorkerIdentity], FailableStore] | None,
        send: Callable[[Origin, Request], None],
    ) -> None:
        """Call it on the event loop that runs async methods, where the backend's context is.

        Args:
            spec: the group's.
            rank: this process's.
            attach_store: makes this process's client of the run's store, when that is first used; None if the
                run has no store.
            send: takes a request to the root; does not wait.
        """
        self.identity = WorkerIdentity(
            rank=rank,
            world_size=spec.nnodes * spec.processes_per_node,
            local_rank=rank % spec.processes_per_node,
            node_rank=rank // spec.processes_per_node,
            group_name=spec.group_name,
            log_path=os.path.join(spec.log_dir, f"rank{rank}.log"),
            run_id=spec.attach.run_id,
        )
        self._host = socket.gethostname()
        self._rendezvous = Rendezvous(is_server=rank == 0, public=spec.public)
        self._store = ProcessStore(attach_store, self.identity)
        self._executor = WorkerExecutor(
            self.identity, self._host, self._rendezvous, asyncio.get_running_loop()
        )
        origin = Origin(key=spec.attach.key, rank=rank)
        self.runtime = AttachedRuntime(spec.attach, lambda request: send(origin, request))
        attach_process(self.runtime)

    def take(self, header: CallHeader, payload: bytes, reply: Reply) -> None:
        """Take a call: it has its turn when this returns.

        Args:
            reply: sends the outcome; called once, on any thread.
        """
        self._executor.accept(header, payload, reply)

    def info(self) -> ProcessInfo:
        """Who and where this process is."""
        return ProcessInfo(
            rank=self.identity.rank,
            pid=os.getpid(),
            host=self._host,
            machine=machine_id(),
            parent=int(os.environ.get(PARENT_VARIABLE, "0")),
            rendezvous=self._rendezvous.address,
        )

    def call_status(self, call_id: int) -> CallStatus:
        """What this process does with a call."""
        return self._executor.status(call_id)

    def mesh_places(self, role: str) -> dict[str, tuple[int, bool]]:
        """What the worker has said by `Worker.register_mesh`."""
        return self._executor.meshes(role)

    def break_off(self, reason: str) -> None:
        """Refuse every call from now on."""
        self._executor.break_group(reason)

    def fail_store(self, reason: str) -> None:
        """A process of the store has died: operations fail from now on."""
        self._store.fail(reason)

    async def drain(self, timeout_s: float) -> bool:
        """Wait for the calls before the last one; False if they did not end in time."""
        return await self._executor.drain(timeout_s)

    def close(self) -> None:
        """End what this process asks of the run, and its thread."""
        self.runtime.shut_down("this worker is shutting down")
        self._executor.close()


class FailableStore(ObjectStore, Protocol):
    """A client whose operations fail once a process of the store has died."""

    def fail(self, reason: str) -> None: ...


class ProcessStore:
    """A worker process's client of the store, attached when it is first used."""

    def __init__(
        self, attach: Callable[[WorkerIdentity], FailableStore] | None, identity: WorkerIdentity
    ) -> None:
        """Make it this process's store. Call it where the backend's context is: `attach` runs in that."""
        self._attach, self._identity = attach, identity
        self._context = contextvars.copy_context()
        self._lock = threading.Lock()
        self._client: FailableStore | None = None
        self._failed: str | None = None
        if attach is not None:
            set_process_store(self.client)

    def client(self) -> FailableStore:
        """The client; made by whichever thread is the first, while others wait."""
        assert self._attach is not None
        with self._lock:
            if self._client is None:
                self._client = self._context.copy().run(self._attach, self._identity)
                if self._failed is not None:
                    self._client.fail(self._failed)
            return self._client

    def fail(self, reason: str) -> None:
        """A process of the store has died: operations fail from now on."""
        # Under the lock, so that a client which is just being made learns of it too.
        with self._lock:
            self._failed = reason
            if self._client is not None:
                self._client.fail(reason)
