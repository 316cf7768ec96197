"""What workers ask of the run's root, and how the root answers.

    a worker               the root
    AttachedRuntime ──request──> RelayServer.on_request ──> CallTracker.start, or a thread for what blocks
           ▲                          │
           └── answer (number, outcome)

Calls are relayed as they are: neither arguments nor results are unpickled here. All calls of a run pass
through the root's tracker, which gives sync methods one order on all ranks for all senders, and every sender
the same answer on deaths, deadlines and closed groups.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from neoproto.runtime.call_tracker import CallTracker, PendingCall
from neoproto.runtime.deadline import deadline_of
from neoproto.runtime.wire import GroupRef, MethodCall, RemoteFailure, decode, encode, encode_failure

if TYPE_CHECKING:
    from neoproto.runtime.placement import Placement

logger = logging.getLogger(__name__)

Answer = Callable[[RemoteFailure | bytes], None]
"""Sends the outcome of one request back; may be used on any thread."""
Task = Callable[..., Any]
"""What the root does for a worker: `(origin, *args, **kwargs) -> value`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Origin:
    """The worker process that asks: the key of its group, its rank."""

    key: str
    rank: int


@dataclass(frozen=True, kw_only=True, slots=True)
class CallRequest:
    """Run a method of some group.

    Attributes:
        number: the asker's own, for the answer.
        group, call: what to run.
        budget_s: seconds left at sending; None without a deadline.
    """

    number: int
    group: GroupRef
    call: MethodCall
    budget_s: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class CancelRequest:
    """Cancel a call that was asked for under this number."""

    number: int


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskRequest:
    """Have the root do something that takes a while; `payload` is pickled `(args, kwargs)`."""

    number: int
    task: str
    payload: bytes


Request = CallRequest | CancelRequest | TaskRequest


@dataclass(frozen=True, kw_only=True, slots=True)
class AttachSpec:
    """What a worker process knows of the run it belongs to.

    Attributes:
        run_id, run_dir, placement: the run's.
        key: of its group.
    """

    run_id: str
    run_dir: Path
    placement: Placement | None
    key: str


class RelayServer:
    """The root's side."""

    def __init__(self, tracker: CallTracker, tasks: dict[str, Task]) -> None:
        """Serve requests from the first `on_request` on.

        Args:
            tracker: takes the calls.
            tasks: what workers may have done, by name.
        """
        self._tracker, self._tasks = tracker, tasks
        self._relayed: dict[tuple[Origin, int], PendingCall] = {}

    def on_request(self, origin: Origin, request: Request, answer: Answer) -> None:
        """Take a request. Runs on the backend's thread, so what blocks gets a thread of its own."""
        if isinstance(request, TaskRequest):
            threading.Thread(
                target=self._run_task, args=(origin, request, answer), name="neoproto-task", daemon=True
            ).start()
        elif isinstance(request, CancelRequest):
            call = self._relayed.get((origin, request.number))
            if call is not None:
                call.cancel()
        else:
            self._relay(origin, request, answer)

    def _relay(self, origin: Origin, request: CallRequest, answer: Answer) -> None:
        try:
            deadline = deadline_of(request.budget_s)
            call = self._tracker.start(request.group, request.call, deadline, relayed=True)
        except Exception as error:  # noqa: BLE001 - whatever refuses the call is the asker's to know
            answer(state_failure(error))
            return
        known = origin, request.number
        self._relayed[known] = call

        def end(_: Any) -> None:
            self._relayed.pop(known, None)
            answer(_outcome(call))

        call._add_callback(end)

    def _run_task(self, origin: Origin, request: TaskRequest, answer: Answer) -> None:
        outcome: RemoteFailure | bytes
        try:
            args, kwargs = decode(request.payload)
            outcome = encode(self._tasks[request.task](origin, *args, **kwargs))
        except Exception as error:  # noqa: BLE001 - it belongs to the worker that asked
            outcome = state_failure(error)
        try:
            answer(outcome)
        except Exception:
            logger.warning("a worker could not be answered", exc_info=True)


def _outcome(call: PendingCall) -> RemoteFailure | bytes:
    if call._error is not None:
        return state_failure(call._error)
    if isinstance(call._raw, RemoteFailure):
        return call._raw
    return encode(tuple(call._raw.values()))


def state_failure(error: BaseException) -> RemoteFailure:
    """An error of the root, for a worker: without a traceback of the root's insides."""
    return encode_failure(error, "", with_traceback=False)
