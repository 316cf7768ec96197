"""Keeps rollout replicas alive: notices that one has failed, and has another process take its place.

    starting ──attach, load──> up ──a call, the agent, a heartbeat fails──> failed
       ▲                                                                      │ forgotten by the registry,
       └──────────────── spawn on its place, so often ────────────────────────┘ its process released

A replica is up once it serves weights no older than what was current when it began to load, nor than any
version that was waited for since. What is called here at its (re)start and while it lives
(`attach_registry`, the first `update_weights`, `run_agent`, `ping`) keeps the process going; it is no part of
the training loop, which in `decoupled_async` calls nothing of a replica but generation.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, NoReturn

from neoproto.errors import (
    ConfigError,
    DeadlineExceeded,
    NeoProtoError,
    ReplicaFailed,
    ReplicaLost,
    RuntimeClosed,
)
from neoproto.text import first_line
from neoproto.threads import on_thread
from neoproto.trainer.protocols import ReplicaProcess
from neoproto.trainer.replicas import Replica, ReplicaSet, answer
from neoproto.trainer.tasks import owned_tasks
from neoproto.weights import WeightRegistry, WeightVersion

log = logging.getLogger("neoproto.trainer")

_CLOSE_S = 60.0
"""How long a failed process may take to be released; seconds, as a rule."""
_VERSION_S = 5.0
"""How long one look for a first version lasts."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SupervisionOptions:
    """Times of supervision in seconds, and its limits.

    Attributes:
        max_restarts: of each replica, before it counts as lost.
        heartbeat_interval, heartbeat_timeout: between two heartbeats; how long one may stay unanswered.
        start_limit: starting a process, whatever deadline it has of its own.
        load_timeout: attaching one to the registry, and its first load.
        agents: each replica updates itself; otherwise the trainer updates it.
    """

    max_restarts: int
    heartbeat_interval: float
    heartbeat_timeout: float
    start_limit: float
    load_timeout: float
    agents: bool


