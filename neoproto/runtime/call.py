"""`RemoteCall`: the one handle on work under way elsewhere.

    replies, deaths, the deadline ──settle──> _raw or _error ──> result() / await / callbacks (gather, wait)

It is no `concurrent.futures.Future`: callbacks of `wait` and of an abandoned `await` are taken off again, or
a call that lasts as long as the run would gather them; results are unpickled on the thread that waits, not on
the one that reads replies; and a future, with its condition variable, takes three times as long to make.
"""

from __future__ import annotations

import asyncio
import math
import sys
import threading
import time
from collections.abc import Callable, Generator, Sequence
from typing import Any, Generic, TypeVar

from neoproto.errors import CallCancelled, DeadlineExceeded
from neoproto.runtime.display import call_html, spans
from neoproto.runtime.wire import RemoteFailure
from neoproto.tables import LONGEST_CELL
from neoproto.text import cut, first_line

T = TypeVar("T")

LOOK_S = 0.2
"""How soon an interrupt of a cell that awaits a call is noticed."""


class RemoteCall(Generic[T]):
    """Work that ends with a value or an exception, on any thread, exactly once.

    `await call` equals `call.result()`. Both may be used any number of times, from any thread and any event
    loop. The deadline was fixed when the call was submitted; waiting late does not restart it.
    """

    def __init__(self, convert: Callable[[Any], T] | None = None) -> None:
        """Make an unsettled call.

        Args:
            convert: makes the value out of what `_settle` gets; runs once, in the first waiter's thread.
        """
        self._lock = threading.Lock()
        self._waiters: list[threading.Lock] = []
        self._callbacks: list[Callable[[RemoteCall[T]], None]] = []
        self._settled = False
        self._raw: Any = None
        self._error: BaseException | None = None
        self._convert = convert

    def done(self) -> bool:
        """Whether `result` would return or raise without waiting."""
        return self._settled

    def result(self, timeout: float | None = None) -> T:
        """Wait for the end and return the value, or raise.

        Args:
            timeout: seconds to wait at most, apart from the call's own deadline; the call continues.

        Raises:
            TimeoutError: `timeout` passed first.
            DeadlineExceeded, WorkerDied, GroupBroken, RuntimeClosed, CallCancelled: how the call ended, or
                the worker's own exception.
        """
        if not self._settled:
            waiter = threading.Lock()
            waiter.acquire()
            with self._lock:
                if not self._settled:
                    self._waiters.append(waiter)
            if not self._settled and not waiter.acquire(timeout=-1 if timeout is None else max(timeout, 0.0)):
                with self._lock:
                    if waiter in self._waiters:
                        self._waiters.remove(waiter)
                raise TimeoutError(f"no result within {timeout} s; the call continues")
        return self._value()

    def __await__(self) -> Generator[Any, None, T]:
        if not self._settled:
            loop = asyncio.get_running_loop()
            event = loop.create_future()

            def wake(_: RemoteCall[T]) -> None:
                if not loop.is_closed():
                    loop.call_soon_threadsafe(_set_once, event)

            self._add_callback(wake)
            _look_up(loop, event)
            try:
                yield from event.__await__()
            finally:
                self._remove_callback(wake)
        return self._value()

    def cancel(self) -> bool:
        """Give the call up: it ends with `CallCancelled`; a running async method is cancelled on its worker.

        A sync method that already runs is left to end; its result is dropped. Its deadline still counts.

        Returns:
            False if the call had ended before.
        """
        return False

    @staticmethod
    def gather(calls: Sequence[RemoteCall[Any]]) -> RemoteCall[list[Any]]:
        """One call for all: their values in the order given, or the first failure as soon as it happens."""
        return _Gather(calls)

    @staticmethod
    def wait(
        calls: Sequence[RemoteCall[Any]], count: int = 1
    ) -> RemoteCall[tuple[list[RemoteCall[Any]], list[RemoteCall[Any]]]]:
        """A call of `(completed, pending)`, both in the order given, that ends once `count` of `calls` ended.

        Raises:
            ValueError: `count` is not between 0 and the number of calls.
        """
        return _Wait(calls, count)

    def _repr_html_(self) -> str:
        """What a notebook shows: how the call stands now. Waits for nothing, reads no result."""
        return call_html(self._facts(), self._title())

    def __repr__(self) -> str:
        return f"<{self._title()}: {'; '.join(f'{name} {text}' for name, text in self._facts().items())}>"

    # What follows is for the runtime itself.

    def _title(self) -> str:
        return type(self).__name__.removeprefix("_")

    def _facts(self) -> dict[str, str]:
        """How it stands, for people."""
        return {"state": self._state()}

    def _state(self) -> str:
        error, raw = self._error, self._raw
        if not self._settled:
            return "under way"
        if error is not None:
            return cut(f"failed: {type(error).__name__}: {first_line(error)}", LONGEST_CELL)
        if isinstance(raw, RemoteFailure):
            return cut(f"failed: {raw.type_name}: {raw.message.strip().partition(chr(10))[0]}", LONGEST_CELL)
        return "ended with a result"

    def _settle(self, raw: Any = None, error: BaseException | None = None) -> bool:
        """End the call; False if it had ended."""
        with self._lock:
            if self._settled:
                return False
            self._raw, self._error = raw, error
            self._settled = True
            waiters, callbacks = self._waiters, self._callbacks
            self._waiters, self._callbacks = [], []
        for waiter in waiters:
            waiter.release()
        for callback in callbacks:
            callback(self)
        return True

    def _failed(self) -> bool:
        """Whether an ended call ended with an exception."""
        return self._error is not None or isinstance(self._raw, RemoteFailure)

    def _value(self) -> T:
        if self._error is None and self._convert is not None:
            with self._lock:
                if self._convert is not None:
                    try:
                        self._raw = self._convert(self._raw)
                    except Exception as error:  # noqa: BLE001 - kept, so that every waiter sees the same end
                        self._error = error
                    self._convert = None
        if self._error is not None:
            raise self._error
        value: T = self._raw
        return value

    def _add_callback(self, callback: Callable[[RemoteCall[T]], None]) -> None:
        """Run `callback` once the call ends, on the thread that ends it, or now. It must not block."""
        with self._lock:
            if not self._settled:
                self._callbacks.append(callback)
                return
        callback(self)

    def _remove_callback(self, callback: Callable[[RemoteCall[T]], None]) -> None:
        with self._lock:
            if callback in self._callbacks:
                self._callbacks.remove(callback)


