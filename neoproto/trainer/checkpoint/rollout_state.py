"""What lies between the data and training in the asynchronous modes, on its way to a checkpoint and back.

    queue (pending, running) ─┐                                   ┌─> queue (all pending)
    feeder's remainder       ─┼─> queue.batch, buffer.batch ──────┼─> feeder
    replay buffer            ─┘   (prompts, finished samples)     └─> replay buffer

A prompt is in exactly one of them, before and after: none is lost, none is there twice. Prompts that were
being generated are generated again, with the tries they had.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from neoproto.data import DataProto
from neoproto.files import sync
from neoproto.trainer.checkpoint.folder import digest
from neoproto.trainer.prompt_queue import PromptFeeder, PromptQueue, PromptTicket, QueueState
from neoproto.trainer.replay_buffer import BufferState, ReplayBuffer, SampledGroup
from neoproto.trainer.shared import CountedBatch
from neoproto.weights.version import WeightVersion

QUEUE, BUFFER = "queue.batch", "buffer.batch"
Rows = tuple[CountedBatch, Sequence[int]]


class RolloutSnapshot:
    """Queue, feeder and buffer of one moment; their columns stay in the store until `release`.

    Taking and releasing belong to the event loop of the three; `write` may run in another thread.
    """

    def __init__(self, queue: PromptQueue, feeder: PromptFeeder, buffer: ReplayBuffer) -> None:
        self._queue, self._buffer, self._rest = queue.state(), buffer.state(), feeder.remainder()
        held = [ticket.source for ticket in self._queue.tickets]
        held += [group.chunk for group in self._buffer.groups]
        held += [self._rest[0]] if self._rest is not None else []
        self._held = {id(batch): batch for batch in held}
        for batch in self._held.values():
            batch.hold()

    def write(self, folder: Path) -> dict[str, str]:
        """Write both files, synced; their names and SHA-256."""
        queue, buffer = self._queue, self._buffer
        prompts: list[Rows] = [(ticket.source, [ticket.row]) for ticket in queue.tickets]
        prompts += [self._rest] if self._rest is not None else []
        digests = _save(
            folder / QUEUE,
            prompts,
            {
                "tickets": [_ticket_to_plain(ticket) for ticket in queue.tickets],
                "next_serial": queue.next_serial,
                "finished": queue.finished,
            },
        )
        groups = [
            {
                "ticket": _ticket_to_plain(group.ticket),
                "clock": _version_to_plain(group.clock),
                "spans": list(group.spans),
            }
            for group in buffer.groups
        ]
        samples: list[Rows] = [(group.chunk, group.rows) for group in buffer.groups]
        return digests | _save(folder / BUFFER, samples, {"groups": groups, "evicted": buffer.evicted})

    def release(self) -> None:
        """Release the columns; call it once."""
        for batch in self._held.values():
            batch.done()


def restore_rollout(folder: Path, queue: PromptQueue, feeder: PromptFeeder, buffer: ReplayBuffer) -> None:
    """Fill an unused queue, feeder and buffer from a checkpoint; columns go to the active store.

    Raises:
        ValueError: one of them was used already, or a file is not what `RolloutSnapshot` writes.
    """
    prompts = DataProto.load_from_disk(folder / QUEUE)
    meta = dict(prompts.meta_info)
    prompts.meta_info = {}
    tickets: tuple[PromptTicket, ...] = ()
    if len(prompts):
        source = CountedBatch(prompts, len(prompts))
        tickets = tuple(_ticket_from_plain(plain, source, row) for row, plain in enumerate(meta["tickets"]))
        feeder.restore(source, len(tickets))
    queue.restore(
        QueueState(tickets=tickets, next_serial=int(meta["next_serial"]), finished=int(meta["finished"]))
    )
    samples = DataProto.load_from_disk(folder / BUFFER)
    meta = dict(samples.meta_info)
    samples.meta_info = {}
    buffer.restore(BufferState(groups=tuple(_groups(samples, meta["groups"])), evicted=int(meta["evicted"])))


def _save(path: Path, rows: Iterable[Rows], meta: Mapping[str, Any]) -> dict[str, str]:
    """One batch of these rows, in their order; neighbours of one batch are taken together."""
    parts: list[tuple[CountedBatch, list[int]]] = []
    for batch, places in rows:
        if not parts or parts[-1][0] is not batch:
            parts.append((batch, []))
        parts[-1][1].extend(places)
    whole = (
        DataProto.concat([batch.rows(places) for batch, places in parts]) if parts else DataProto.from_dict()
    )
    whole.meta_info = dict(meta)
    whole.save_to_disk(path)
    sync(path)
    return {path.name: digest(path)}


def _groups(samples: DataProto, plain: Sequence[Mapping[str, Any]]) -> Iterable[SampledGroup]:
    if not plain:
        return
    chunk = CountedBatch(samples, len(plain))
    start = 0
    for group in plain:
        rows = range(start, start + len(group["spans"]))
        start = rows.stop
        ticket = _ticket_from_plain(group["ticket"], chunk, rows.start)
        yield SampledGroup(
            ticket=ticket,
            clock=_version_from_plain(group["clock"]),
            spans=tuple(group["spans"]),
            chunk=chunk,
            rows=rows,
        )


def _ticket_to_plain(ticket: PromptTicket) -> dict[str, Any]:
    return {
        "serial": ticket.serial,
        "uid": ticket.uid,
        "enqueue_step": ticket.enqueue_step,
        "min_weight_version": _version_to_plain(ticket.min_weight_version),
        "tries": ticket.tries,
    }


def _ticket_from_plain(plain: Mapping[str, Any], source: CountedBatch, row: int) -> PromptTicket:
    return PromptTicket(
        serial=int(plain["serial"]),
        uid=str(plain["uid"]),
        enqueue_step=int(plain["enqueue_step"]),
        min_weight_version=_version_from_plain(plain["min_weight_version"]),
        tries=int(plain["tries"]),
        source=source,
        row=row,
    )


def _version_to_plain(version: WeightVersion) -> list[int]:
    return [version.epoch, version.n]


def _version_from_plain(plain: Sequence[int]) -> WeightVersion:
    return WeightVersion(epoch=int(plain[0]), n=int(plain[1]))
