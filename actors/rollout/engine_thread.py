"""The rollout engine's thread: many callers, one stepping engine.

    generate(requests) ──gate──command──> ┌───────────────────────────┐
    pause, load, resume ───────command──> │ thread: commands, step,   │ ──> each caller's future
    (cancelled caller) ────────command──> │         commands, step, … │
                                          └───────────────────────────┘

Everything that touches the engine happens in that thread, so callers may overlap freely: a caller's
requests join the running batch at the next step. `pause` closes the gate, for new requests, and then stops
the stepping; what was in flight continues after `resume`.
"""

from __future__ import annotations

import asyncio
import contextvars
import dataclasses
import importlib
import itertools
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, TypeVar

from torch import Tensor

from actors.rollout.continuation import Partial, continued, joined
from actors.rollout.engine import EngineTimes, RolloutEngine, StepEngine
from actors.rollout.options import EngineOptions
from neoproto.data.generation import GenerateRequest, Generation
from neoproto.errors import EngineFailed, RolloutError, WeightMismatch
from neoproto.rollout.engines import ENGINES
from neoproto.weights import TensorLayout, WeightVersion
from neoproto.weights.agent import run_to_end
from neoproto.weights.options import PauseMode

T = TypeVar("T")


def build_engine(options: EngineOptions) -> RolloutEngine:
    """The engine that `options` names, made in this process.

    Raises:
        RolloutError: it does not take the model or the options.
    """
    kind = ENGINES[options.rollout.name]
    module, _, name = kind.engine.partition(":")

    def build() -> Any:
        return getattr(importlib.import_module(module), name)(options)  # vLLM, say: the controller must not

    return EngineThread(build) if kind.in_process else build()


@dataclass(eq=False, slots=True)
class _Call:
    """The requests of one `generate`, and what has come back."""

    requests: Mapping[str, GenerateRequest]
    future: Future[list[Generation]] = field(default_factory=Future)
    done: dict[str, Generation] = field(default_factory=dict)