class GroupCall(RemoteCall[Any]):
    """A call of a method on some ranks of a group.

    Attributes:
        group_name, method, ranks: what was called.
        deadline, submitted: monotonic seconds.
    """

    def __init__(
        self,
        group_name: str,
        method: str,
        ranks: Sequence[int],
        deadline: float,
        convert: Callable[[Any], Any],
        keep_alive: object,
    ) -> None:
        """Make an unsettled call.

        Args:
            group_name, method, ranks, deadline: see the attributes.
            convert: see `RemoteCall`.
            keep_alive: lives as long as the call is under way: a group is not released below its calls.
        """
        super().__init__(convert)
        self.group_name, self.method, self.ranks = group_name, method, tuple(ranks)
        self.deadline, self.submitted = deadline, time.monotonic()
        self._keep_alive = keep_alive

    def cancelled_error(self) -> CallCancelled:
        """The error of a call that its caller has given up."""
        return CallCancelled(f"{self.group_name}.{self.method} was cancelled")

    def deadline_error(self, silent: Sequence[int], stacks: dict[int, str] | None = None) -> DeadlineExceeded:
        """The error of a call whose deadline has passed.

        Args:
            silent: the ranks that had not answered.
            stacks: where they are, as far as known.
        """
        elapsed = max(0.0, self.deadline - self.submitted)
        return DeadlineExceeded(self.method, self.group_name, silent, elapsed, stacks)

    def _settle(self, raw: Any = None, error: BaseException | None = None) -> bool:
        settled = super()._settle(raw, error)
        self._keep_alive = None
        return settled

    def _title(self) -> str:
        return f"RemoteCall {self.group_name}.{self.method}"

    def _answered(self) -> Sequence[int] | None:
        """The ranks that have answered; None where that is not known."""
        return None

    def _facts(self) -> dict[str, str]:
        facts = super()._facts() | {"ranks": spans(self.ranks)}
        answered = self._answered()
        if answered is not None:
            which = f": {spans(answered)}" if answered else ""
            facts["answered"] = f"{len(answered):,} of {len(self.ranks):,}{which}"
        if not self._settled:
            left = self.deadline - time.monotonic()
            facts["deadline"] = (
                "none" if left == math.inf else f"{left:,.1f} s left" if left > 0 else f"{-left:,.1f} s ago"
            )
        return facts


