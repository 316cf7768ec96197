"""The rollout engine's thread: many callers, one stepping engine.

    generate(requests) ──command──> ┌──────────────────────────┐
    load(version, …)   ──command──> │ thread: commands, step,   │ ──> each caller's future
    (cancelled caller) ──command──> │         commands, step, … │
                                    └──────────────────────────┘

Everything that touches the engine happens in that thread, so callers may overlap freely: a caller's
requests join the running batch at the next step.
"""

from __future__ import annotations

import asyncio
import contextvars
import itertools
import queue
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from torch import Tensor

from neoproto.data.generation import GenerateRequest, Generation
from neoproto.errors import RolloutError, WeightMismatch
from neoproto.weights import TensorLayout, WeightVersion

T = TypeVar("T")


class StepEngine(Protocol):
    """A generation engine that advances all its requests by one step at a time; not thread-safe."""

    @property
    def busy(self) -> bool:
        """Whether any request is unfinished."""
        ...

    def add(self, request_id: str, request: GenerateRequest) -> None:
        """Admit a request. Raises ValueError for one it can never serve."""
        ...

    def step(self) -> list[tuple[str, Generation]]:
        """Advance; the requests that finished in this step."""
        ...

    def abort(self, request_ids: Sequence[str]) -> None:
        """Drop requests; unknown or finished ones are ignored."""
        ...

    def check_layout(self, layout: Mapping[str, TensorLayout], what: str) -> None:
        """Raise WeightMismatch unless weights of this layout can be loaded."""
        ...

    def load(self, version: WeightVersion, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Replace all weights and forget every cached state of the old ones."""
        ...


@dataclass(eq=False, slots=True)
class _Call:
    """The requests of one `generate`, and what has come back."""

    requests: Mapping[str, GenerateRequest]
    future: Future[list[Generation]] = field(default_factory=Future)
    done: dict[str, Generation] = field(default_factory=dict)


class EngineThread:
    """Owns a `StepEngine` and the only thread that touches it. Implements `Generator`.

    An engine that raised while it stepped or loaded is not used again: calls in flight and all later ones
    raise `RolloutError` with the cause. So a half-loaded set of weights never answers.

    Args:
        build: makes the engine; runs in the thread.

    Raises:
        Whatever `build` raises.
    """

    def __init__(self, build: Callable[[], StepEngine]) -> None:
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._calls: dict[str, _Call] = {}
        self._serial = itertools.count()
        self._failure: BaseException | None = None
        self._closed = False
        self._lock = threading.Lock()
        self._thread_ended = False
        ready: Future[StepEngine] = Future()
        context = contextvars.copy_context()
        self._thread = threading.Thread(
            target=lambda: context.run(self._main, build, ready), name="rollout-engine", daemon=True
        )
        self._thread.start()
        self._engine = ready.result()

    async def generate(self, requests: Sequence[GenerateRequest]) -> list[Generation]:
        """One generation per request, in the order of the requests.

        Cancelling the caller drops its requests from the engine.

        Raises:
            RolloutError: the engine has failed, now or before; or it can never serve one of the requests.
        """
        call = _Call({str(next(self._serial)): request for request in requests})
        self._submit(lambda: self._admit(call))
        try:
            return await asyncio.wrap_future(call.future)
        except asyncio.CancelledError:
            self._submit(lambda: self._drop(call))
            raise

    async def check_layout(self, layout: Mapping[str, TensorLayout], what: str) -> None:
        """Refuse weights that this engine cannot load, before they are read; the engine goes on.

        Raises:
            WeightMismatch: names, shapes or dtypes differ.
            RolloutError: the engine has ended.
        """
        await self._in_thread(lambda: self._engine.check_layout(layout, what))

    async def load(self, version: WeightVersion, tensors: Mapping[str, Tensor]) -> None:
        """Replace the weights between two steps; requests in flight go on with the new ones.

        Args:
            version: what these weights are called from then on.
            tensors: all of them, of a layout that was checked.

        Raises:
            RolloutError, WeightMismatch: loading failed half-way; the engine has ended.
        """
        await self._in_thread(lambda: self._load(version, tensors))

    def close(self, timeout: float = 10.0) -> None:
        """End the thread; calls in flight raise `RolloutError`. Closing twice is a no-op.

        Args:
            timeout: seconds to wait for the running step.
        """
        self._submit(self._stop)
        self._thread.join(timeout)

    def _submit(self, command: Callable[[], None]) -> None:
        """Have the thread run `command`; once it has ended, run it here (it finds the engine closed)."""
        with self._lock:
            if not self._thread_ended:
                self._commands.put(command)
                return
        command()

    async def _in_thread(self, function: Callable[[], T]) -> T:
        future: Future[T] = Future()

        def command() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                self._refuse_if_ended()
                future.set_result(function())
            except Exception as error:  # noqa: BLE001 — handed to the caller, whole
                future.set_exception(error)

        self._submit(command)
        return await asyncio.wrap_future(future)

    def _main(self, build: Callable[[], StepEngine], ready: Future[StepEngine]) -> None:
        """The thread.

        Consumes: commands. Waits for: a command, when no request is unfinished. Produces: results in the
        callers' futures. Unblocked by: any command; `close` sends the last one.
        """
        try:
            engine = build()
        except BaseException as error:  # noqa: BLE001 — handed to the constructor's caller, whole
            ready.set_exception(error)
            return
        ready.set_result(engine)
        while not self._closed:
            self._run_commands(wait=self._failure is not None or not engine.busy)
            if self._failure is None and not self._closed and engine.busy:
                self._step(engine)
        with self._lock:
            self._thread_ended = True
        self._run_commands(wait=False)

    def _run_commands(self, *, wait: bool) -> None:
        try:
            self._commands.get(block=wait)()
            while True:
                self._commands.get_nowait()()
        except queue.Empty:
            return

    def _step(self, engine: StepEngine) -> None:
        try:
            finished = engine.step()
        except BaseException as error:  # noqa: BLE001 — ends the engine, and reaches every caller
            self._fail(error)
            return
        for request_id, generation in finished:
            call = self._calls.pop(request_id, None)
            if call is None:
                continue
            call.done[request_id] = generation
            if len(call.done) == len(call.requests):
                call.future.set_result([call.done[key] for key in call.requests])

    def _admit(self, call: _Call) -> None:
        if not call.future.set_running_or_notify_cancel():
            return
        try:
            self._refuse_if_ended()
            for request_id, request in call.requests.items():
                self._add(request_id, request)
                self._calls[request_id] = call
        except RolloutError as error:
            self._drop(call)
            call.future.set_exception(error)
            return
        if not call.requests:
            call.future.set_result([])

    def _add(self, request_id: str, request: GenerateRequest) -> None:
        try:
            self._engine.add(request_id, request)
        except ValueError as error:
            raise RolloutError(
                f"sample {request.uid}/{request.sample_index} ({len(request.prompt_ids)} prompt tokens, "
                f"up to {request.sampling.max_tokens} new) cannot be generated: {error}"
            ) from error

    def _drop(self, call: _Call) -> None:
        held = [request_id for request_id in call.requests if self._calls.pop(request_id, None)]
        if held and self._failure is None:
            self._engine.abort(held)

    def _load(self, version: WeightVersion, tensors: Mapping[str, Tensor]) -> None:
        try:
            self._engine.load(version, tensors.items())
        except Exception as error:
            self._fail(error)
            if isinstance(error, WeightMismatch | RolloutError):
                raise
            raise RolloutError(
                f"loading weights {version} failed: {type(error).__name__}: {error}; this replica has ended"
            ) from error

    def _fail(self, error: BaseException) -> None:
        self._failure = error
        self._fail_calls()

    def _stop(self) -> None:
        self._closed = True
        self._fail_calls()

    def _fail_calls(self) -> None:
        calls, self._calls = set(self._calls.values()), {}
        for call in calls:
            try:
                self._refuse_if_ended()
            except RolloutError as error:
                call.future.set_exception(error)

    def _refuse_if_ended(self) -> None:
        cause = self._failure
        if cause is not None:
            raise RolloutError(f"the rollout engine has failed: {type(cause).__name__}: {cause}") from cause
        if self._closed:
            raise RolloutError("the rollout engine has been closed")