class EngineThread:
    """Owns a `StepEngine` and the only thread that touches it: a `RolloutEngine`.

    An engine that raised while it stepped or loaded is not used again: calls in flight and all later ones
    raise `EngineFailed` with the cause, or `RolloutError` where another engine would not do better. So a
    half-loaded set of weights never answers.

    Its coroutines belong to one event loop.

    Args:
        build: makes the engine; runs in the thread.

    Raises:
        Whatever `build` raises.
    """

    def __init__(self, build: Callable[[], StepEngine]) -> None:
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._calls: dict[str, _Call] = {}
        self._partials: dict[str, Partial] = {}
        self._interrupted: dict[str, GenerateRequest] = {}
        self._serial = itertools.count()
        self._version = WeightVersion(epoch=0, n=0)
        self._times = EngineTimes()
        self._gate: Future[None] | None = None
        self._drained: Future[None] | None = None
        self._frozen_since: float | None = None
        self._failure: BaseException | None = None
        self._closed = False
        # For the last look at the commands: without it one could be queued after the thread has ended, and
        # its caller would wait for ever. The gate is the event loop's; all else is the thread's, and
        # the loop reads only the version and the times.
        self._lock = threading.Lock()
        self._thread_ended = False
        ready: Future[StepEngine] = Future()
        context = contextvars.copy_context()
        self._thread = threading.Thread(
            target=lambda: context.run(self._main, build, ready), name="rollout-engine", daemon=True
        )
        self._thread.start()
        self._engine = ready.result()

    @property
    def version(self) -> WeightVersion:
        """The weights that are served; 0.0, those the engine was built with, before the first load."""
        return self._version

    @property
    def times(self) -> EngineTimes:
        """How long it stood still, and loaded."""
        return self._times

    async def generate(self, requests: Sequence[GenerateRequest]) -> list[Generation]:
        """One generation per request, in the order of the requests.

        Waits while the engine is paused. Cancelling the caller drops its requests from the engine.

        Raises:
            RolloutError: the engine has failed, now or before; or it can never serve one of the requests.
        """
        await self.wait_open()
        call = _Call({str(next(self._serial)): request for request in requests})
        self._submit(lambda: self._admit(call))
        try:
            return await asyncio.wrap_future(call.future)
        except asyncio.CancelledError:
            self._submit(lambda: self._drop(call))
            raise

    async def wait_open(self) -> None:
        """Wait until the engine is not paused; it stays so until the caller awaits something else.

        So what is then asked of it at once begins on the `version` of that moment.
        """
        while (gate := self._gate) is not None:
            await asyncio.shield(asyncio.wrap_future(gate))

    async def check_layout(self, layout: Mapping[str, TensorLayout], what: str) -> None:
        """Refuse weights that this engine cannot load, before they are read; the engine continues.

        Raises:
            WeightMismatch: names, shapes or dtypes differ.
            RolloutError: the engine has ended.
        """
        await self._in_thread(lambda: self._engine.check_layout(layout, what))

    async def pause(self, mode: PauseMode, drain_s: float) -> None:
        """Stop stepping. New requests wait from now on; those in flight continue when the engine resumes.

        Cancelled, it is as if it had not been called.

        Args:
            mode: "abort": requests in flight leave the engine, and come back as continuations of what they
                have so far. "keep": they stay in it.
            drain_s: seconds that requests in flight are first given to end.

        Raises:
            RolloutError: the engine has ended, or is paused.
        """
        if self._gate is not None:
            raise RolloutError("the rollout engine is paused already")
        # First: a request that came after the drain began would begin on the old weights.
        self._gate = Future()
        try:
            if drain_s > 0:
                await self._drain(drain_s)
            await self._in_thread(lambda: self._freeze(mode))
        except BaseException:
            self._submit(self._thaw)
            self._open_gate()
            raise

    async def resume(self) -> None:
        """Resume, with the requests of before the pause and those that waited; a no-op when not paused."""
        thawed: Future[None] = Future()

        def command() -> None:
            self._thaw()
            thawed.set_result(None)

        # Queued before the gate opens: a thread that steps again admits what has waited there.
        self._submit(command)
        self._open_gate()
        await asyncio.shield(asyncio.wrap_future(thawed))

    async def load(self, version: WeightVersion, tensors: Mapping[str, Tensor]) -> None:
        """Replace the weights between two steps; requests in flight continue with the new ones.

        Cancelling waits for the end of a load that runs: nothing reads the tensors after this returns.

        Args:
            version: what these weights are called from then on.
            tensors: all of them, of a layout that was checked.

        Raises:
            RolloutError, WeightMismatch: loading failed half-way; the engine has ended.
        """
        await run_to_end(self._in_thread(lambda: self._load(version, tensors)))

    async def fail(self, cause: BaseException) -> None:
        """End the engine: everything in flight, waiting, or asked for later raises `RolloutError` from it."""
        self._submit(lambda: self._fail(cause))
        await self.resume()

    def close(self, timeout: float = 10.0) -> None:
        """End the thread; calls in flight raise `RolloutError`. Closing twice is a no-op.

        Args:
            timeout: seconds to wait for the running step.
        """
        self._submit(self._stop)
        self._open_gate()
        self._thread.join(timeout)

    def _submit(self, command: Callable[[], None]) -> None:
        """Have the thread run `command`; once it has ended, run it here (it finds the engine closed)."""
        with self._lock:
            if not self._thread_ended:
                self._commands.put(command)
                return
        command()

    def _open_gate(self) -> None:
        gate, self._gate = self._gate, None
        if gate is not None:
            gate.set_result(None)

    async def _drain(self, seconds: float) -> None:
        """Wait until nothing is in flight, for so long."""
        drained: Future[None] = Future()

        def command() -> None:
            self._drained = drained

        await self._in_thread(command)
        await asyncio.wait([asyncio.wrap_future(drained)], timeout=seconds)

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

        Consumes: commands. Waits for: a command, when there is nothing to step or the engine is paused.
        Produces: results in the callers' futures. Unblocked by: any command; `close` sends the last one.
        """
        try:
            engine = build()
        except BaseException as error:  # noqa: BLE001 — handed to the constructor's caller, whole
            ready.set_exception(error)
            return
        ready.set_result(engine)
        while not self._closed:
            self._run_commands(wait=not self._may_step(engine))
            if self._may_step(engine):
                self._step(engine)
            self._note_drained()
        with self._lock:
            self._thread_ended = True
        self._run_commands(wait=False)

    def _may_step(self, engine: StepEngine) -> bool:
        return not (self._failure or self._closed) and self._frozen_since is None and engine.busy

    def _note_drained(self) -> None:
        if self._drained is not None and not self._calls:
            self._drained.set_result(None)
            self._drained = None

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
            partial = self._partials.pop(request_id, None)
            if partial is not None:
                generation = joined(call.requests[request_id], partial, generation)
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
        for request_id in held:
            self._partials.pop(request_id, None)
            self._interrupted.pop(request_id, None)
        if held and self._failure is None:
            self._engine.abort(held)

    def _freeze(self, mode: PauseMode) -> None:
        self._drained = None
        self._frozen_since = time.perf_counter()
        if mode == "abort":
            try:
                self._interrupt()
            except Exception as error:
                self._fail(error)
                raise

    def _interrupt(self) -> None:
        """Take all requests out of the engine, to be put back as continuations."""
        for request_id, made in self._engine.interrupt().items():
            request = self._calls[request_id].requests[request_id]
            so_far = self._partials.pop(request_id, Partial()).followed_by(made)
            self._partials[request_id] = so_far
            self._interrupted[request_id] = continued(request, so_far)

    def _thaw(self) -> None:
        """Put interrupted requests back, and step again; of an ended engine, nothing."""
        since, self._frozen_since = self._frozen_since, None
        self._drained = None
        waiting, self._interrupted = self._interrupted, {}
        if self._failure is not None or self._closed:
            return
        try:
            for request_id, request in waiting.items():
                self._engine.add(request_id, request)
        except Exception as error:  # noqa: BLE001 — ends the engine, and reaches every caller
            self._fail(error)
        if since is not None:
            seconds = time.perf_counter() - since
            self._times = dataclasses.replace(
                self._times, paused=self._times.paused + seconds, last_paused=seconds
            )

    def _load(self, version: WeightVersion, tensors: Mapping[str, Tensor]) -> None:
        start = time.perf_counter()
        try:
            self._engine.load(version, tensors.items())
        except Exception as error:
            self._fail(error)
            if isinstance(error, WeightMismatch | RolloutError):
                raise
            raise EngineFailed(
                f"loading weights {version} failed: {type(error).__name__}: {error}; this replica has ended"
            ) from error
        self._version = version
        seconds = time.perf_counter() - start
        self._times = dataclasses.replace(
            self._times, loading=self._times.loading + seconds, last_loading=seconds
        )

    def _fail(self, error: BaseException) -> None:
        self._failure = self._failure or error
        self._fail_calls()

    def _stop(self) -> None:
        self._closed = True
        self._fail_calls()

    def _fail_calls(self) -> None:
        calls, self._calls = set(self._calls.values()), {}
        self._partials, self._interrupted = {}, {}
        for call in calls:
            try:
                self._refuse_if_ended()
            except RolloutError as error:
                call.future.set_exception(error)

    def _refuse_if_ended(self) -> None:
        cause = self._failure
        if cause is not None:
            same_again = isinstance(cause, WeightMismatch | RolloutError)  # another engine would do the same
            kind = RolloutError if same_again and not isinstance(cause, EngineFailed) else EngineFailed
            raise kind(f"the rollout engine has failed: {type(cause).__name__}: {cause}") from cause
        if self._closed:
            raise EngineFailed("the rollout engine has been closed")
