"""The inboxes of this process that outlive a run: calls, replies to calls, requests of workers."""

from __future__ import annotations

import threading
from typing import Any

from neoproto.private_api.monarch import ensure_context, private_api
from neoproto.private_api.monarch_ports import Address, Inbox

_inboxes: dict[tuple[str, bool], Inbox] = {}
_lock = threading.Lock()


def replies() -> Inbox:
    """Where this process gets the outcome of its calls."""
    return _inbox("replies")


def calls() -> Inbox:
    """Where this process, a worker, gets calls."""
    return _inbox("calls")


def requests() -> Inbox:
    """Where this process is asked by workers."""
    return _inbox("requests")


def send(message: tuple[Any, ...], *addresses: Address) -> None:
    """Send to inboxes of some processes; to one that is gone, nothing happens. Does not wait."""
    replies().send(message, *addresses)


def _inbox(name: str) -> Inbox:
    # Runs of one process, one after another, may differ in whether they use the private API.
    key = name, private_api()
    inbox = _inboxes.get(key)
    if inbox is None:
        with _lock:  # two threads of a worker may ask for the first one
            inbox = _inboxes.get(key)
            if inbox is None:
                ensure_context()
                inbox = _inboxes[key] = Inbox(f"neoproto-{name}")
    return inbox
