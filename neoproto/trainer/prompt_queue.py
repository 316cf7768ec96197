"""Prompts on their way through rollout.

    add ──> pending ──claim──> running ──finish──> finished
               ▲                  │ │
               └────give back─────┘ └──fail──> failed: raised when the trainer next looks

A prompt is in exactly one state. Pending prompts are claimed oldest first among those whose weight version is
ready, and never twice. Everything here belongs to one event loop and blocks on nothing but `wait_changed`.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

from neoproto.data import DataProto
from neoproto.errors import PromptFailed
from neoproto.trainer.shared import Changes, CountedBatch
from neoproto.weights.version import WeightVersion, group_clock


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptTicket:
    """One prompt of a run; the samples drawn for it are a group.

    Attributes:
        serial: of the ticket and of its group; unique in the run, in the order of adding. A data set walked
            through twice has its uids on two tickets each.
        uid: of the prompt, from the data.
        enqueue_step: training step that asked for it, from 1; 0 before training.
        min_weight_version: what a replica must serve to be given it.
        tries: how often it was given back.
        source, row: where the prompt is.
    """

    serial: int
    uid: str
    enqueue_step: int
    min_weight_version: WeightVersion
    tries: int = 0
    source: CountedBatch = field(repr=False, compare=False)
    row: int = field(repr=False, compare=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptCounts:
    """How many prompts are in which state. `finished` counts those of the whole run."""

    pending: int
    running: int
    finished: int
    failed: int


@dataclass(frozen=True, kw_only=True, slots=True)
class QueueState:
    """What a checkpoint needs of a queue.

    Attributes:
        tickets: pending and running, by serial. What was running gets no answer in a restored queue.
        next_serial: of the next ticket.
        finished: prompts, in the whole run.
    """

    tickets: tuple[PromptTicket, ...]
    next_serial: int
    finished: int


@dataclass(frozen=True, kw_only=True, slots=True)
class _FailedPrompt:
    ticket: PromptTicket
    cause: BaseException


class PromptQueue:
    """See the module.

    Args:
        max_inflight_prompts: most prompts running at a time, >= 1.
        max_tries: how often a prompt is given to a replica before it counts as failed, >= 1.

    Raises:
        ValueError: a number below 1.
    """

    def __init__(self, *, max_inflight_prompts: int, max_tries: int = 3) -> None:
        if max_inflight_prompts < 1 or max_tries < 1:
            raise ValueError(
                f"max_inflight_prompts and max_tries must be >= 1, got {max_inflight_prompts} and {max_tries}"
            )
        self._max_inflight, self._max_tries = max_inflight_prompts, max_tries
        self._next_serial = 0
        # A heap of serials for each version asked for: few versions, whatever the number of prompts.
        self._pending: dict[WeightVersion, list[int]] = {}
        self._tickets: dict[int, PromptTicket] = {}  # pending and running
        self._running: dict[int, WeightVersion] = {}  # serial -> clock
        self._failed: dict[int, _FailedPrompt] = {}
        self._finished = 0
        self._changes = Changes()

    def add(
        self,
        prompts: DataProto | CountedBatch,
        rows: Sequence[int] | None = None,
        *,
        enqueue_step: int,
        min_weight_version: WeightVersion,
    ) -> list[PromptTicket]:
        """Enqueue prompts: one ticket a row, in order.

        Args:
            prompts: with the column `uid`. The queue releases it when all of its prompts are finished or
                failed; its meta_info is left behind.
            rows: which rows, if not all; only of a counted batch with one part a row, whose other rows
                follow.

        Raises:
            ValueError: some rows of a batch that is not counted.
        """
        if isinstance(prompts, CountedBatch):
            source = prompts
        elif rows is None:
            source = CountedBatch(prompts, len(prompts))
        else:
            raise ValueError("some rows of a batch can be added only if it is counted")
        rows = range(len(source.batch)) if rows is None else rows
        uids = source.batch.select_idxs(list(rows))["uid"]
        tickets = [
            PromptTicket(
                serial=self._next_serial + place,
                uid=str(uid),
                enqueue_step=enqueue_step,
                min_weight_version=min_weight_version,
                source=source,
                row=row,
            )
            for place, (row, uid) in enumerate(zip(rows, uids, strict=True))
        ]
        self._next_serial += len(tickets)
        for ticket in tickets:
            self._to_pending(ticket)
        self._changes.notify()
        return tickets

    def claim_nowait(self, limit: int, ready: Callable[[WeightVersion], bool]) -> list[PromptTicket]:
        """Take pending prompts to run: the oldest that are ready, at most `limit` and what may be in flight.

        Args:
            ready: whether there is a replica to give a prompt to that asks for this version.
        """
        limit = min(limit, self._max_inflight - len(self._running))
        if limit < 1:
            return []
        heaps = [heap for version, heap in self._pending.items() if ready(version)]
        tickets: list[PromptTicket] = []
        while heaps and len(tickets) < limit:
            heap = min(heaps, key=lambda serials: serials[0])
            ticket = self._tickets[heapq.heappop(heap)]
            if not heap:
                heaps.remove(heap)
                del self._pending[ticket.min_weight_version]
            self._running[ticket.serial] = group_clock((), ticket.min_weight_version)
            tickets.append(ticket)
        return tickets

    def mark_started(self, tickets: Iterable[PromptTicket], served: WeightVersion) -> None:
        """Running prompts were handed to a replica that served this version: nothing older answers them.

        Raises:
            ValueError: one of them is not running.
        """
        for ticket in tickets:
            self._require_running(ticket)
            self._running[ticket.serial] = group_clock((served,), ticket.min_weight_version)

    def finish(self, tickets: Iterable[PromptTicket]) -> None:
        """Running prompts have their answers.

        Raises:
            ValueError: one of them is not running.
        """
        for ticket in tickets:
            self._end(ticket)
            self._finished += 1
        self._changes.notify()

    def fail(self, tickets: Iterable[PromptTicket], cause: BaseException) -> None:
        """Running prompts get no answer, and are not to be tried again.

        Raises:
            ValueError: one of them is not running.
        """
        for ticket in tickets:
            self._end(ticket)
            self._failed[ticket.serial] = _FailedPrompt(ticket=ticket, cause=cause)
        self._changes.notify()

    def give_back(self, tickets: Iterable[PromptTicket], cause: BaseException) -> None:
        """The replica of these prompts failed: they are pending again, or failed if this was their last try.

        Raises:
            ValueError: one of them is not running.
        """
        for ticket in tickets:
            tried = replace(ticket, tries=ticket.tries + 1)
            if tried.tries >= self._max_tries:
                self.fail([tried], cause)
            else:
                self._require_running(ticket)
                del self._running[ticket.serial]
                self._to_pending(tried)
        self._changes.notify()

    def raise_if_failed(self) -> None:
        """Raise the failure of a prompt, for the trainer.

        Raises:
            PromptFailed: there is one; of several the oldest.
        """
        if self._failed:
            failure = self._failed[min(self._failed)]
            cause = f"{type(failure.cause).__name__}: {failure.cause}"
            raise PromptFailed(failure.ticket.uid, max(1, failure.ticket.tries), cause) from failure.cause

    def counts(self) -> PromptCounts:
        """How many prompts are in which state."""
        return PromptCounts(
            pending=len(self._tickets) - len(self._running),
            running=len(self._running),
            finished=self._finished,
            failed=len(self._failed),
        )

    def oldest_running(self) -> WeightVersion | None:
        """The clock of the stalest group that is being generated; None if none is."""
        return min(self._running.values(), default=None)

    async def wait_changed(self, timeout: float) -> None:
        """Return at the next change of a prompt's state, claims apart, or after `timeout` seconds."""
        await self._changes.wait(timeout)

    def state(self) -> QueueState:
        """The queue as it is now; the tickets' batches are not held."""
        tickets = tuple(self._tickets[serial] for serial in sorted(self._tickets))
        return QueueState(tickets=tickets, next_serial=self._next_serial, finished=self._finished)

    def restore(self, state: QueueState) -> None:
        """Resume from `state`, with every prompt pending; each ticket is a part of its source.

        Raises:
            ValueError: the queue was used already.
        """
        if self._next_serial:
            raise ValueError("only an unused prompt queue can be restored")
        self._next_serial, self._finished = state.next_serial, state.finished
        for ticket in state.tickets:
            self._to_pending(ticket)
        self._changes.notify()

    def _to_pending(self, ticket: PromptTicket) -> None:
        self._tickets[ticket.serial] = ticket
        heapq.heappush(self._pending.setdefault(ticket.min_weight_version, []), ticket.serial)

    def _require_running(self, ticket: PromptTicket) -> None:
        if ticket.serial not in self._running:
            raise ValueError(f"prompt {ticket.uid} (ticket {ticket.serial}) is not running")

    def _end(self, ticket: PromptTicket) -> None:
        self._require_running(ticket)
        del self._running[ticket.serial], self._tickets[ticket.serial]
        ticket.source.done()


