"""Gives prompts to replicas and their answers to the replay buffer.

    prompt queue ──claim──> replica.generate (one call a chunk) ──> replay buffer
         ▲                        │
         └────── give back ───────┘ the replica failed: its prompts are for others, or for when it is up again

It sets no replica's weights: it reads what each of them serves, and starts a prompt once
replicas serve the version that the prompt asks for. A call that failed for another reason ends the dispatcher
with its cause.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import NoReturn

from neoproto.data import DataProto
from neoproto.errors import DeadlineExceeded, ReplicaFailed
from neoproto.trainer.prompt_queue import PromptQueue, PromptTicket, prompts_of
from neoproto.trainer.protocols import ServingReplica
from neoproto.trainer.replay_buffer import ReplayBuffer
from neoproto.trainer.routing import Routes
from neoproto.trainer.tasks import first_cause
from neoproto.weights.version import WeightVersion

log = logging.getLogger("neoproto.trainer")

# A call ends at its own deadline with a better message than ours, so ours comes a little later.
_GRACE_SECONDS = 5.0
_IDLE_SECONDS = 1.0


class Dispatcher:
    """See the module.

    Args:
        queue: where prompts come from.
        buffer: where groups go.
        replicas: at least one.
        serving: which version each replica serves, by name; with a deadline of its own.
        max_inflight_prompts: of the queue. No replica gets more than its share of it, rounded up, so that
            one that is first to serve a version is not given everything.
        max_per_call: prompts a call at most, >= 1. A call returns when its longest sample is done.
        poll_interval: seconds between two looks at what replicas serve.
        timeout: seconds a call may take.
        version_aware: start a prompt once one replica serves its version; otherwise once all do.

    Raises:
        ValueError: no replica, two of one name, or `max_per_call` below 1.
    """

    def __init__(
        self,
        queue: PromptQueue,
        buffer: ReplayBuffer,
        replicas: Sequence[ServingReplica],
        serving: Callable[[], Awaitable[Mapping[str, WeightVersion]]],
        *,
        max_inflight_prompts: int,
        max_per_call: int,
        poll_interval: float,
        timeout: float,
        version_aware: bool,
    ) -> None:
        self._replicas = {replica.name: replica for replica in replicas}
        if not replicas or len(self._replicas) < len(replicas) or max_per_call < 1:
            raise ValueError(
                f"a dispatcher needs replicas with different names and max_per_call >= 1, got "
                f"{[replica.name for replica in replicas]} and {max_per_call}"
            )
        self._queue, self._buffer, self._serving = queue, buffer, serving
        self._max_per_call, self._poll_interval, self._timeout = max_per_call, poll_interval, timeout
        share = -(-max_inflight_prompts // len(replicas))
        self._routes = Routes(list(self._replicas), most_in_flight=share, version_aware=version_aware)
        self._failing = False

    async def run(self) -> NoReturn:
        """Dispatch until cancelled.

        Consumes: pending prompts. Waits for: prompts, replicas that serve their versions, answers. Produces:
        chunks for the replay buffer. Unblocked by: a change in the queue, an answer (which is one), the next
        look at what replicas serve. The prompts of a failed call are given back; one that failed for another
        reason than its replica's failure ends this with its cause.
        """
        now = asyncio.get_running_loop().time
        try:
            async with asyncio.TaskGroup() as calls:
                while True:
                    if not self._queue.counts().pending:
                        # Nothing to start, but the registry's failure must end this: it is asked each second.
                        await self._queue.wait_changed(_IDLE_SECONDS)
                    serving = await self._serving()
                    self._routes.update(serving, up=self._up())
                    look_again = now() + self._poll_interval
                    self._start_ready(calls)
                    # No await between starting and waiting: what changes in between would be missed.
                    while (left := look_again - now()) > 0:
                        await self._queue.wait_changed(left)
                        self._start_ready(calls)
        except BaseExceptionGroup as failures:
            cause = first_cause(failures)
            raise cause from cause.__cause__

    def _start_ready(self, calls: asyncio.TaskGroup) -> None:
        """Start a call for every chunk of prompts that a replica has room for."""
        routes, chosen = self._routes, dict[WeightVersion, str]()

        def ready(version: WeightVersion) -> bool:
            name = self._choose(version)
            if name is not None:
                chosen[version] = name
            return name is not None

        while not self._failing and (oldest := self._queue.claim_nowait(1, ready)):
            name = chosen[oldest[0].min_weight_version]
            more = min(self._max_per_call, routes.room(name)) - 1
            tickets = oldest + self._queue.claim_nowait(more, partial(routes.suits, name))
            routes.started(name, len(tickets))
            self._queue.mark_started(tickets, routes.serves(name))
            calls.create_task(self._generate(name, tickets), name=f"generate on {name}")

    def _up(self) -> set[str]:
        return {name for name, replica in self._replicas.items() if replica.up}

    def _choose(self, version: WeightVersion) -> str | None:
        """The replica for a prompt that asks for `version`, if one has room and has not failed meanwhile."""
        while (name := self._routes.choose(version)) is not None and not self._replicas[name].up:
            self._routes.drop(name)
        return name

    async def _generate(self, name: str, tickets: Sequence[PromptTicket]) -> None:
        """One call: answers go to the buffer, the prompts of a failed call back to the queue."""
        prompts = prompts_of(tickets)
        prompts.meta_info = {"validate": False}
        try:
            answers = await self._answered(self._replicas[name], prompts)
        except ReplicaFailed as failure:
            self._queue.give_back(tickets, failure)
            log.info("%d prompts of %s are pending again", len(tickets), name)
            return
        except Exception as cause:
            # Before the prompts are given back, which wakes the loop: it would claim them again, although the
            # task group is about to stop all calls.
            self._failing = True
            self._queue.give_back(tickets, cause)
            raise
        finally:
            self._routes.ended(name, len(tickets))
        # No await between the two: in a checkpoint a prompt is either in the queue or in the buffer.
        self._buffer.add_chunk(tickets, answers)
        self._queue.finish(tickets)

    async def _answered(self, replica: ServingReplica, prompts: DataProto) -> DataProto:
        limit = self._timeout + _GRACE_SECONDS
        try:
            async with asyncio.timeout(limit) as scope:
                return await replica.generate(prompts, self._timeout)
        except TimeoutError:
            if not scope.expired():  # the call's own deadline, with its own words
                raise
            raise DeadlineExceeded("generate", replica.name, (), limit) from None
