"""Ports of this process, and what is received on them: calls, replies to calls, requests of workers.

    sender's thread ──send──> Monarch ──> the pump's thread ──> sink

Each pump has a thread of its own, so that none needs an event loop of ours. A thread takes a burst of
messages for half the processor time of a coroutine on Monarch's runtime, which lets go of the interpreter
after each.
"""

from __future__ import annotations

import atexit
import functools
import logging
import pickle
import threading
from collections.abc import Callable
from typing import Any

from meshes.monarch import sdk

logger = logging.getLogger(__name__)

Sink = Callable[..., None]
Address = bytes
"""Where a pump of some process is reached; equal addresses are one pump."""

_EXIT_WAIT_S = 5.0


class Pump:
    """A port, and the thread that hands what arrives to `sink`, until the process ends."""

    def __init__(self, name: str) -> None:
        handle, self._receiver = sdk.pinned_instance()._mailbox.open_port()
        self.address: Address = pickle.dumps(handle.bind())
        self._sink: Sink | None = None
        self._ended = False
        self._thread = threading.Thread(target=self._run, name=f"neoproto-{name}", daemon=True)
        self._thread.start()
        if sdk.client_exists():
            # Registered after Monarch's own, so it runs before: what arrives later must find no thread that
            # would then ask for the lock of an interpreter that ends. Workers leave without ending theirs.
            atexit.register(self._end)

    def set_sink(self, sink: Sink | None) -> None:
        """Messages, which are tuples, become arguments of `sink` from now on; None drops them."""
        self._sink = sink

    def _run(self) -> None:
        sdk.ensure_context()
        while True:
            received = self._receiver.recv_task().block_on()
            if self._ended:
                return
            try:
                sink = self._sink
                if sink is not None:
                    sink(*received.decode())
            except Exception:
                logger.warning("a message could not be handed over", exc_info=True)

    def _end(self) -> None:
        self._ended = True
        send((), self.address)
        self._thread.join(_EXIT_WAIT_S)


def send(message: tuple[Any, ...], *addresses: Address) -> None:
    """Send to the pumps of some processes; to one that is gone, nothing happens."""
    from monarch._rust_bindings.monarch_hyperactor.actor import PythonMessage, PythonMessageKind
    from monarch._rust_bindings.monarch_hyperactor.buffers import Buffer

    # Monarch's own pickler is written in Python and takes longer than all the rest of a call.
    buffer = Buffer()
    buffer.write(pickle.dumps(message))
    ready = PythonMessage(PythonMessageKind.Result(0), buffer.freeze(), [])
    for address in addresses:
        _port(address)._send_message(ready)


@functools.lru_cache(maxsize=4096)
def _port(address: Address) -> Any:
    from monarch._src.actor.actor_mesh import Port

    port = Port(pickle.loads(address), sdk.pinned_instance()._as_rust(), 0)
    port.return_undeliverable = False
    return port


_pumps: dict[str, Pump] = {}
_lock = threading.Lock()


def replies() -> Pump:
    """Where this process gets the outcome of its calls."""
    return _pump("replies")


def calls() -> Pump:
    """Where this process, a worker, gets calls."""
    return _pump("calls")


def requests() -> Pump:
    """Where this process is asked by workers."""
    return _pump("requests")


def _pump(name: str) -> Pump:
    pump = _pumps.get(name)
    if pump is None:
        with _lock:
            pump = _pumps.get(name)
            if pump is None:
                pump = _pumps[name] = Pump(name)
    return pump
