"""Messages past endpoints: a port of this process, and a thread that hands on what arrives there.

    sender's thread ──send──> Monarch ──> the inbox's thread ──> sink

A call of an endpoint takes Monarch three times as long: a coroutine on its own runtime, which lets go of the
interpreter after each message, and a pickler written in Python, at each end. Here a thread takes a burst of
messages, and no event loop of ours is needed. What an endpoint has and a port has not is news of the other
side's death.

Each receiver chooses how it is reached, and its address tells which: a sender needs no option.
"""

from __future__ import annotations

import atexit
import contextvars
import logging
import pickle
import threading
from collections.abc import Callable
from typing import Any

from neoproto.private_api import monarch as private

logger = logging.getLogger(__name__)

Address = bytes
"""Where an inbox of some process is reached; equal addresses are one inbox."""
Sink = Callable[..., None]

_EXIT_WAIT_S = 5.0
"""How long the end of the program, or `close`, waits for the thread, which may be inside its sink."""

_MANY = 4096


class Inbox:
    """A port, and the thread that hands what arrives to `sink`, until it is closed or the process ends."""

    def __init__(self, name: str, sink: Sink | None = None) -> None:
        """Call it where Monarch's context is.

        Args:
            name: the thread's.
            sink: see `set_sink`.
        """
        from monarch.actor import context

        self._instance = context().actor_instance
        # What `send` and the thread run in: on a thread without it, Monarch would make a second root client.
        self._context = contextvars.copy_context()
        self._sink = sink
        self._closed = False
        self._targets: dict[Address, tuple[Any, bool]] = {}
        self.address, self._receive = private.open_port(self._instance)
        self._thread = threading.Thread(
            target=self._context.copy().run, args=(self._run,), name=name, daemon=True
        )
        self._thread.start()
        if private.client_exists() or not private.private_api():
            # Registered after Monarch's own, so it runs before: what arrives later must find no thread that
            # would then ask for the lock of an interpreter that ends. Workers leave without ending theirs.
            atexit.register(self.close)

    def set_sink(self, sink: Sink | None) -> None:
        """The items of a message become arguments of `sink` from now on, on the thread; None drops them."""
        self._sink = sink

    def send(self, message: tuple[Any, ...], *addresses: Address) -> None:
        """Send to some inboxes, pickled once; to one that is gone, nothing happens. Does not wait.

        Messages from the inboxes of one actor to one address arrive in the order of the calls.
        """
        payload = pickle.dumps(message)
        if len(self._targets) > _MANY:
            self._targets = {}  # mostly of processes that are gone
        targets = self._targets
        for address in addresses:
            if address not in targets:
                # Two threads may both make one; either will do.
                target = self._context.copy().run(private.sending_port, address, self._instance)
                targets[address] = target
        private.send(payload, [targets[address] for address in addresses])

    def close(self) -> None:
        """End the thread: nothing is handed on from now on. Closing twice is harmless."""
        if self._closed:
            return
        self._closed = True
        atexit.unregister(self.close)
        self.send((), self.address)  # it waits for a message
        if threading.current_thread() is not self._thread:
            self._thread.join(_EXIT_WAIT_S)

    def _run(self) -> None:
        name = self._thread.name
        while not self._closed:
            try:
                decode = self._receive()
            except Exception:
                logger.warning("%s: its port has failed and receives no more", name, exc_info=True)
                return
            try:
                sink = self._sink
                if sink is not None and not self._closed:
                    sink(*decode())
            except Exception:
                # One message that cannot be decoded, or whose sink fails, must not cost those behind it.
                logger.warning("%s: a message could not be handed over", name, exc_info=True)
