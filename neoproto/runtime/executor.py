"""Runs the calls that reach a worker process. Knows no backend: a container feeds it and takes its replies.

accept ──sync──> waiting (by number) ──in order──> queue ──> the worker thread ──> reply
       └─async─> a task of its own on the loop ──────────────────────────────────> reply
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import functools
import math
import os
import queue
import sys
import threading
import time
import traceback
from collections.abc import Callable, Coroutine, Generator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal

from neoproto import trace
from neoproto.errors import CallCancelled, GroupBroken, RuntimeClosed
from neoproto.runtime.deadline import LATE_S, deadline_of, set_deadline
from neoproto.runtime.wire import (
    CANCEL,
    INIT,
    LAST,
    CallHeader,
    RemoteFailure,
    decode,
    encode,
    encode_failure,
)
from neoproto.runtime.worker import Rendezvous, Worker, WorkerIdentity
from neoproto.user_code import end_fork

Reply = Callable[[RemoteFailure | bytes], None]
"""Sends the outcome of one call home; may be used on any thread."""


@dataclass(frozen=True, kw_only=True, slots=True)
class InitArguments:
    """What a worker is built from: the payload of the `INIT` call.

    Attributes:
        classes: role → (class, positional arguments, keyword arguments); role "" is a group's only worker.
        rendezvous: where rank 0 listens.
    """

    classes: dict[str, tuple[type[Worker], tuple[Any, ...], dict[str, Any]]]
    rendezvous: tuple[str, int]


@dataclass(kw_only=True, slots=True, eq=False)
class _SyncCall:
    header: CallHeader
    payload: bytes
    reply: Reply
    context: contextvars.Context
    deadline: float = math.inf
    overrun_at: float = math.inf
    refused: bool = False


_in_method = contextvars.ContextVar("in_method", default=False)
"""Whether an async method of a worker runs, or a task that it started."""


class ContainedTask(Coroutine[Any, Any, Any]):
    """A coroutine whose `SystemExit` and `KeyboardInterrupt` are errors of its task.

    asyncio ends the event loop by them too, and with it everything that the process answers.
    """

    def __init__(self, coroutine: Coroutine[Any, Any, Any]) -> None:
        self._coroutine = coroutine
        self.__qualname__ = getattr(coroutine, "__qualname__", type(coroutine).__qualname__)  # in its repr

    def send(self, value: Any) -> Any:
        return self._contained(self._coroutine.send, value)

    def throw(self, *error: Any) -> Any:
        return self._contained(self._coroutine.throw, *error)

    def close(self) -> None:
        self._coroutine.close()

    def __await__(self) -> Generator[Any, Any, Any]:
        return self._coroutine.__await__()

    @staticmethod
    def _contained(step: Callable[..., Any], *args: Any) -> Any:
        try:
            return step(*args)
        except (SystemExit, KeyboardInterrupt) as error:
            raise _as_exception(error) from error


def contain_exits(loop: asyncio.AbstractEventLoop) -> None:
    """Have tasks that methods start on the loop be `ContainedTask`s."""

    def make(
        loop: asyncio.AbstractEventLoop, coroutine: Coroutine[Any, Any, Any], **options: Any
    ) -> asyncio.Task[Any]:
        work = ContainedTask(coroutine) if _in_method.get() else coroutine
        return asyncio.Task(work, loop=loop, **options)

    if loop.get_task_factory() is None:
        loop.set_task_factory(make)  # type: ignore[arg-type] # typeshed's protocol has no options


def _as_exception(error: BaseException) -> Exception:
    if isinstance(error, Exception):
        return error
    text = f"the worker raised {type(error).__name__}({error})"
    return RuntimeError(text).with_traceback(error.__traceback__)


@dataclass(frozen=True, kw_only=True, slots=True)
class CallStatus:
    """What a silent rank does with a call, and where it is.

    Attributes:
        state: "late" is a call that began after its deadline and is not yet an overrun.
        stack: of the worker thread.
    """

    state: Literal["queued", "late", "running", "unknown"]
    stack: str


@dataclass(kw_only=True, slots=True)
class _State:
    """What the loop, the worker thread and the thread that reads calls share; guarded by the executor's lock.

    Attributes:
        next_turn, waiting: the number of the sync call that is next, and those that came before their turn.
        queued: by id, the sync calls that have not begun.
        unfinished: calls of both kinds that were taken and have not ended.
        running: the sync call that runs.
        broken: why everything is refused.
        admitting: whether more calls may come.
    """

    next_turn: int = 0
    waiting: dict[int, _SyncCall] = field(default_factory=dict)
    queued: dict[int, _SyncCall] = field(default_factory=dict)
    unfinished: int = 0
    running: _SyncCall | None = None
    broken: str | None = None
    admitting: bool = True


class WorkerExecutor:
    """Builds the worker(s) of one process and runs their methods."""

    def __init__(
        self,
        identity: WorkerIdentity,
        host: str,
        rendezvous: Rendezvous,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        """Start the worker thread; the worker is built by the `INIT` call.

        Args:
            identity: which process of which group this is.
            host: its machine, for messages.
            rendezvous: what `Worker.process_store` is made of.
            loop: runs the async methods.
        """
        self.identity = identity
        # Monarch's, among others: what the worker's methods run in.
        self._context = contextvars.copy_context()
        self._where = f"{identity.group_name}[{identity.rank}] on {host}"
        self._rendezvous, self._loop = rendezvous, loop
        contain_exits(loop)
        trace.open_process(f"{identity.group_name}-rank{identity.rank}")
        self._workers: dict[str, Worker] = {}
        self._lock = threading.Lock()
        self._state = _State()
        self._ready: queue.SimpleQueue[_SyncCall | None] = queue.SimpleQueue()
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._thread = threading.Thread(target=self._run_thread, name="neoproto-worker", daemon=True)
        self._thread.start()

    def accept(self, header: CallHeader, payload: bytes, reply: Reply) -> None:
        """Take a call: it has its turn in the order, or its turn on the loop, when this returns."""
        deadline = deadline_of(header.budget_s)
        context = self._context.copy()
        turn = header.turn(self.identity.rank)
        if turn is not None:
            call = _SyncCall(header=header, payload=payload, reply=reply, context=context, deadline=deadline)
            self._enqueue(turn, call)
        elif header.method == LAST:
            with self._lock:
                self._state.admitting = False
        elif header.method == CANCEL:
            # By way of the loop, like the call itself, so that it is not ahead of it.
            self._loop.call_soon_threadsafe(self._cancel, header.call_id)
        elif (refusal := self._refusal()) is not None:
            reply(self._failure(refusal))
        else:
            with self._lock:
                self._state.unfinished += 1
            run = functools.partial(self._start_async, header, payload, reply, deadline)
            self._loop.call_soon_threadsafe(run, context=context)

    def _enqueue(self, turn: int, call: _SyncCall) -> None:
        with self._lock:
            state = self._state
            # Into the thread's queue strictly by turn, whatever the order of arrival: ranks that ran sync
            # calls in different orders would meet in different collectives.
            state.waiting[turn] = state.queued[call.header.call_id] = call
            state.unfinished += 1
            while state.next_turn in state.waiting:
                self._ready.put(state.waiting.pop(state.next_turn))
                state.next_turn += 1
            self._note_overrun()
            overrun = state.broken is not None and state.running is not None
        if overrun:  # its turn may never come
            self._refuse(call)  # without the lock: a reply goes through the backend

    def _refuse(self, call: _SyncCall) -> None:
        """Answer a call ahead of its turn. It keeps its turn, and the thread passes over it."""
        call.refused = True
        call.reply(self._failure(GroupBroken(self._state.broken)))

    def status(self, call_id: int) -> CallStatus:
        """Where a call is, for the deadline's report; marks the group broken if it runs past its deadline."""
        state: Literal["queued", "late", "running", "unknown"]
        with self._lock:
            self._note_overrun()
            running = self._state.running
            if running is not None and running.header.call_id == call_id:
                late = running.deadline < running.overrun_at and time.monotonic() <= running.overrun_at
                state = "late" if late else "running"
            elif call_id in self._state.queued:
                state = "queued"
            else:
                state = "unknown"
        return CallStatus(state=state, stack=self.stack())

    def stack(self) -> str:
        """Where the worker thread is now."""
        frame = sys._current_frames().get(self._thread.ident or -1)
        return "" if frame is None else "".join(traceback.format_stack(frame)).rstrip()

    def break_group(self, reason: str) -> None:
        """Refuse everything from now on."""
        with self._lock:
            self._state.broken = self._state.broken or reason

    async def drain(self, timeout_s: float) -> bool:
        """Wait until the `LAST` call has come and all before it have ended; False if that took too long."""
        until = time.monotonic() + timeout_s
        pause = 0.001
        while self._state.admitting or self._state.unfinished:
            if self._state.broken or time.monotonic() >= until:
                return False
            await asyncio.sleep(pause)
            pause = min(2 * pause, 0.05)
        return True

    def close(self) -> None:
        """Cancel what runs on the loop, end the worker thread once idle, release the rendezvous socket."""
        for task in list(self._tasks.values()):
            task.cancel()
        self._ready.put(None)
        self._rendezvous.close()

    # The worker thread

    def _run_thread(self) -> None:
        while (call := self._ready.get()) is not None:
            outcome = call.context.run(self._run_sync, call)
            with self._lock:
                self._note_overrun()
                self._state.running = None
                self._state.unfinished -= 1
            if not call.refused:
                call.reply(outcome)

    def _run_sync(self, call: _SyncCall) -> RemoteFailure | bytes:
        with self._lock:
            del self._state.queued[call.header.call_id]
            refusal = self._refusal_locked()
            if refusal is None:
                self._state.running = call
                call.overrun_at = call.deadline
                late = (now := time.monotonic()) > call.deadline
                if late:
                    # It runs all the same: a rank that skipped it would part from its peers.
                    call.overrun_at = now + max(call.header.budget_s or 0.0, LATE_S)
        if refusal is not None:
            return self._failure(refusal)
        set_deadline(call.deadline)
        pid, raised = os.getpid(), None
        try:
            if late:
                # Its caller has its answer, and watches it no longer.
                with contextlib.suppress(RuntimeError):  # the loop is closed: nothing waits any more
                    self._loop.call_soon_threadsafe(self._loop.call_at, call.overrun_at, self._end_late, call)
            if call.header.method == INIT:
                with trace.span("start", "call"):
                    self._build(decode(call.payload))
                return encode(None)
            args, kwargs = decode(call.payload)
            with trace.span(call.header.method, "call"):
                result = self._method(call.header)(*args, **kwargs)
            return encode(result)
        except BaseException as error:  # noqa: BLE001 - whatever a worker raises belongs to its caller
            raised = error
            return self._failure(error)
        finally:
            end_fork(pid, raised)

    def _end_late(self, call: _SyncCall) -> None:
        """Refuse what waits behind a call that began late and still runs."""
        with self._lock:
            if self._state.running is not call:
                return
            self._break(call)
            behind = [one for one in self._state.queued.values() if not one.refused]
        for one in behind:
            self._refuse(one)

    def _build(self, init: InitArguments) -> None:
        for role, (cls, args, kwargs) in init.classes.items():
            worker = cls.__new__(cls)
            for name in ("rank", "world_size", "local_rank", "node_rank", "group_name", "log_path"):
                setattr(worker, name, getattr(self.identity, name))
            worker._process_store_factory = lambda: self._rendezvous.store(init.rendezvous)
            worker.__init__(*args, **kwargs)  # type: ignore[misc] # attributes had to be there first
            self._workers[role] = worker

    def meshes(self, role: str) -> dict[str, tuple[int, bool]]:
        """What the worker has registered by `Worker.register_mesh`."""
        return dict(self._workers[role].__dict__.get("_meshes", {}))

    # Async methods, on the loop

    def _start_async(self, header: CallHeader, payload: bytes, reply: Reply, deadline: float) -> None:
        task = self._loop.create_task(self._run_async(header, payload, reply, deadline))
        self._tasks[header.call_id] = task

        def end(_: asyncio.Task[None]) -> None:
            del self._tasks[header.call_id]
            with self._lock:
                self._state.unfinished -= 1
            if task.cancelled():  # before its first step
                reply(self._cancelled(header))

        task.add_done_callback(end)

    async def _run_async(self, header: CallHeader, payload: bytes, reply: Reply, deadline: float) -> None:
        set_deadline(deadline)
        _in_method.set(True)
        outcome: RemoteFailure | bytes
        pid, raised = os.getpid(), None
        try:
            args, kwargs = decode(payload)
            with self._span(header):
                result = await self._method(header)(*args, **kwargs)
            outcome = encode(result)
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            asked = task is None or task.cancelling()
            outcome = self._cancelled(header) if asked else self._failure(error)
        except BaseException as error:  # noqa: BLE001 - whatever a worker raises belongs to its caller
            raised = error
            outcome = self._failure(error)
        end_fork(pid, raised)
        reply(outcome)

    @staticmethod
    def _span(header: CallHeader) -> AbstractContextManager[None]:
        """In the trace. A call without a deadline lasts as long as the run and would cover all others."""
        return nullcontext() if header.budget_s is None else trace.span(header.method, "call")

    def _cancelled(self, header: CallHeader) -> RemoteFailure:
        return self._failure(CallCancelled(f"{header.method} was cancelled"))

    def _cancel(self, call_id: int) -> None:
        """Cancel an async method; calls that are unknown, ended or sync are left alone."""
        task = self._tasks.get(call_id)
        if task is not None:
            task.cancel()

    # Shared

    def _method(self, header: CallHeader) -> Callable[..., Any]:
        worker = self._workers.get(header.role)
        if worker is None:
            raise RuntimeError(
                f"{self._where} has no worker {header.role!r}: its __init__ has not ended, or failed"
            )
        method: Callable[..., Any] = getattr(worker, header.method)
        return method

    def _failure(self, error: BaseException) -> RemoteFailure:
        error = _as_exception(error)
        return encode_failure(error, self._where, broken=isinstance(error, GroupBroken))

    def _refusal(self) -> Exception | None:
        with self._lock:
            self._note_overrun()
            if not self._state.admitting:
                return RuntimeClosed(f"{self._where} is shutting down")
            return self._refusal_locked()

    def _refusal_locked(self) -> Exception | None:
        if self._state.broken is not None:
            return GroupBroken(self._state.broken)
        return None

    def _note_overrun(self) -> None:
        running = self._state.running
        if running is not None and time.monotonic() > running.overrun_at:
            self._break(running)

    def _break(self, overrun: _SyncCall) -> None:
        self._state.broken = self._state.broken or (
            f"{self.identity.group_name} is broken: {overrun.header.method} overran its deadline on rank "
            f"{self.identity.rank}"
        )
