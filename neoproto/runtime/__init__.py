"""The control plane: what a person imports to write workers, controller scripts and notebooks.

    group.update(batch) ──> dispatch ──> CallTracker.start ──> backend ──> WorkerExecutor ──> Worker.update
    RemoteCall <──settle──────────────── CallTracker.on_reply <── backend <── reply ─┘

Calls: call, call_tracker, deadline, wire, executor. Groups: group, group_state, dispatch, registration,
handles, pool, worker. The root: runtime, relay, attached, signals, processes, reaper. backend: what a backend
provides. docs/runtime-internals.md has the whole walk.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from neoproto.runtime.call import RemoteCall
    from neoproto.runtime.group import RemoteWorkerGroup, WorkerGroup
    from neoproto.runtime.handles import WorkerHandle, remote
    from neoproto.runtime.objects import delete, delete_batch, get, get_batch, put, put_batch
    from neoproto.runtime.pool import ResourcePool
    from neoproto.runtime.registration import Dispatch, Execute, custom_dispatch, mesh_dispatch, register
    from neoproto.runtime.runtime import Runtime, current_runtime
    from neoproto.runtime.signals import Terminated
    from neoproto.runtime.worker import ClassWithInitArgs, Worker

_HOMES = {
    "RemoteCall": "call",
    "RemoteWorkerGroup": "group",
    "WorkerGroup": "group",
    "WorkerHandle": "handles",
    "remote": "handles",
    "ResourcePool": "pool",
    "Dispatch": "registration",
    "Execute": "registration",
    "custom_dispatch": "registration",
    "mesh_dispatch": "registration",
    "register": "registration",
    "Runtime": "runtime",
    "current_runtime": "runtime",
    "Terminated": "signals",
    "ClassWithInitArgs": "worker",
    "Worker": "worker",
    "put": "objects",
    "get": "objects",
    "delete": "objects",
    "put_batch": "objects",
    "get_batch": "objects",
    "delete_batch": "objects",
}

__all__ = [
    "ClassWithInitArgs",
    "Dispatch",
    "Execute",
    "RemoteCall",
    "RemoteWorkerGroup",
    "ResourcePool",
    "Runtime",
    "Terminated",
    "Worker",
    "WorkerGroup",
    "WorkerHandle",
    "current_runtime",
    "custom_dispatch",
    "delete",
    "delete_batch",
    "get",
    "get_batch",
    "mesh_dispatch",
    "put",
    "put_batch",
    "register",
    "remote",
]


def __getattr__(name: str) -> Any:
    # Imported when used: a worker process that only needs `Worker` does not load the controller's side.
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{home}"), name)
