"""The control plane: what a person imports to write workers, controller scripts and notebooks.

    group.update(batch) ──> dispatch ──> CallTracker.start ──> backend ──> WorkerExecutor ──> Worker.update
    RemoteCall <──settle──────────────── CallTracker.on_reply <── backend <── reply ─┘

Calls: call, call_tracker, deadline, wire, executor. Groups: group, group_state, dispatch, registration,
handles, pool, worker. The root: runtime, relay, attached, signals, processes, reaper. backend: what a backend
provides. docs/runtime-internals.md has the whole walk.
"""

import lazy_loader

# The names of __init__.pyi, each imported when it is first used.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
