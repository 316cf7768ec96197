from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from neoproto.data import DataProto
from neoproto.errors import PromptFailed, RolloutError, SamplesMissing, WorkerDied
from neoproto.store import MemoryStore, use_store
from neoproto.trainer.prompt_queue import PromptQueue, PromptTicket
from neoproto.trainer.replay_buffer import ReplayBuffer, Sampled, versions_of
from tests.neoproto.trainer.replay import answers, answers_of, running, version
from tests.virtual_time import run

CHUNK_COLUMNS, PROMPT_COLUMNS = 3, 2
OFF = "training/off_policy"


class Bench:
    """A buffer with its queue; `asked` lists the refills."""

    def __init__(self, *, n: int = 2, threshold: int = 2, strategy: Any = "drop", **options: Any) -> None:
        self.n = n
        self.queue = PromptQueue(max_inflight_prompts=1000, max_tries=1)
        self.asked: list[int] = []
        self.buffer = ReplayBuffer(
            self.queue,
            n=n,
            epoch=0,
            max_off_policy_threshold=threshold,
            strategy=strategy,
            refill=self.asked.append,
            poll_interval=1.0,
            **options,
        )

    def run(self, count: int, *, served: int = 0, first: int = 0) -> list[PromptTicket]:
        tickets = running(self.queue, count, first=first)
        self.queue.mark_started(tickets, version(served))
        return tickets

    def finish(self, tickets: list[PromptTicket], *, served: int = 0) -> None:
        self.buffer.add_chunk(tickets, answers_of(tickets, n=self.n, served=served))
        self.queue.finish(tickets)

    def add(self, count: int, *, served: int = 0, first: int = 0) -> list[PromptTicket]:
        tickets = self.run(count, served=served, first=first)
        self.finish(tickets, served=served)
        return tickets

    def sample(self, count: int, newest: int = 0, timeout: float = 5.0) -> Sampled:
        return run(lambda: self.buffer.sample(count, version(newest), timeout=timeout))


def uids(sampled: Sampled) -> list[str]:
    return [group.ticket.uid for group in sampled.groups]


def test_a_training_batch_is_whole_groups_the_oldest_first() -> None:
    bench = Bench(n=2)
    bench.add(2, served=1)
    bench.add(2, served=0, first=2)
    sampled = bench.sample(3, newest=1)
    assert uids(sampled) == ["p2", "p3", "p0"]
    assert sampled.batch["uid"].tolist() == ["p2", "p2", "p3", "p3", "p0", "p0"]
    assert sampled.batch["weight_versions"][:, 0].tolist() == [0, 0, 0, 0, 1, 1]
    assert len(bench.buffer) == 1
    assert uids(bench.sample(1, newest=1)) == ["p1"]


def test_groups_of_one_chunk_come_together_in_one_segment_a_column(store: MemoryStore) -> None:
    bench = Bench(n=1)
    late, early = bench.run(4), bench.run(4, first=4)
    bench.finish(early)
    bench.finish(late)
    sampled = bench.sample(8)
    assert uids(sampled) == [f"p{number}" for number in range(8)]
    assert all(len(column.sources) == 2 for column in sampled.batch.columns.values())
    assert sampled.batch["responses"][:, 0].tolist() == [0, 3, 6, 9, 0, 3, 6, 9]


def test_a_sample_waits_for_the_last_group(store: MemoryStore) -> None:
    bench = Bench()

    async def scenario() -> Sampled:
        tickets = bench.run(3)
        bench.finish(tickets[:2])
        waiting = asyncio.create_task(bench.buffer.sample(3, version(0), timeout=5))
        await asyncio.sleep(4.0)
        assert not waiting.done()
        bench.finish(tickets[2:])
        return await waiting

    assert len(run(scenario).batch) == 6


def test_a_wait_ends_at_its_deadline_and_says_what_was_missing() -> None:
    bench = Bench()
    bench.add(1)
    bench.run(2, first=1)
    message = "no training batch of 4 prompts within 5 s: 1 are ready, 2 being generated, 0 waiting"
    with pytest.raises(SamplesMissing, match=message):
        bench.sample(4, timeout=5.0)
    assert len(bench.buffer) == 1


