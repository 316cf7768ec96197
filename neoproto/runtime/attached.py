"""What `current_runtime()` is in a worker process: calls, groups and pools by way of the run's root.

RelayedLink, create_worker_group, … ──request──> root     on_answer (backend's thread) ──settle──> RemoteCall
"""

from __future__ import annotations

import functools
import itertools
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NoReturn

from neoproto.errors import CallCancelled, DeadlineExceeded, RuntimeClosed
from neoproto.runtime.base import RuntimeBase
from neoproto.runtime.call import RemoteCall
from neoproto.runtime.call_tracker import Submission
from neoproto.runtime.deadline import DeadlineWatch
from neoproto.runtime.display import call_facts
from neoproto.runtime.group import WorkerGroup, method_tables
from neoproto.runtime.links import Link, set_finder
from neoproto.runtime.placement import DeviceType
from neoproto.runtime.pool import ResourcePool
from neoproto.runtime.reaper import Reaper
from neoproto.runtime.relay import AttachSpec, CallRequest, CancelRequest, Request, TaskRequest
from neoproto.runtime.wire import RemoteFailure, decode, decode_failure, encode
from neoproto.runtime.worker import ClassWithInitArgs

GRACE_S = 5.0
"""The root reports a deadline; if its word has not come this long after it, the call ends here."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CreatedGroup:
    """What the root answers when it has made a group for a worker."""

    key: str
    name: str
    world_size: int


class AttachedRuntime(RuntimeBase):
    """A worker's part in the run. Its groups end with it; the run and its store are not its to close."""

    def __init__(self, spec: AttachSpec, send: Callable[[Request], None]) -> None:
        """Args:
        send: takes a request to the root; does not wait.
        """
        super().__init__(spec.run_id, spec.run_dir, spec.placement)
        self._send = send
        self._pending: dict[int, RelayedCall] = {}
        self._numbers = itertools.count(1)
        self._watch = DeadlineWatch()
        self._watched = 0
        self._reaper = Reaper(lambda key: self._close_group(key, 5.0))
        self._closed: str | None = None

    def create_resource_pool(
        self,
        nnodes: int = 1,
        processes_per_node: int = 1,
        device_type: DeviceType = "cpu",
        on: Literal["cluster", "controller"] = "cluster",
        name: str | None = None,
    ) -> ResourcePool:
        """See `Runtime.create_resource_pool`."""
        pool: ResourcePool = self._ask(
            "create_resource_pool", nnodes, processes_per_node, device_type, on, name
        )
        return pool

    def create_worker_group(
        self,
        workers: ClassWithInitArgs | Mapping[str, ClassWithInitArgs],
        on: ResourcePool,
        name: str | None = None,
        timeout: float | None = None,
    ) -> WorkerGroup:
        """See `Runtime.create_worker_group`. The group ends with this worker process at the latest."""
        tables = method_tables(workers)
        self._reaper.start()
        ticket: CreatedGroup = self._ask("create_worker_group", workers, on, name, timeout)
        link = RelayedLink(self, ticket.key, ticket.name, ticket.world_size)
        return WorkerGroup(link, tables, on, self._close_group, self._reaper.enqueue)

    def close(self) -> NoReturn:
        """Refused: a run is closed by the process that made it.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError("a worker cannot close the run: only the process that made the Runtime can")

    # What follows is for the runtime itself.

    def find_link(self, key: str, name: str, world_size: int) -> Link:
        """The way to a group that arrived here by pickle."""
        return RelayedLink(self, key, name, world_size)

    def start(self, call: RelayedCall, request: CallRequest | TaskRequest) -> None:
        """Register and send.

        Raises:
            RuntimeClosed: this process is shutting down.
        """
        if self._closed is not None:
            raise RuntimeClosed(self._closed)
        self._pending[request.number] = call
        try:
            self._send(request)
        except BaseException:
            self._pending.pop(request.number, None)
            raise
        if call.deadline != math.inf:
            self._watch.add(call.deadline + GRACE_S, functools.partial(self._expire, request.number))
            self._watched += 1
            if self._watched > 2 * len(self._pending) + 1024:
                self._watched = len(self._pending)
                self._watch.prune(lambda expiry: expiry.args[0] in self._pending)  # type: ignore[attr-defined]

    def next_number(self) -> int:
        """A number for a request."""
        return next(self._numbers)

    def cancel(self, number: int) -> None:
        """Have the root cancel a call; its answer is awaited no longer."""
        self._pending.pop(number, None)
        self._send(CancelRequest(number=number))

    def on_answer(self, number: int, _: int, outcome: RemoteFailure | bytes) -> None:
        """The root has answered. Runs on the backend's thread."""
        call = self._pending.pop(number, None)
        if call is not None:
            call._settle(outcome)

    def shut_down(self, reason: str) -> None:
        """End what is under way; nothing is asked of the root any more."""
        self._closed = reason
        for number in list(self._pending):
            call = self._pending.pop(number, None)
            if call is not None:
                call._settle(error=RuntimeClosed(reason))
        self._watch.close()
        self._reaper.close(0.0)

    def _ask(self, task: str, *args: Any) -> Any:
        number = self.next_number()
        call = RelayedCall(self, number, task, "the controller", (), math.inf, decode)
        self.start(call, TaskRequest(number=number, task=task, payload=encode((args, {}))))
        return call.result()

    def _close_group(self, key: str, drain_s: float) -> None:
        if self._closed is None:
            self._ask("close_worker_group", key, drain_s)

    def _expire(self, number: int) -> None:
        call = self._pending.pop(number, None)
        if call is not None:
            elapsed = call.deadline - call.submitted
            call._settle(error=DeadlineExceeded(call.method, call.group_name, call.ranks, elapsed))


