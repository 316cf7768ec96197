"""Finished groups of samples, waiting to be trained on.

    dispatcher ──add_chunk──> [ group group group … ] ──sample──> training batch ──done──> columns released
                                    │
                                    └── too stale ──> evicted, counted, asked for again (refill)

A group is the samples of one prompt and is never parted. A chunk is the batch that one generate call
returned: some whole groups, whose stored columns are released when the last of them is trained on or evicted.
Until then its groups are row numbers, and a training batch is made of those without reading a sample.

A group is dated by the oldest weight version that one of its samples started on; nothing else is asked when
it is evicted, chosen, measured or checked.

Shape legend: b = samples of a chunk, t = response tokens (fixed width R).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from neoproto.data import DataProto
from neoproto.errors import RolloutError, SamplesMissing
from neoproto.trainer.prompt_queue import PromptQueue, PromptTicket
from neoproto.trainer.shared import Changes, CountedBatch
from neoproto.weights.version import WeightVersion, group_clock, staleness, too_stale

Strategy = Literal["drop", "wait"]
# More evictions than this for each group asked for mean that generation never catches up: an error, no wait.
MOST_EVICTED_PER_GROUP = 8
_EVICTED_BECAUSE = {"drop": "stale", "wait": "crowded_out"}


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SampledGroup:
    """One finished group.

    Attributes:
        ticket: of its prompt.
        clock: the oldest weight version that one of its samples started on.
        spans: for each sample, on how many weight versions its tokens were generated.
        chunk, rows: where the samples are.
    """

    ticket: PromptTicket
    clock: WeightVersion
    spans: tuple[int, ...]
    chunk: CountedBatch
    rows: range


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Sampled:
    """One training batch.

    Attributes:
        batch: whole groups, the samples of a group next to each other; references into the chunks. It is not
            to be released: see `ReplayBuffer.done`.
        groups: what it consists of, in the order of the rows.
        metrics: `training/off_policy/*`.
    """

    batch: DataProto
    groups: tuple[SampledGroup, ...]
    metrics: dict[str, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class BufferState:
    """What a checkpoint needs of a buffer: its groups, and how many were evicted since the last batch."""

    groups: tuple[SampledGroup, ...]
    evicted: int


class ReplayBuffer:
    """See the module. Belongs to one event loop; blocks on nothing but `sample`.

    Args:
        queue: of the same run; asked for failed prompts, and for the age of those still being generated.
        n: samples a prompt.
        epoch: of the run; the columns carry the versions' numbers only.
        max_off_policy_threshold: how many publishes behind the newest version a group may be trained on.
        strategy: `drop` evicts groups that are further behind. `wait` samples only when no group that is
            being generated would be further behind at the next sampling; only groups that no batch had room
            for are evicted then.
        refill: enqueues so many prompts; called with the number of groups evicted.
        poll_interval: seconds between two health checks.
        health: raises if something that samples depend on has failed.

    Raises:
        ValueError: a number that makes no sense.
    """

    def __init__(
        self,
        queue: PromptQueue,
        *,
        n: int,
        epoch: int,
        max_off_policy_threshold: int,
        strategy: Strategy,
        refill: Callable[[int], None],
        poll_interval: float,
        health: Callable[[], None] = lambda: None,
    ) -> None:
        if n < 1 or max_off_policy_threshold < 0 or poll_interval <= 0:
            raise ValueError(
                f"n must be >= 1, max_off_policy_threshold >= 0 and poll_interval > 0, "
                f"got {n}, {max_off_policy_threshold} and {poll_interval}"
            )
        self._queue, self._n, self._epoch = queue, n, epoch
        self._threshold, self._strategy = max_off_policy_threshold, strategy
        self._refill, self._poll_interval, self._health = refill, poll_interval, health
        # By clock, of which there are few: it decides which groups are evicted and which are taken first.
        self._groups: dict[WeightVersion, dict[int, SampledGroup]] = {}
        self._taken: set[int] = set()
        self._newest = WeightVersion(epoch=epoch, n=0)
        self._evicted = 0  # groups, since the last training batch
        self._changes = Changes()

    def __len__(self) -> int:
        """Groups ready to be sampled."""
        return sum(map(len, self._groups.values()))

    def add_chunk(self, tickets: Sequence[PromptTicket], batch: DataProto) -> None:
        """Take in what a generate call returned.

        Args:
            tickets: of its prompts, in order.
            batch: n rows a ticket, next to each other, with `uid` and `weight_versions` int64 [b, t] (-1 on
                padding). The buffer releases it.

        Raises:
            RolloutError: another number of rows, other prompts, a sample without a token, or one that
                started on an older version than its prompt asked for.
        """
        clocks, spans = self._read(tickets, batch)
        chunk = CountedBatch(batch, len(tickets))
        for place, ticket in enumerate(tickets):
            rows = range(place * self._n, (place + 1) * self._n)
            self._keep(
                SampledGroup(
                    ticket=ticket,
                    clock=clocks[place],
                    spans=tuple(spans[rows.start : rows.stop]),
                    chunk=chunk,
                    rows=rows,
                )
            )
        self._evict_stale()
        self._changes.notify()

    async def sample(self, count: int, newest: WeightVersion, *, timeout: float) -> Sampled:
        """Take `count` groups: those dated oldest, of these the first enqueued.

        Consumes: finished groups. Waits for: enough of them, and with `wait` for generation to finish groups
        at the threshold. Produces: a training batch. Unblocked by: a chunk, a failed prompt or health check
        (looked at in every poll), too many evictions, or the deadline.

        Args:
            newest: the newest published version, which groups are judged against from now on.
            timeout: seconds.

        Raises:
            SamplesMissing: not enough groups in time, or hardly any that is fresh enough.
            PromptFailed: a prompt failed for good.
        """
        clock = asyncio.get_running_loop().time
        deadline = clock() + timeout
        self._newest = max(self._newest, newest)
        self._evict_stale()
        while True:
            self._queue.raise_if_failed()
            self._health()
            if self._evicted > MOST_EVICTED_PER_GROUP * count:
                raise SamplesMissing(
                    f"{self._evicted} groups were evicted for one training batch of {count}: generation does "
                    f"not keep within {self._threshold} versions of {self._newest}"
                )
            # No await between these looks and the wait: no chunk, failure or end of a prompt is missed.
            if len(self) >= count and not self._must_wait():
                return self._take(count)
            left = deadline - clock()
            if left <= 0:
                raise SamplesMissing(self._missing(count, timeout))
            await self._changes.wait(min(left, self._poll_interval))

    def done(self, sampled: Sampled, trained: DataProto | None = None) -> None:
        """A training batch is done with: chunks of which no group is left are released.

        Args:
            trained: the batch after the training step; columns that the step stored are released too.

        Raises:
            ValueError: it was done with before.
        """
        serials = {group.ticket.serial for group in sampled.groups}
        if not serials <= self._taken:
            raise ValueError("this training batch is done with already")
        self._taken -= serials
        if trained is not None:
            # Of the chunks: `union` adds columns in place, so the sampled batch may be the trained one.
            chunks = {id(group.chunk): group.chunk for group in sampled.groups}
            kept = {ref for chunk in chunks.values() for ref in chunk.batch.refs}
            added = {name: column for name, column in trained.columns.items() if kept.isdisjoint(column.refs)}
            DataProto(added).release()
        CountedBatch.all_done(group.chunk for group in sampled.groups)

    def state(self) -> BufferState:
        """The buffer as it is now; the groups' chunks are not held."""
        kept = (group for groups in self._groups.values() for group in groups.values())
        groups = tuple(sorted(kept, key=lambda group: group.ticket.serial))
        return BufferState(groups=groups, evicted=self._evicted)

    def restore(self, state: BufferState) -> None:
        """Resume from `state`; each group is a part of its chunk.

        Raises:
            ValueError: the buffer was used already.
        """
        if self._groups or self._taken:
            raise ValueError("only an unused replay buffer can be restored")
        for group in state.groups:
            self._keep(group)
        self._evicted = state.evicted
        self._changes.notify()

    def _read(
        self, tickets: Sequence[PromptTicket], batch: DataProto
    ) -> tuple[list[WeightVersion], list[int]]:
        """Check a chunk; its groups' clocks, and the spans of its samples."""
        uids = [ticket.uid for ticket in tickets for _ in range(self._n)]
        columns: dict[str, Any] = batch.materialize(["uid", "weight_versions"])
        if [str(uid) for uid in columns["uid"]] != uids:
            raise RolloutError(
                f"{len(tickets)} prompts with {self._n} samples each were answered with {len(batch)} rows of "
                f"{len(set(columns['uid']))} prompts, or in another order"
            )
        versions_bt: npt.NDArray[np.int64] = np.asarray(columns["weight_versions"])
        oldest = versions_bt[:, 0].reshape(len(tickets), self._n).min(axis=1)
        clocks = []
        for ticket, number in zip(tickets, oldest.tolist(), strict=True):
            if number < 0:
                raise RolloutError(f"a sample of prompt {ticket.uid} has no token")
            started = WeightVersion(epoch=self._epoch, n=number)
            clock = group_clock((started,), ticket.min_weight_version)
            if clock < ticket.min_weight_version:
                raise RolloutError(
                    f"prompt {ticket.uid} asked for weights {ticket.min_weight_version} and was answered on "
                    f"{clock}"
                )
            clocks.append(clock)
        return clocks, versions_of(versions_bt).tolist()

    def _keep(self, group: SampledGroup) -> None:
        self._groups.setdefault(group.clock, {})[group.ticket.serial] = group

    def _evict_stale(self) -> None:
        stale = [clock for clock in self._groups if too_stale(self._newest, clock, self._threshold)]
        evicted = [group for clock in stale for group in self._groups.pop(clock).values()]
        if evicted:
            CountedBatch.all_done(group.chunk for group in evicted)
            self._evicted += len(evicted)
            self._refill(len(evicted))

    def _must_wait(self) -> bool:
        """Whether a group still being generated is at the threshold: the next version would be too much."""
        oldest = self._queue.oldest_running() if self._strategy == "wait" else None
        return oldest is not None and staleness(self._newest, oldest) >= self._threshold

    def _take(self, count: int) -> Sampled:
        chosen: list[SampledGroup] = []
        for clock in sorted(self._groups):
            serials = sorted(self._groups[clock])[: count - len(chosen)]
            chosen += [self._groups[clock].pop(serial) for serial in serials]
        self._groups = {clock: groups for clock, groups in self._groups.items() if groups}
        self._taken.update(group.ticket.serial for group in chosen)
        by_chunk: dict[int, list[SampledGroup]] = {}
        for group in chosen:
            by_chunk.setdefault(id(group.chunk), []).append(group)
        # All chunks are joined, then all rows taken at once: both cost by chunk, and there may be thousands.
        rows: list[int] = []
        start = 0
        for groups in by_chunk.values():
            rows += [start + row for group in groups for row in group.rows]
            start += len(groups[0].chunk.batch)
        joined = DataProto.concat([groups[0].chunk.whole for groups in by_chunk.values()])
        ordered = tuple(group for groups in by_chunk.values() for group in groups)
        sampled = Sampled(batch=joined.select_idxs(rows), groups=ordered, metrics=self._metrics(ordered))
        self._evicted = 0
        return sampled

    def _metrics(self, groups: Sequence[SampledGroup]) -> dict[str, float]:
        behind = [staleness(self._newest, group.clock) for group in groups]
        assert max(behind) <= self._threshold, (max(behind), self._threshold)
        spans = [span for group in groups for span in group.spans]
        metrics = {
            f"training/off_policy/evicted_samples/{_EVICTED_BECAUSE[self._strategy]}": float(
                self._evicted * self._n
            )
        }
        for name, values in (("trajectory_spans", spans), ("trajectory_staleness", behind)):
            prefix = f"training/off_policy/{name}"
            metrics[f"{prefix}/mean"] = sum(values) / len(values)
            metrics[f"{prefix}/max"], metrics[f"{prefix}/min"] = float(max(values)), float(min(values))
        return metrics

    def _missing(self, count: int, timeout: float) -> str:
        counts = self._queue.counts()
        text = (
            f"no training batch of {count} prompts within {timeout:.0f} s: {len(self)} are ready, "
            f"{counts.running} being generated, {counts.pending} waiting for a replica"
        )
        if len(self) >= count:
            text += f"; generation has yet to finish prompts that are {self._threshold} versions old"
        return text


def versions_of(versions_bt: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """On how many weight versions each sample was generated, int64 [b], from `weight_versions` [b, t]."""
    ordered_bt = np.sort(versions_bt, axis=1)
    changes_b = (ordered_bt[:, 1:] != ordered_bt[:, :-1]).sum(axis=1)
    spans_b: npt.NDArray[np.int64] = 1 + changes_b - (ordered_bt[:, 0] < 0)
    return spans_b
