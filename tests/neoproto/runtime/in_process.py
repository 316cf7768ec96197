"""A backend whose workers are executors in this process: a whole `Runtime`, and no process is started.

Calls, requests and answers are pickled on their way, as between processes; a death is what a test says it is.
"""

from __future__ import annotations

import asyncio
import os
import pickle
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from neoproto.errors import RuntimeClosed
from neoproto.runtime.attached import AttachedRuntime
from neoproto.runtime.backend import (
    BackendOptions,
    GroupRequest,
    OnDeath,
    OnReply,
    OnRequest,
    ProcessInfo,
)
from neoproto.runtime.executor import CallStatus, WorkerExecutor
from neoproto.runtime.relay import Origin, Request
from neoproto.runtime.wire import LAST, CallHeader
from neoproto.runtime.worker import Rendezvous, WorkerIdentity
from neoproto.store import MemoryStore, ObjectStore

WHERE = "tests.neoproto.runtime.in_process:InProcessBackend"
WAIT_S = 10.0


class InProcessBackend:
    """Runs workers as threads.

    Attributes:
        groups: by name, also those that were released.
        events: what was asked of it, in order.
        refuse_start: raised in place of starting a group.
        starting: called with each request before its processes are there.
        latest: the one that was started last.
    """

    latest: InProcessBackend

    def __init__(self) -> None:
        self.groups: dict[str, InProcessGroup] = {}
        self.events: list[str] = []
        self.refuse_start: Exception | None = None
        self.starting: Callable[[GroupRequest], object] = lambda _: None
        self._no_more_starts = threading.Event()

    def start(
        self, options: BackendOptions, on_reply: OnReply, on_death: OnDeath, on_request: OnRequest
    ) -> None:
        self.options, self.on_reply, self.on_death = options, on_reply, on_death
        self._on_request = on_request
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="worker-loop", daemon=True)
        self._thread.start()
        InProcessBackend.latest = self

    def add_cluster(self, name: str, nnodes: int) -> None:
        self.events.append(f"add cluster {name} of {nnodes}")

    def start_store(self) -> ObjectStore:
        self.events.append("start store")
        return MemoryStore()

    def store_processes(self) -> Mapping[str, Sequence[ProcessInfo]]:
        return {"store-volume": [ProcessInfo(rank=0, pid=os.getpid(), host="h", rendezvous=None)]}

    def spawn_group(self, request: GroupRequest, timeout_s: float) -> InProcessGroup:
        self.starting(request)
        if self.refuse_start is not None:
            raise self.refuse_start
        if self._no_more_starts.is_set():
            raise RuntimeClosed("the runtime has been closed")
        group = InProcessGroup(self, request)
        self.groups[request.name] = group
        return group

    def stop_spawning(self) -> None:
        self.events.append("stop spawning")
        self._no_more_starts.set()

    def close_store(self, timeout_s: float) -> None:
        self.events.append("close store")

    def close(self, timeout_s: float) -> None:
        self.events.append("close")
        for group in self.groups.values():
            group.kill()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(WAIT_S)
        self._loop.close()

    # For the groups and the tests

    def executor(self, identity: WorkerIdentity, rendezvous: Rendezvous) -> WorkerExecutor:
        async def make() -> WorkerExecutor:
            return WorkerExecutor(identity, "h", rendezvous, asyncio.get_running_loop())

        return asyncio.run_coroutine_threadsafe(make(), self._loop).result(WAIT_S)

    def drain(self, executor: WorkerExecutor, timeout_s: float) -> bool:
        drained = asyncio.run_coroutine_threadsafe(executor.drain(timeout_s), self._loop)
        return drained.result(timeout_s + WAIT_S)

    def ask_root(self, origin: Origin, request: Request, answer: Callable[[int, int, Any], None]) -> None:
        """A request of a worker, and its answer, by way of pickle."""
        number = request.number

        def back(outcome: Any) -> None:
            answer(number, 0, pickle.loads(pickle.dumps(outcome)))

        self._on_request(origin, pickle.loads(pickle.dumps(request)), back)