class RelayedCall(RemoteCall[Any]):
    """A call under way through the root."""

    def __init__(
        self,
        runtime: AttachedRuntime,
        number: int,
        method: str,
        group_name: str,
        ranks: Sequence[int],
        deadline: float,
        convert: Callable[[bytes], Any],
        keeps: object = None,
    ) -> None:
        super().__init__(self._decoded)
        self.method, self.group_name, self.ranks = method, group_name, tuple(ranks)
        self.deadline, self.submitted = deadline, time.monotonic()
        self._runtime, self._number, self._decode, self._keeps = runtime, number, convert, keeps

    def _title(self) -> str:
        return f"RemoteCall {self.group_name}.{self.method}"

    def _facts(self) -> dict[str, str]:
        return call_facts(
            state=self._state(),
            ranks=self.ranks,
            answered=None,
            deadline=self.deadline,
            ended=self._settled,
        )

    def cancel(self) -> bool:
        if not self._settle(error=CallCancelled(f"{self.group_name}.{self.method} was cancelled")):
            return False
        self._runtime.cancel(self._number)
        return True

    def _settle(self, raw: Any = None, error: BaseException | None = None) -> bool:
        settled = super()._settle(raw, error)
        self._keeps = None
        return settled

    def _decoded(self, raw: RemoteFailure | bytes) -> Any:
        if isinstance(raw, RemoteFailure):
            raise decode_failure(raw)
        return self._decode(raw)


class RelayedLink:
    """To a group that the root owns: it arrived by pickle, or was made for this worker. Retains nothing."""

    def __init__(self, runtime: AttachedRuntime, key: str, name: str, world_size: int) -> None:
        self.key, self.name, self.world_size = key, name, world_size
        self._runtime = runtime

    @property
    def native(self) -> NoReturn:
        raise RuntimeError(
            f"the backend's handle on {self.name} is with the controller, which owns its processes"
        )

    def start(self, submission: Submission) -> RemoteCall[Any]:
        number = self._runtime.next_number()
        collect, deadline = submission.collect, submission.deadline
        call = RelayedCall(
            self._runtime,
            number,
            submission.method,
            self.name,
            submission.ranks,
            deadline,
            lambda raw: collect([decode(result) for result in decode(raw)]),
            submission.keeps,
        )
        request = CallRequest(
            number=number,
            key=self.key,
            name=self.name,
            role=submission.role,
            method=submission.method,
            sends=tuple((tuple(some), payload) for some, payload in submission.sends),
            is_async=submission.is_async,
            budget_s=None if deadline == math.inf else deadline - time.monotonic(),
        )
        self._runtime.start(call, request)
        return call

    def mesh_ranks(self, role: str) -> Sequence[dict[str, tuple[int, bool]]]:
        ranks_in_mesh: Sequence[dict[str, tuple[int, bool]]] = self._runtime._ask(
            "mesh_ranks", self.key, role
        )
        return ranks_in_mesh


_attached: AttachedRuntime | None = None
_attach_lock = threading.Lock()


def attach_process(runtime: AttachedRuntime) -> None:
    """Make `runtime` what `current_runtime()` is in this process, for good."""
    global _attached
    with _attach_lock:
        _attached = runtime
        set_finder(runtime.find_link)


def attached_runtime() -> AttachedRuntime | None:
    """The worker's runtime, if this process is a worker."""
    return _attached