class _Gather(RemoteCall[list[Any]]):
    def __init__(self, calls: Sequence[RemoteCall[Any]]) -> None:
        super().__init__(lambda ended: [call.result() for call in ended])
        self._calls = tuple(calls)
        self._missing = len(self._calls)
        if not self._calls:
            self._settle(())
        for call in self._calls:
            call._add_callback(self._one_ended)

    def _one_ended(self, call: RemoteCall[Any]) -> None:
        if call._failed():
            self._settle((call,))
            return
        with self._lock:
            self._missing -= 1
            last = self._missing == 0
        if last:
            self._settle(self._calls)

    def _facts(self) -> dict[str, str]:
        return super()._facts() | _calls_ended(self._calls)

    def cancel(self) -> bool:
        cancelled = [call.cancel() for call in self._calls]  # all of them, not only up to the first
        return any(cancelled)


class _Wait(RemoteCall[tuple[list[RemoteCall[Any]], list[RemoteCall[Any]]]]):
    def __init__(self, calls: Sequence[RemoteCall[Any]], count: int) -> None:
        super().__init__(_split_by_done)
        self._calls = tuple(calls)
        if not 0 <= count <= len(self._calls):
            raise ValueError(f"count must be between 0 and the {len(self._calls)} calls given, got {count}")
        self._missing = count
        self._count = count
        if count == 0:
            self._settle(self._calls)
        for call in self._calls:
            if self._settled:
                break
            call._add_callback(self._one_ended)

    def _one_ended(self, _: RemoteCall[Any]) -> None:
        with self._lock:
            self._missing -= 1
            enough = self._missing == 0
        if enough:
            self._settle(self._calls)
            for call in self._calls:
                call._remove_callback(self._one_ended)

    def _facts(self) -> dict[str, str]:
        return super()._facts() | _calls_ended(self._calls) | {"waits for": f"{self._count:,}"}


def _calls_ended(calls: Sequence[RemoteCall[Any]]) -> dict[str, str]:
    return {"calls ended": f"{sum(call.done() for call in calls):,} of {len(calls):,}"}


def _split_by_done(
    calls: Sequence[RemoteCall[Any]],
) -> tuple[list[RemoteCall[Any]], list[RemoteCall[Any]]]:
    completed: list[RemoteCall[Any]] = []
    pending: list[RemoteCall[Any]] = []
    for call in calls:
        (completed if call.done() else pending).append(call)
    return completed, pending


def _look_up(loop: asyncio.AbstractEventLoop, event: asyncio.Future[None]) -> None:
    """In a Jupyter kernel, have a loop that waits for `event` look up now and then.

    ipykernel answers an interrupt of a cell that awaits with a callback that does not wake the loop
    (ipython/ipykernel#881, seen with 7.4; to be removed when it does): the cell would continue to wait.
    """
    if "ipykernel" in sys.modules and not event.done():
        loop.call_later(LOOK_S, _look_up, loop, event)


def _set_once(event: asyncio.Future[None]) -> None:
    if not event.done():
        event.set_result(None)
