"""Ports of this process, and what is received on them: sync calls, replies to calls, requests of workers.

All are received on Monarch's own threads, so that none needs an event loop of ours.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

from meshes import sdk

logger = logging.getLogger(__name__)

Sink = Callable[..., None]


class Pump:
    """A port, and the task that hands what arrives to `sink`, for as long as the process lives."""

    def __init__(self) -> None:
        from monarch._rust_bindings.monarch_hyperactor.pytokio import PythonTask
        from monarch.actor import context

        sdk.ensure_context()
        handle, self._receiver = context().actor_instance._mailbox.open_port()
        self.port_ref = handle.bind()
        self._sink: Sink | None = None
        self._task = PythonTask.from_coroutine(self._run()).spawn()

    def set_sink(self, sink: Sink | None) -> None:
        """Messages, which are tuples, become arguments of `sink` from now on; None drops them."""
        self._sink = sink

    async def _run(self) -> None:
        while True:
            message = await self._receiver.recv_task()
            try:
                sink = self._sink
                if sink is not None:
                    sink(*message.decode())
            except Exception:
                logger.warning("a message could not be handed over", exc_info=True)


def send(message: tuple[Any, ...], *port_refs: Any) -> None:
    """Send to the `Pump`s of some processes; to one that is gone, nothing happens."""
    from monarch._src.actor.actor_mesh import Port
    from monarch.actor import context

    sdk.ensure_context()
    instance = context().actor_instance._as_rust()
    ready: Any = None
    for port_ref in port_refs:
        port = Port(port_ref, instance, 0)
        port.return_undeliverable = False
        if ready is None:
            ready = port._pending_result(message).try_resolve_now()  # pickled once
        if ready is None:
            port.send(message)
        else:
            port._send_message(ready)


_pumps: dict[str, Pump] = {}
_lock = threading.Lock()


def replies() -> Pump:
    """Where this process gets the outcome of its calls."""
    return _pump("replies")


def calls() -> Pump:
    """Where this process, a worker, gets sync calls."""
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
                pump = _pumps[name] = Pump()
    return pump