def prompts_of(tickets: Sequence[PromptTicket]) -> DataProto:
    """The prompts of some tickets as one batch, in their order, without meta_info.

    Raises:
        ValueError: no ticket.
    """
    parts: list[tuple[CountedBatch, list[int]]] = []
    for ticket in tickets:
        if not parts or parts[-1][0] is not ticket.source:
            parts.append((ticket.source, []))
        parts[-1][1].append(ticket.row)
    batches = [source.rows(rows) for source, rows in parts]
    return batches[0] if len(batches) == 1 else DataProto.concat(batches)


class PromptFeeder:
    """Draws prompts from the data, as many as are asked for, and enqueues them.

    Args:
        queue: where they go.
        draw: the next batch of the training data, of any length; without end.
    """

    def __init__(self, queue: PromptQueue, draw: Callable[[], DataProto]) -> None:
        self._queue, self._draw = queue, draw
        self._source: CountedBatch | None = None
        self._next_row = 0

    def feed(self, count: int, *, enqueue_step: int, min_weight_version: WeightVersion) -> None:
        """Enqueue exactly `count` prompts; what is left of a drawn batch is kept for the next time."""
        while count > 0:
            if self._source is None or self._next_row == len(self._source.batch):
                batch = self._draw()
                self._source, self._next_row = CountedBatch(batch, len(batch)), 0
            end = min(self._next_row + count, len(self._source.batch))
            rows = range(self._next_row, end)
            self._queue.add(
                self._source, rows, enqueue_step=enqueue_step, min_weight_version=min_weight_version
            )
            self._next_row = end
            count -= len(rows)

    def remainder(self) -> tuple[CountedBatch, range] | None:
        """The rows that are drawn and not enqueued yet, and where they are; None if there are none."""
        if self._source is None or self._next_row == len(self._source.batch):
            return None
        return self._source, range(self._next_row, len(self._source.batch))

    def restore(self, source: CountedBatch, next_row: int) -> None:
        """Enqueue these rows, from `next_row` to the last, before anything is drawn; each is a part."""
        self._source, self._next_row = source, next_row
