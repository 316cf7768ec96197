"""What `current_runtime()` is in a worker process: calls, groups and pools by way of the run's root.

start, create_worker_group, … ──request──> RelayServer of the root (relay.py)
                                              │
RelayedCall <──settle── on_answer <──answer───┘   on the backend's thread
"""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NoReturn

from neoproto.errors import RuntimeClosed
from neoproto.runtime.base import RuntimeBase
from neoproto.runtime.call import GroupCall
from neoproto.runtime.deadline import RELAY_GRACE_S, DeadlineWatch, budget
from neoproto.runtime.group import WorkerGroup, method_tables, set_caller
from neoproto.runtime.placement import DeviceType
from neoproto.runtime.pool import ResourcePool
from neoproto.runtime.reaper import Reaper
from neoproto.runtime.relay import AttachSpec, CallRequest, CancelRequest, Request, TaskRequest
from neoproto.runtime.wire import GroupRef, MethodCall, RemoteFailure, decode, decode_failure, encode
from neoproto.runtime.worker import ClassWithInitArgs


class AttachedRuntime(RuntimeBase):
    """A worker's part in the run. Its groups end with it; the run and its store are not its to close."""

    def __init__(self, spec: AttachSpec, send: Callable[[Request], None]) -> None:
        """Attach to a run; asks for nothing yet.

        Args:
            spec: what is known of the run.
            send: takes a request to the root; does not wait.
        """
        super().__init__(spec.run_id, spec.run_dir, spec.placement)
        self._send = send
        self._pending: dict[int, RelayedCall] = {}
        self._numbers = itertools.count(1)
        self._watch = DeadlineWatch(self._pending.__contains__)
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
        ref: GroupRef = self._ask("create_worker_group", workers, on, name, timeout)
        return WorkerGroup(self, ref, tables, on, self._close_group, self._reaper.enqueue)

    def close(self) -> NoReturn:
        """Refused: a run is closed by the process that made it.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError("a worker cannot close the run: only the process that made the Runtime can")

    # What follows is for the runtime itself.

    def start(
        self,
        group: GroupRef,
        call: MethodCall,
        deadline: float,
        collect: Callable[[list[Any]], Any],
        keep_alive: object = None,
    ) -> RelayedCall:
        """See `Caller.start`."""
        number = next(self._numbers)
        relayed = RelayedCall(
            self,
            number,
            group.name,
            call.method,
            call.ranks,
            deadline,
            lambda raw: collect([decode(result) for result in decode(raw)]),
            keep_alive,
        )
        request = CallRequest(number=number, group=group, call=call, budget_s=budget(deadline))
        self._request(relayed, request)
        return relayed

    def mesh_ranks(self, group: GroupRef, role: str) -> Sequence[Mapping[str, tuple[int, bool]]]:
        """See `Caller.mesh_ranks`."""
        ranks: Sequence[dict[str, tuple[int, bool]]] = self._ask("mesh_ranks", group, role)
        return ranks

    def native(self, group: GroupRef) -> NoReturn:
        """See `Caller.native`."""
        raise RuntimeError(
            f"the backend's handle on {group.name} is with the controller, which owns its processes"
        )

    def state(self, _: GroupRef) -> None:
        """See `Caller.state`."""

    def _request(self, call: RelayedCall, request: CallRequest | TaskRequest) -> None:
        if self._closed is not None:
            raise RuntimeClosed(self._closed)
        # Registered before it is sent: the answer may come before `_send` returns.
        self._pending[request.number] = call
        try:
            self._send(request)
        except BaseException:
            self._pending.pop(request.number, None)
            raise
        if call.deadline != math.inf:
            self._watch.add(call.deadline + RELAY_GRACE_S, self._expire, request.number)

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
        number = next(self._numbers)
        call = RelayedCall(self, number, "the controller", task, (), math.inf, decode, None)
        self._request(call, TaskRequest(number=number, task=task, payload=encode((args, {}))))
        return call.result()

    def _close_group(self, key: str, drain_s: float) -> None:
        if self._closed is None:
            self._ask("close_worker_group", key, drain_s)

    def _expire(self, number: int) -> None:
        call = self._pending.pop(number, None)
        if call is not None:
            call._settle(error=call.deadline_error(call.ranks))


class RelayedCall(GroupCall):
    """A call under way through the root."""

    def __init__(
        self,
        runtime: AttachedRuntime,
        number: int,
        group_name: str,
        method: str,
        ranks: Sequence[int],
        deadline: float,
        decode_results: Callable[[bytes], Any],
        keep_alive: object,
    ) -> None:
        super().__init__(group_name, method, ranks, deadline, self._decode, keep_alive)
        self._runtime, self._number, self._decode_results = runtime, number, decode_results

    def cancel(self) -> bool:
        if not self._settle(error=self.cancelled_error()):
            return False
        self._runtime.cancel(self._number)
        return True

    def _decode(self, raw: RemoteFailure | bytes) -> Any:
        if isinstance(raw, RemoteFailure):
            raise decode_failure(raw)
        return self._decode_results(raw)


_attached: AttachedRuntime | None = None
_attach_lock = threading.Lock()


def attach_process(runtime: AttachedRuntime) -> None:
    """Make `runtime` what `current_runtime()` is in this process, for good."""
    global _attached
    with _attach_lock:
        _attached = runtime
        set_caller(runtime)


def attached_runtime() -> AttachedRuntime | None:
    """The worker's runtime, if this process is a worker."""
    return _attached