class InProcessGroup:
    """The workers of one group.

    Attributes:
        executors: of each rank; None has ended.
        attached: what `current_runtime()` would be in the process of each rank.
        events: what was asked of the group, in order.
        released: set once its processes have been given up.
    """

    native = None

    def __init__(self, backend: InProcessBackend, request: GroupRequest) -> None:
        self.backend, self.request = backend, request
        size = request.pool.world_size
        self.events: list[str] = []
        self.released = threading.Event()
        rendezvous = [Rendezvous(is_server=rank == 0, public=False) for rank in range(size)]
        self.processes = [
            ProcessInfo(rank=rank, pid=os.getpid(), host=socket.gethostname(), rendezvous=one.address)
            for rank, one in enumerate(rendezvous)
        ]
        self.executors: list[WorkerExecutor | None] = [
            backend.executor(
                WorkerIdentity(
                    rank=rank,
                    world_size=size,
                    local_rank=rank,
                    node_rank=0,
                    group_name=request.name,
                    log_path=str(request.log_dir / f"rank{rank}.log"),
                    run_id=request.attach.run_id,
                ),
                one,
            )
            for rank, one in enumerate(rendezvous)
        ]
        self.attached = [self._attach(rank) for rank in range(size)]

    def _attach(self, rank: int) -> AttachedRuntime:
        origin = Origin(key=self.request.key, rank=rank)
        made: AttachedRuntime = AttachedRuntime(
            self.request.attach, lambda request: self.backend.ask_root(origin, request, made.on_answer)
        )
        return made

    def watch(self) -> None:
        self.events.append("watch")

    def send(self, ranks: Sequence[int], header: CallHeader, payload: bytes) -> None:
        for rank in ranks:
            executor = self.executors[rank]
            if executor is not None:
                arrived = pickle.loads(pickle.dumps(header))
                executor.accept(arrived, payload, self._reply(header.call_id, rank))

    def _reply(self, call_id: int, rank: int) -> Callable[[Any], None]:
        return lambda outcome: self.backend.on_reply(call_id, rank, pickle.loads(pickle.dumps(outcome)))

    def statuses(self, ranks: Sequence[int], call_id: int, timeout_s: float) -> dict[int, CallStatus]:
        asked = {rank: self.executors[rank] for rank in ranks}
        return {rank: executor.status(call_id) for rank, executor in asked.items() if executor is not None}

    def stacks(self, ranks: Sequence[int]) -> dict[int, str]:
        return {}

    def meshes(self, role: str, timeout_s: float) -> list[dict[str, tuple[int, bool]]]:
        return [{} if executor is None else executor.meshes(role) for executor in self.executors]

    def break_group(self, ranks: Sequence[int], reason: str) -> None:
        for rank in ranks:
            executor = self.executors[rank]
            if executor is not None:
                executor.break_group(reason)

    def drain(self, ranks: Sequence[int], timeout_s: float) -> bool:
        self.events.append("drain")
        self.send(ranks, CallHeader(call_id=0, role="", method=LAST), b"")
        living = [executor for executor in self.executors if executor is not None]
        return all(self.backend.drain(executor, timeout_s) for executor in living)

    def stop(self, timeout_s: float) -> None:
        self._release("stop")

    def kill(self) -> None:
        self._release("kill")

    def _release(self, event: str) -> None:
        if any(executor is not None for executor in self.executors):
            self.events.append(event)
        for rank in range(len(self.executors)):
            self._end(rank)
        self.released.set()

    def _end(self, rank: int) -> None:
        executor, self.executors[rank] = self.executors[rank], None
        if executor is not None:
            self.attached[rank].shut_down("this worker is shutting down")
            executor.close()

    def die(self, rank: int, cause: str = "signal 9 (SIGKILL)") -> None:
        """A process ends without being asked to: it answers no more, and its death is reported."""
        self._end(rank)
        self.backend.on_death(self.request.key, rank, None)
        self.backend.on_death(self.request.key, rank, cause)
