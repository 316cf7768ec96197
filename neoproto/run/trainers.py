"""Which trainer a run has, and who keeps its replicas alive meanwhile."""

from __future__ import annotations

import asyncio
import functools
import inspect
import os
from collections.abc import Callable, Coroutine
from typing import Any

from neoproto.errors import NeoProtoError
from neoproto.runtime.failures import ProcessFailure
from neoproto.trainer.asynchronous import AsyncTrainer
from neoproto.trainer.checkpoint.resume import OWN_LOOP_NONE, code_of
from neoproto.trainer.metrics.record import TrainingParts, TrainingResult
from neoproto.trainer.replicas import ReplicaSet
from neoproto.trainer.supervision import Supervisor
from neoproto.trainer.sync import SyncTrainer
from neoproto.trainer.tasks import beside
from neoproto.user_code import end_fork, is_signal, told_exit

Loop = Callable[[TrainingParts], Coroutine[Any, Any, TrainingResult]]
"""A loop of the user's own: trains up to `parts.total_steps`, from `parts.start`."""


def loop_code(own_loop: Loop | None) -> str:
    """Which loop it is: a user's own by its name and the content of its file."""
    if own_loop is None:
        return OWN_LOOP_NONE
    function = inspect.unwrap(own_loop)
    while isinstance(function, functools.partial):
        function = function.func
    code = getattr(function, "__code__", None) or getattr(type(function).__call__, "__code__", None)
    name = getattr(function, "__qualname__", type(function).__qualname__)
    return code_of(code.co_filename if code else "", name)


def train(
    parts: TrainingParts,
    replicas: ReplicaSet,
    supervisor: Supervisor,
    failure: ProcessFailure,
    own_loop: Loop | None = None,
) -> TrainingResult:
    """Run a loop to its end: the user's own, or that of the configured mode.

    Args:
        replicas: those of `parts.workers.rollout`.
        supervisor: of these replicas.
        failure: fails when a process dies that is not replaced.
    """
    if own_loop is not None:
        training = own_training(own_loop, parts)
    elif parts.config.trainer.mode == "sync":
        training = SyncTrainer(parts).run()
    else:
        training = AsyncTrainer(parts, replicas, replicas.replicas).run()
    others = {
        "the supervision of the replicas": supervisor.run(),
        "the watch over processes": no_process_failure(failure),
    }
    return asyncio.run(beside(training, others))


async def own_training(loop: Loop, parts: TrainingParts) -> TrainingResult:
    """The user's loop. An exit that it raises is its failure; a process that it forked does not come back.

    Raises:
        NeoProtoError: it raised `SystemExit`, `KeyboardInterrupt` or the like.
        Whatever else it raises.
    """
    pid = os.getpid()
    try:
        result = await loop(parts)
    except BaseException as error:
        end_fork(pid, error)
        if isinstance(error, Exception | asyncio.CancelledError) or is_signal(error):
            raise
        raise NeoProtoError(f"the trainer loop raised {told_exit(error)}") from error
    end_fork(pid, None)
    return result


async def no_process_failure(failure: ProcessFailure) -> None:
    """Wait until a process dies, and raise that: what waits for others would notice it only later."""
    await asyncio.shield(asyncio.wrap_future(failure))
