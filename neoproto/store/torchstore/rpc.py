"""Calls to the store's actors past their endpoints: a port and a thread at each end.

    client's loop ──(reply port, number, method, arguments)──> thread ──> actor's loop: the method
                  <─────────────(number, succeeded, result or exception)────────┘

Ports (`neoproto.private_api.monarch_ports`) are faster than endpoints, but a caller does not learn that the
other side has died; so one that waits for long asks by endpoint whether the other side lives.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import itertools
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from neoproto.errors import NeoProtoError, StoreError
from neoproto.private_api.monarch_ports import Address, Inbox
from neoproto.store.messages import text_of

_PATIENCE_S = 2.0


class RpcServer:
    """Serves some methods of an actor. Make it on the actor's event loop: they run there, async ones overlap.

    Attributes:
        address: for callers.
    """

    def __init__(self, name: str, methods: Mapping[str, Callable[..., Any]]) -> None:
        self._methods = dict(methods)
        self._loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[None]] = set()  # the loop itself keeps only weak references
        self._inbox = Inbox(name, self._receive)  # until the process ends: late callers are answered
        self.address = self._inbox.address

    def _receive(self, back: Address, number: int, method: str, arguments: tuple[Any, ...]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: the process is about to end
            self._loop.call_soon_threadsafe(self._serve, back, number, method, arguments)

    def _serve(self, back: Address, number: int, method: str, arguments: tuple[Any, ...]) -> None:
        try:
            result = self._methods[method](*arguments)
        except Exception as error:  # noqa: BLE001 - the caller's to judge
            self._fail(back, number, error)
            return
        if not inspect.isawaitable(result):
            self._inbox.send((number, True, result), back)
            return
        task = self._loop.create_task(self._finish(back, number, result))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _finish(self, back: Address, number: int, result: Awaitable[Any]) -> None:
        try:
            self._inbox.send((number, True, await result), back)
        except Exception as error:  # noqa: BLE001 - the caller's to judge
            self._fail(back, number, error)

    def _fail(self, back: Address, number: int, error: Exception) -> None:
        ours = error if isinstance(error, NeoProtoError) else StoreError(text_of(error))
        self._inbox.send((number, False, ours), back)


class RpcClient:
    """A client's end. All calls are made on one event loop."""

    def __init__(self, name: str, *, patience_s: float = _PATIENCE_S) -> None:
        """Make it where Monarch's context is.

        Args:
            patience_s: how long a call waits before it asks whether the other side lives.
        """
        self._patience_s = patience_s
        self._numbers = itertools.count()
        self._waiting: dict[int, tuple[asyncio.AbstractEventLoop, asyncio.Future[Any]]] = {}
        self._inbox = Inbox(name, self._receive)

    def __len__(self) -> int:
        """How many calls wait for an answer."""
        return len(self._waiting)

    async def call(
        self, address: Address, alive: Callable[[], Awaitable[Any]], method: str, arguments: tuple[Any, ...]
    ) -> Any:
        """Call a method and wait for what it returns, as long as the other side lives.

        Args:
            alive: asks the other side by an endpoint; raises if it is dead.

        Raises:
            NeoProtoError: the method's; StoreError for any of another kind.
        """
        loop, number = asyncio.get_running_loop(), next(self._numbers)
        answer: asyncio.Future[Any] = loop.create_future()
        self._waiting[number] = (loop, answer)  # before it is sent: the answer comes on another thread
        try:
            self._inbox.send((self._inbox.address, number, method, arguments), address)
            await asyncio.wait({answer}, timeout=self._patience_s)
            while not answer.done():
                # A port does not tell that its other side is dead. An endpoint does, by an exception.
                sign = asyncio.ensure_future(alive())
                try:
                    await asyncio.wait({answer, sign}, return_when=asyncio.FIRST_COMPLETED)
                    if sign.done() and not answer.done():
                        sign.result()
                        await asyncio.wait({answer}, timeout=self._patience_s)
                finally:
                    sign.cancel()
            return answer.result()
        finally:
            del self._waiting[number]

    def close(self) -> None:
        """Answers are not heard from now on. Closing twice is harmless."""
        self._inbox.close()

    def _receive(self, number: int, succeeded: bool, outcome: Any) -> None:
        """Settle a call; on the inbox's thread."""
        waiting = self._waiting.get(number)
        if waiting is not None:
            loop, answer = waiting
            with contextlib.suppress(RuntimeError):  # the loop is closed, and with it the call
                loop.call_soon_threadsafe(_settle, answer, succeeded, outcome)


def _settle(answer: asyncio.Future[Any], succeeded: bool, outcome: Any) -> None:
    if answer.done():
        return  # the caller has stopped waiting
    if succeeded:
        answer.set_result(outcome)
    else:
        answer.set_exception(outcome)