class Supervisor:
    """See the module.

    Args:
        replicas: started, and not attached to the registry.
        registry: the weight registry.
        registry_group: what replicas reach it by.
        spawn: starts the process of a replica, by its number, and waits for it; blocks. Whatever it raises
            counts as a failure of that start, unless the runtime is closed or the input wrong.
        print_line: shows a person a line.
    """

    def __init__(
        self,
        replicas: ReplicaSet,
        registry: WeightRegistry,
        registry_group: Any,
        spawn: Callable[[int], ReplicaProcess],
        options: SupervisionOptions,
        *,
        print_line: Callable[[str], None] = lambda line: None,
    ) -> None:
        self._set, self._registry, self._registry_group = replicas, registry, registry_group
        self._spawn, self._options, self._print_line = spawn, options, print_line

    async def run(self) -> NoReturn:
        """Supervise all replicas until cancelled.

        Consumes: failures of replicas. Waits for: each of them to fail. Produces: replicas that are up.
        Unblocked by: a failed call, agent or heartbeat of a replica, each start of one, and its deadlines.

        Raises:
            ReplicaLost: a replica failed once more than it may be restarted.
            NeoProtoError: the registry is gone, or weights do not fit the model.
        """
        async with owned_tasks() as tasks:
            for index, replica in enumerate(self._set.replicas):
                tasks.create_task(self._keep(index, replica), name=f"supervise {replica.name}")
        raise AssertionError("unreachable")

    async def _keep(self, index: int, replica: Replica) -> NoReturn:
        """One replica's life: serve until it fails, be replaced, serve again."""
        causes: list[str] = []
        since: float | None = None  # when it failed last; None at the start of the run
        while True:
            try:
                await self._serve(replica, since)
            except ReplicaFailed as failure:
                task = asyncio.current_task()
                if task is not None and task.cancelling():
                    # Cancelled as it failed: a task group then raises the failure alone (before Python 3.13).
                    raise asyncio.CancelledError from failure
                since = _now()
                await self._replace(index, replica, failure, causes)

    async def _serve(self, replica: Replica, since: float | None) -> NoReturn:
        """From a started process to its failure, which is raised as `ReplicaFailed`."""
        async with owned_tasks() as tasks:
            tasks.create_task(self._heartbeat(replica))
            served = await self._load(replica)
            if self._options.agents:
                tasks.create_task(self._agent(replica))
            replica.come_up()
            if since is not None:
                seconds = _now() - since
                self._print_line(
                    f"replica {replica.name} is up again on weights {served}, after {seconds:.1f} s"
                )
                log.info("replica %s is up again on weights %s, %.1f s", replica.name, served, seconds)
            while replica.failure is None:
                await self._set.changes.wait(self._options.heartbeat_timeout)
            raise replica.failed()
        raise AssertionError("unreachable")

    async def _load(self, replica: Replica) -> WeightVersion:
        """Have a new process serve what is current; what it serves."""
        limit, name = self._options.load_timeout, replica.process.group.name
        with replica.calling() as process:
            await answer(process.within(limit).attach_registry(self._registry_group, name))
        while True:
            current = await self._registry.latest()
            if current is None:  # a run begins: its policy has not published yet
                await self._registry.wait_newer(None, _VERSION_S)
                continue
            with replica.calling() as process:
                await answer(process.within(limit).update_weights(current.version))
            served = (await self._registry.serving()).get(name)
            # A newer version may have been asked for while it loaded. From this look to `come_up` nothing is
            # awaited: none can be asked for in between that it would come up below.
            wanted = max(current.version, self._set.min_version or current.version)
            if served is not None and served >= wanted:
                return served

    async def _agent(self, replica: Replica) -> NoReturn:
        """Its update agent: no deadline, since it has no end of its own."""
        with replica.calling() as process:
            await answer(process.within(None).run_agent())
        raise replica.fail(NeoProtoError("its update agent ended"))

    async def _heartbeat(self, replica: Replica) -> NoReturn:
        """Send heartbeats until the replica fails to answer.

        Two heartbeats in a row have to be missed, of half the time each: were this process held up, the
        deadline of one could pass with its answer waiting here.
        """
        limit, missed = self._options.heartbeat_timeout / 2, 0
        while True:
            with replica.calling() as process:
                try:
                    await answer(process.within(limit).ping())
                    missed = 0
                except DeadlineExceeded as error:
                    missed += 1
                    if missed == 2:
                        text = f"no answer to a heartbeat for {self._options.heartbeat_timeout:g} s"
                        log.warning("replica %s: %s", replica.name, error)
                        raise replica.fail(NeoProtoError(text)) from error
                    continue
            await asyncio.sleep(self._options.heartbeat_interval)

    async def _replace(self, index: int, replica: Replica, failure: ReplicaFailed, causes: list[str]) -> None:
        """Release a failed process and start another one on its place; a failed start counts as well.

        Raises:
            ReplicaLost: there is no restart left.
        """
        most = self._options.max_restarts
        cause: BaseException = failure
        causes.append(failure.reason)
        while True:
            if replica.restarts == most:
                raise ReplicaLost(replica.name, most, causes) from cause
            replica.restarts += 1
            self._print_line(
                f"replica {replica.name} failed ({causes[-1]}); restarting it, {replica.restarts} of {most}"
            )
            await self._release(replica)
            try:
                replica.renew(await self._started(index, replica))
            except (RuntimeClosed, ConfigError):
                raise
            except Exception as error:
                log.warning("replica %s did not start", replica.name, exc_info=True)
                cause = error
                causes.append(first_line(error))
            else:
                return

    async def _release(self, replica: Replica) -> None:
        """End what is left of a process; its device is free then, and its leases end before it is."""
        group = replica.process.group
        # First: its leases would hold up publishing for as long as ending it takes.
        await self._registry.forget_replica(group.name)
        async with _bounded("close", group.name, _CLOSE_S):
            await on_thread(lambda: group.close(0.0), name=f"close {group.name}")
        # Again: until it was ended it may have taken a lease or reported what it serves.
        await self._registry.forget_replica(group.name)

    async def _started(self, index: int, replica: Replica) -> ReplicaProcess:
        async with _bounded("start", replica.name, self._options.start_limit):
            return await on_thread(
                lambda: self._spawn(index),
                name=f"start {replica.name}",
                unwanted=lambda process: process.group.close(0.0),
            )


@asynccontextmanager
async def _bounded(what: str, name: str, seconds: float) -> AsyncIterator[None]:
    """Raise DeadlineExceeded where the block takes longer; a thread in it is left to itself."""
    try:
        async with asyncio.timeout(seconds) as scope:
            yield
    except TimeoutError as error:
        if not scope.expired():
            raise
        raise DeadlineExceeded(what, name, (0,), seconds) from error


def _now() -> float:
    return asyncio.get_running_loop().time()