def test_a_wait_ends_with_a_failed_prompt() -> None:
    bench = Bench()

    async def scenario() -> None:
        waiting = asyncio.create_task(bench.buffer.sample(1, version(0), timeout=60))
        await asyncio.sleep(4.0)
        bench.queue.give_back(bench.run(1), WorkerDied("rollout", 0, "here", "exit code 1"))
        await waiting

    with pytest.raises(PromptFailed, match="exit code 1"):
        run(scenario)


def test_a_wait_ends_when_a_health_check_fails() -> None:
    polls: list[int] = []

    def health() -> None:
        polls.append(1)
        if len(polls) == 3:
            raise OSError("the agent of rollout/0 has ended")

    with pytest.raises(OSError, match="agent of rollout/0"):
        Bench(health=health).sample(1, timeout=60)


def test_stale_groups_are_dropped_counted_and_asked_for_again() -> None:
    bench = Bench(n=2, threshold=1)
    bench.add(3, served=0)
    bench.add(2, served=1, first=3)
    sampled = bench.sample(2, newest=2)
    assert uids(sampled) == ["p3", "p4"]
    assert bench.asked == [3]
    assert sampled.metrics[f"{OFF}/evicted_samples/stale"] == 6.0
    bench.add(1, served=2, first=9)
    assert bench.sample(1, newest=2).metrics[f"{OFF}/evicted_samples/stale"] == 0.0


def test_a_group_is_judged_by_what_it_started_on_not_by_when_it_was_asked_for() -> None:
    bench = Bench(threshold=0)
    bench.add(1, served=7)  # asked for at version 0
    assert uids(bench.sample(1, newest=7)) == ["p0"]


def test_one_old_start_makes_the_group_old() -> None:
    bench = Bench(n=2, threshold=1)
    tickets = bench.run(2)
    uids_of = [ticket.uid for ticket in tickets for _ in range(2)]
    bench.buffer.add_chunk(tickets, answers(uids_of, [[3, 3], [1, 3], [2, 3], [3, 3]]))
    bench.queue.finish(tickets)
    sampled = bench.sample(1, newest=3)
    assert uids(sampled) == ["p1"]
    assert bench.asked == [1]


def test_a_group_that_comes_too_late_is_evicted_as_it_comes() -> None:
    bench = Bench(threshold=1)
    bench.add(1, served=3)
    bench.sample(1, newest=3)
    bench.add(1, served=1)
    assert bench.asked == [1]
    assert len(bench.buffer) == 0


def test_evicting_for_ever_is_an_error() -> None:
    bench = Bench(threshold=0)
    bench.add(9, served=0)
    with pytest.raises(SamplesMissing, match="9 groups were evicted for one training batch of 1"):
        bench.sample(1, newest=1)


def test_wait_holds_a_batch_back_for_groups_at_the_threshold() -> None:
    bench = Bench(threshold=2, strategy="wait")

    async def scenario() -> Sampled:
        old = bench.run(1, served=1)
        bench.add(2, served=3, first=1)
        waiting = asyncio.create_task(bench.buffer.sample(2, version(3), timeout=5))
        await asyncio.sleep(4.0)
        assert not waiting.done()
        bench.finish(old, served=1)
        return await waiting

    assert uids(run(scenario)) == ["p0", "p1"]


def test_wait_takes_no_notice_of_younger_groups_nor_of_pending_ones() -> None:
    bench = Bench(threshold=2, strategy="wait")
    bench.run(1, served=2)
    bench.add(1, served=3, first=1)
    sampled = bench.sample(1, newest=3)
    assert uids(sampled) == ["p1"]
    assert sampled.metrics[f"{OFF}/evicted_samples/crowded_out"] == 0.0


def test_wait_names_what_it_waits_for_when_the_deadline_passes() -> None:
    bench = Bench(threshold=1, strategy="wait")
    bench.run(1, served=2)
    bench.add(1, served=3, first=1)
    with pytest.raises(SamplesMissing, match="has yet to finish prompts that are 1 versions old"):
        bench.sample(1, newest=3, timeout=5.0)


