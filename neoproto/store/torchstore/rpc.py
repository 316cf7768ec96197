"""Calls to the store's actors past their endpoints: a port and a thread at each end.

    client's loop ──(reply port, number, method, arguments)──> thread ──> actor's loop: the method
                  <─────────(number, whether it went well, what came of it)─────┘

Ports are faster than endpoints (`neoproto.engines.monarch_ports`), but a caller is not told that the other
side has died; so one that waits for long asks by endpoint whether the other side lives.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import itertools
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from neoproto.engines.monarch_ports import Address, Inbox
from neoproto.errors import NeoProtoError, StoreError
from neoproto.store.wire import text_of

_PATIENCE_S = 2.0


class RpcServer:
    """Serves some methods of an actor. Make it on the actor's event loop: they run there, async ones overlap.

    Attributes:
        address: for callers.
    """

    def __init__(self, name: str, methods: Mapping[str, Callable[..., Any]]) -> None:
        self._methods = dict(methods)
        self._loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        self._inbox = Inbox(name, self._take)
        self.address = self._inbox.address

    def _take(self, back: Address, number: int, method: str, arguments: tuple[Any, ...]) -> None:
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
        told = error if isinstance(error, NeoProtoError) else StoreError(text_of(error))
        self._inbox.send((number, False, told), back)


class RpcClient:
    """A client's end. All calls are made on one event loop."""

    def __init__(self, name: str) -> None:
        """Call it where Monarch's context is."""
        self._numbers = itertools.count()
        self._waiting: dict[int, tuple[asyncio.AbstractEventLoop, asyncio.Future[Any]]] = {}
        self._inbox = Inbox(name, self._take)

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
        self._waiting[number] = (loop, answer)
        try:
            self._inbox.send((self._inbox.address, number, method, arguments), address)
            await asyncio.wait({answer}, timeout=_PATIENCE_S)
            while not answer.done():
                sign = asyncio.ensure_future(alive())
                try:
                    await asyncio.wait({answer, sign}, return_when=asyncio.FIRST_COMPLETED)
                    if sign.done() and not answer.done():
                        sign.result()
                        await asyncio.wait({answer}, timeout=_PATIENCE_S)
                finally:
                    sign.cancel()
            return answer.result()
        finally:
            del self._waiting[number]

    def close(self) -> None:
        """Answers are not heard from now on. Closing twice is harmless."""
        self._inbox.close()

    def _take(self, number: int, well: bool, outcome: Any) -> None:
        waiting = self._waiting.get(number)
        if waiting is not None:
            loop, answer = waiting
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
                loop.call_soon_threadsafe(_settle, answer, well, outcome)


def _settle(answer: asyncio.Future[Any], well: bool, outcome: Any) -> None:
    if answer.done():
        return  # nobody waits any more
    if well:
        answer.set_result(outcome)
    else:
        answer.set_exception(outcome)
