"""Calls to the store's actors past their endpoints: a port and a thread at each end.

    client's loop ──(reply port, number, method, arguments)──> thread ──> actor's loop: the method
                  <─────────(number, whether it went well, what came of it)─────┘

A call of an endpoint takes Monarch three times as long: a coroutine on its own runtime and a pickler written
in Python, at each end. What it has and this has not is word of the other side's death; so a caller that waits
for long asks by endpoint whether the other side lives.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import inspect
import itertools
import pickle
import threading
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from monarch._rust_bindings.monarch_hyperactor.actor import PythonMessage, PythonMessageKind
from monarch._rust_bindings.monarch_hyperactor.buffers import Buffer
from monarch._src.actor.actor_mesh import Port
from monarch.actor import context

from neoproto.errors import NeoProtoError, StoreError
from neoproto.store.wire import text_of

Address = bytes
"""Where calls of one actor, or the replies to one process, go."""

_END = ()
_JOIN_S = 1.0
_PATIENCE_S = 2.0


class _Mailbox:
    """A port of this process, and the thread that hands on what arrives, until it is ended."""

    def __init__(self, name: str, sink: Callable[..., None]) -> None:
        """Call it where Monarch's context is.

        Args:
            sink: called on the thread, with a message's items; quick.
        """
        self._instance = context().actor_instance
        handle, self._receiver = self._instance._mailbox.open_port()
        self.address: Address = pickle.dumps(handle.bind())
        self._sink = sink
        self._ports: dict[Address, Any] = {}
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()
        # Runs before Monarch's own: what arrives later finds no thread that would ask for the lock of an
        # interpreter that ends.
        atexit.register(self.end)

    def send(self, address: Address, message: tuple[Any, ...]) -> None:
        """Send to a mailbox; to one that is gone, nothing happens. Does not wait."""
        port = self._ports.get(address)
        if port is None:
            port = self._ports[address] = Port(pickle.loads(address), self._instance._as_rust(), 0)
            port.return_undeliverable = False
        buffer = Buffer()
        buffer.write(pickle.dumps(message))
        port._send_message(PythonMessage(PythonMessageKind.Result(0), buffer.freeze(), []))

    def end(self) -> None:
        """End the thread. Ending twice is harmless."""
        if self._thread.is_alive():
            atexit.unregister(self.end)
            self.send(self.address, _END)
            self._thread.join(_JOIN_S)

    def _run(self) -> None:
        while (message := self._receiver.recv_task().block_on().decode()) != _END:
            self._sink(*message)


class RpcServer:
    """Serves some methods of an actor. Make it on the actor's event loop: they run there, async ones overlap.

    Attributes:
        address: for callers.
    """

    def __init__(self, name: str, methods: Mapping[str, Callable[..., Any]]) -> None:
        self._methods = dict(methods)
        self._loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        self._mailbox = _Mailbox(name, self._take)
        self.address = self._mailbox.address

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
            self._mailbox.send(back, (number, True, result))
            return
        task = self._loop.create_task(self._finish(back, number, result))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _finish(self, back: Address, number: int, result: Awaitable[Any]) -> None:
        try:
            self._mailbox.send(back, (number, True, await result))
        except Exception as error:  # noqa: BLE001 - the caller's to judge
            self._fail(back, number, error)

    def _fail(self, back: Address, number: int, error: Exception) -> None:
        told = error if isinstance(error, NeoProtoError) else StoreError(text_of(error))
        self._mailbox.send(back, (number, False, told))


class RpcClient:
    """A client's end. All calls are made on one event loop."""

    def __init__(self, name: str) -> None:
        """Call it where Monarch's context is."""
        self._numbers = itertools.count()
        self._waiting: dict[int, tuple[asyncio.AbstractEventLoop, asyncio.Future[Any]]] = {}
        self._mailbox = _Mailbox(name, self._take)

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
            self._mailbox.send(address, (self._mailbox.address, number, method, arguments))
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
        self._mailbox.end()

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