def test_wait_evicts_only_what_no_batch_had_room_for() -> None:
    bench = Bench(n=1, threshold=1, strategy="wait")
    bench.add(3, served=0)
    assert uids(bench.sample(2, newest=1)) == ["p0", "p1"]
    bench.add(1, served=2, first=3)
    sampled = bench.sample(1, newest=2)
    assert uids(sampled) == ["p3"]
    assert sampled.metrics[f"{OFF}/evicted_samples/crowded_out"] == 1.0


def test_metrics_are_of_the_samples_and_groups_in_the_batch() -> None:
    bench = Bench(n=2, threshold=3)
    tickets = bench.run(2)
    uids_of = [ticket.uid for ticket in tickets for _ in range(2)]
    bench.buffer.add_chunk(tickets, answers(uids_of, [[2, 2, 2], [2, 3], [0, 1, 2], [3]]))
    metrics = bench.sample(2, newest=3).metrics
    assert metrics == {
        f"{OFF}/trajectory_spans/mean": 7 / 4,
        f"{OFF}/trajectory_spans/max": 3.0,
        f"{OFF}/trajectory_spans/min": 1.0,
        f"{OFF}/trajectory_staleness/mean": 2.0,
        f"{OFF}/trajectory_staleness/max": 3.0,
        f"{OFF}/trajectory_staleness/min": 1.0,
        f"{OFF}/evicted_samples/stale": 0.0,
    }


def test_spans_count_versions_and_no_padding() -> None:
    rows = np.array([[2, 2, -1], [2, 3, -1], [1, -1, 1], [1, 2, 3], [5, -1, 5]])
    assert versions_of(rows).tolist() == [1, 2, 1, 3, 1]


@pytest.mark.parametrize(
    ("rows", "complaint"),
    [
        ([("p0", [0]), ("p0", [0]), ("p1", [0])], "2 prompts with 2 samples each were answered with 3 rows"),
        ([("p0", [0]), ("p1", [0]), ("p0", [0]), ("p1", [0])], "or in another order"),
        ([("p0", [0]), ("p0", [0]), ("p1", []), ("p1", [0])], "a sample of prompt p1 has no token"),
        ([("p0", [1]), ("p0", [1]), ("p1", [0]), ("p1", [1])], r"p1 asked for weights 0\.1 .* on 0\.0"),
    ],
)
def test_an_answer_that_breaks_the_contract_is_refused(rows: list[Any], complaint: str) -> None:
    bench = Bench(n=2)
    asks = 1 if "asked for" in complaint else 0
    tickets = running(bench.queue, 2, asks=asks)
    with pytest.raises(RolloutError, match=complaint):
        bench.buffer.add_chunk(tickets, answers([uid for uid, _ in rows], [row for _, row in rows]))
    assert len(bench.buffer) == 0


def test_a_chunk_is_released_when_its_last_group_is_done_with(store: MemoryStore) -> None:
    bench = Bench(n=1, threshold=1)
    bench.add(3)
    first = bench.sample(1)
    bench.buffer.done(first)
    assert len(store.keys()) == CHUNK_COLUMNS
    second = bench.sample(1)
    bench.run(1, served=9)
    with pytest.raises(SamplesMissing):
        bench.sample(1, newest=2, timeout=0)  # evicts the third
    assert len(store.keys()) == CHUNK_COLUMNS + PROMPT_COLUMNS
    bench.buffer.done(second)
    assert len(store.keys()) == PROMPT_COLUMNS
    with pytest.raises(ValueError, match="done with already"):
        bench.buffer.done(second)


def test_what_the_step_stored_is_released_and_nothing_else_of_a_chunk(store: MemoryStore) -> None:
    bench = Bench(n=1)
    bench.add(2)
    sampled = bench.sample(1)
    scores = DataProto.from_dict(tensors={"token_level_scores": torch.zeros(1, 3)})
    trained = sampled.batch.select().union(scores)
    trained.batch["response_mask"] = torch.ones(1, 3)
    assert len(store.keys()) == CHUNK_COLUMNS + 2
    bench.buffer.done(sampled, trained)
    assert len(store.keys()) == CHUNK_COLUMNS
    assert bench.sample(1).batch["uid"].tolist() == ["p1"]


