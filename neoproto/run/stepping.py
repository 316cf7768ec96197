"""Training that takes a step when it is asked to: a thread with an event loop of its own, and orders to it.

    cell ──Order──> queue ──one after the other──> SyncSteps ──> workers
      ▲                                               │ beside it: replicas kept alive, lost processes noticed
      └── await, or result() ──────settle─────────────┘

A wait that is interrupted stops the wait alone: the order continues, and the next one follows. Whatever
ends the thread settles all orders, those to come too.
"""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import Any, Generic, TypeVar

from neoproto.errors import RuntimeClosed
from neoproto.runtime import RemoteCall
from neoproto.trainer.metrics.record import TrainingParts
from neoproto.trainer.sync import SyncSteps
from neoproto.trainer.tasks import beside, owned_tasks

T = TypeVar("T")

CLOSED = "this trainer has been closed"
ENDED = "The trainer has ended: close() it and make another one. The runtime and its other groups continue."
SAVE_S = 60.0
"""How long closing waits for a checkpoint that is being written."""
STOP_S = 5.0
"""How long closing waits for what was cancelled."""


class Order(RemoteCall[T], Generic[T]):
    """Something to be done by the training thread; a `RemoteCall` of its result.

    Args:
        name: what it is, for people.
        work: done on the thread's event loop.
        trains: it changes what is trained, so that the thread ends if it fails half-way.
    """

    def __init__(self, name: str, work: Callable[[SyncSteps], Awaitable[T]], *, trains: bool = True) -> None:
        super().__init__()
        self._name, self._work, self._trains = name, work, trains

    def _title(self) -> str:
        return self._name

    async def carry_out(self, steps: SyncSteps) -> None:
        """Do it, and settle; a failure of training is left to the thread's end."""
        try:
            result = await self._work(steps)
        except Exception as error:
            if self._trains:
                raise
            self._settle(error=error)
        else:
            self._settle(result)

    def fail(self, error: BaseException) -> None:
        """End it with an error, unless it has ended."""
        self._settle(error=error)


class StepThread:
    """See the module.

    Args:
        parts: of the trainer.
        others: by name; what runs beside the steps as long as they last, made on the thread. One that
            fails ends it.
        done: what becomes of the batch of a finished step, and of the prompts that it refers to.
    """

    def __init__(
        self,
        parts: TrainingParts,
        others: Mapping[str, Callable[[], Coroutine[Any, Any, Any]]],
        done: Callable[..., None],
    ) -> None:
        self._parts, self._others, self._done = parts, others, done
        self._lock = threading.Lock()
        self._orders: deque[Order[Any]] = deque()
        self._closing = False
        self._end: BaseException | None = None
        self._loop = asyncio.new_event_loop()
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self.began: Order[None] = Order("the first weights", lambda steps: steps.begin())
        self._current: Order[Any] | None = self.began
        context = contextvars.copy_context()
        self._thread = threading.Thread(
            target=context.run, args=(self._run,), name="neoproto-steps", daemon=True
        )
        self._thread.start()

    def order(self, name: str, work: Callable[[SyncSteps], Awaitable[T]], *, trains: bool = True) -> Order[T]:
        """Have something done after everything that was ordered before; at once ended if the thread has."""
        order = Order(name, work, trains=trains)
        with self._lock:
            if self._end is None and not self._closing:
                self._orders.append(order)
                self._loop.call_soon_threadsafe(self._wake.set)
                return order
        order.fail(self._end or RuntimeClosed(CLOSED))
        return order

    def close(self, save_s: float = SAVE_S) -> None:
        """End the thread; orders left end as closed. Twice is a no-op.

        Args:
            save_s: how long a checkpoint that is being written is waited for.
        """
        with self._lock:
            self._closing = True
            if self._end is None:
                self._loop.call_soon_threadsafe(self._stop)
        self._thread.join(save_s)
        if self._thread.is_alive():
            with self._lock:
                if self._end is None:
                    self._loop.call_soon_threadsafe(self._cancel)
            self._thread.join(STOP_S)

    # What follows runs on the thread.

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            end: BaseException = RuntimeClosed(CLOSED)
            try:
                runner.run(self._main())
            except asyncio.CancelledError:
                pass  # as it closes
            except BaseException as error:  # noqa: BLE001 - raised at whoever waits, now or later
                error.add_note(ENDED)
                end = error
            with self._lock:
                self._end = end
                left = [*([self._current] if self._current else []), *self._orders]
                self._orders.clear()
            for order in left:
                order.fail(end)

    async def _main(self) -> None:
        """Consumes: orders. Waits for: the next one, and what it does. Produces: their results. Unblocked by:
        an order, closing, or the failure of what runs beside."""
        self._task = asyncio.current_task()
        if self._closing:  # before there was a task to cancel
            return
        await beside(self._serve(), {name: make() for name, make in self._others.items()})

    async def _serve(self) -> None:
        async with owned_tasks() as tasks:
            steps = SyncSteps(self._parts, tasks, self._done, keep_text=True)
            while self._current is not None:
                await self._current.carry_out(steps)
                self._current = await self._next()
            await steps.finished()

    async def _next(self) -> Order[Any] | None:
        """The next order; None once closing."""
        while True:
            with self._lock:
                if self._closing:
                    return None
                if self._orders:
                    return self._orders.popleft()
                self._wake.clear()
            await self._wake.wait()

    def _stop(self) -> None:
        """End between two orders, or cancel the one that is under way."""
        if self._current is not None and not self._current.done():
            self._cancel()
        self._wake.set()

    def _cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()