@pytest.mark.parametrize("options", [{"n": 0}, {"max_off_policy_threshold": -1}, {"poll_interval": 0.0}])
def test_numbers_that_make_no_sense_are_refused(options: dict[str, Any]) -> None:
    usual: dict[str, Any] = {"n": 1, "max_off_policy_threshold": 1, "poll_interval": 1.0}
    with pytest.raises(ValueError, match="must be >= 1"):
        ReplayBuffer(
            PromptQueue(max_inflight_prompts=1),
            epoch=0,
            strategy="drop",
            refill=lambda count: None,
            **(usual | options),
        )


class BufferModel(RuleBasedStateMachine):
    """Any order of chunks, publishes, samples, steps: groups stay whole, none is lost or kept too long."""

    N, THRESHOLD = 2, 2

    def __init__(self) -> None:
        super().__init__()
        self.store = MemoryStore()
        self.using = use_store(self.store)
        self.using.__enter__()
        self.newest = 0
        self.drawn = 0
        self.buffered: dict[int, int] = {}  # serial -> version started on
        self.chunks: list[set[int]] = []
        self.running: list[PromptTicket] = []
        self.samples: list[Sampled] = []
        self.gone: set[int] = set()
        self.evicted = 0

    @initialize(strategy=st.sampled_from(["drop", "wait"]))
    def begin(self, strategy: str) -> None:
        self.bench = Bench(n=self.N, threshold=self.THRESHOLD, strategy=strategy)

    def teardown(self) -> None:
        self.using.__exit__(None, None, None)
        self.store.close()

    def _evict(self) -> None:
        stale = {s for s, started in self.buffered.items() if self.judged - started > self.THRESHOLD}
        self.evicted += len(stale)
        self.gone |= stale
        for serial in stale:
            del self.buffered[serial]

    judged = 0  # the newest version the buffer was told of

    @rule(count=st.integers(1, 4), data=st.data())
    def chunk(self, count: int, data: st.DataObject) -> None:
        tickets = running(self.bench.queue, count, first=self.drawn)
        self.drawn += count
        started = data.draw(st.lists(st.integers(0, self.newest), min_size=count, max_size=count))
        rows = [[number, self.newest] for number in started for _ in range(self.N)]
        uids_of = [ticket.uid for ticket in tickets for _ in range(self.N)]
        self.bench.buffer.add_chunk(tickets, answers(uids_of, rows))
        self.bench.queue.finish(tickets)
        self.chunks.append({ticket.serial for ticket in tickets})
        self.buffered.update(zip((ticket.serial for ticket in tickets), started, strict=True))
        self._evict()

    @rule()
    def publish(self) -> None:
        self.newest += 1

    @rule(count=st.integers(1, 5))
    def sample(self, count: int) -> None:
        self.judged = self.newest
        self._evict()
        expected = sorted(self.buffered, key=lambda serial: (self.buffered[serial], serial))[:count]
        try:
            sampled = self.bench.sample(count, newest=self.newest, timeout=0)
        except SamplesMissing:
            capped = self.evicted > 8 * count
            assert capped or len(expected) < count
            return
        assert sorted(group.ticket.serial for group in sampled.groups) == sorted(expected)
        rows = sampled.batch["uid"].tolist()
        assert rows == [uid for uid in uids(sampled) for _ in range(self.N)]
        behind = [self.newest - self.buffered.pop(serial) for serial in expected]
        assert sampled.metrics[f"{OFF}/trajectory_staleness/max"] == max(behind) <= self.THRESHOLD
        reason = next(name for name in sampled.metrics if "evicted_samples" in name)
        assert sampled.metrics[reason] == self.evicted * self.N
        self.evicted = 0
        self.samples.append(sampled)

    @precondition(lambda self: self.samples)
    @rule()
    def step_done(self) -> None:
        sampled = self.samples.pop(0)
        sampled.batch.materialize()  # everything is still there
        self.bench.buffer.done(sampled)
        self.gone |= {group.ticket.serial for group in sampled.groups}

    @invariant()
    def exactly_the_chunks_still_needed_are_stored(self) -> None:
        if not hasattr(self, "bench"):
            return
        assert len(self.bench.buffer) == len(self.buffered)
        assert len(self.store.keys()) == CHUNK_COLUMNS * sum(not chunk <= self.gone for chunk in self.chunks)


TestBufferModel = BufferModel.TestCase
TestBufferModel.settings = settings(max_examples=20, stateful_step_count=25, deadline=None)
