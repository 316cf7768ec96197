from __future__ import annotations

import asyncio

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from neoproto.data import DataProto
from neoproto.errors import PromptFailed, WorkerDied
from neoproto.store import MemoryStore, use_store
from neoproto.trainer.prompt_queue import PromptCounts, PromptFeeder, PromptQueue, PromptTicket, prompts_of
from tests.neoproto.trainer.replay import always, prompts, running, version


def queue(most: int = 100, max_tries: int = 3) -> PromptQueue:
    return PromptQueue(max_inflight_prompts=most, max_tries=max_tries)


def uids(tickets: list[PromptTicket]) -> list[str]:
    return [ticket.uid for ticket in tickets]


def test_prompts_are_claimed_in_the_order_they_came() -> None:
    waiting = queue()
    waiting.add(prompts(2), enqueue_step=1, min_weight_version=version(0))
    waiting.add(prompts(2, first=2), enqueue_step=2, min_weight_version=version(1))
    first = waiting.claim_nowait(3, always)
    assert uids(first) == ["p0", "p1", "p2"]
    assert [ticket.serial for ticket in first] == [0, 1, 2]
    assert [(ticket.enqueue_step, ticket.min_weight_version.n) for ticket in first] == [
        (1, 0),
        (1, 0),
        (2, 1),
    ]
    assert uids(waiting.claim_nowait(3, always)) == ["p3"]
    assert waiting.claim_nowait(3, always) == []


def test_no_more_are_claimed_than_may_be_in_flight() -> None:
    waiting = queue(most=3)
    waiting.add(prompts(5), enqueue_step=1, min_weight_version=version(0))
    first = waiting.claim_nowait(2, always)
    assert len(waiting.claim_nowait(5, always)) == 1
    assert waiting.claim_nowait(5, always) == []
    waiting.finish(first)
    assert uids(waiting.claim_nowait(5, always)) == ["p3", "p4"]


def test_a_prompt_whose_version_nobody_serves_waits_and_lets_others_pass() -> None:
    waiting = queue()
    waiting.add(prompts(1), enqueue_step=1, min_weight_version=version(2))
    waiting.add(prompts(1, first=1), enqueue_step=1, min_weight_version=version(1))
    assert uids(waiting.claim_nowait(5, lambda asked: asked <= version(1))) == ["p1"]
    assert uids(waiting.claim_nowait(5, lambda asked: asked <= version(2))) == ["p0"]


def test_a_prompt_given_back_is_the_next_again_and_knows_its_tries() -> None:
    waiting = queue()
    tickets = running(waiting, 3)
    waiting.give_back(tickets[:1], OSError("gone"))
    (again,) = waiting.claim_nowait(1, always)
    assert (again.serial, again.tries) == (0, 1)
    assert waiting.counts() == PromptCounts(pending=0, running=3, finished=0, failed=0)
    waiting.raise_if_failed()


def test_a_prompt_is_failed_after_its_last_try_with_the_cause() -> None:
    waiting = queue(max_tries=2)
    died = WorkerDied("rollout", 1, "here", "signal 9 (SIGKILL)")
    waiting.give_back(running(waiting, 1), died)
    waiting.give_back(waiting.claim_nowait(1, always), died)
    assert waiting.counts() == PromptCounts(pending=0, running=0, finished=0, failed=1)
    with pytest.raises(
        PromptFailed, match=r"prompt p0 failed after 2 tries: WorkerDied: .*SIGKILL"
    ) as failed:
        waiting.raise_if_failed()
    assert failed.value.__cause__ is died


def test_a_prompt_that_is_not_running_cannot_end() -> None:
    waiting = queue()
    (ticket,) = running(waiting, 1)
    waiting.finish([ticket])
    for end in (
        waiting.finish,
        lambda tickets: waiting.fail(tickets, OSError()),
        lambda tickets: waiting.give_back(tickets, OSError()),
        lambda tickets: waiting.mark_started(tickets, version(0)),
    ):
        with pytest.raises(ValueError, match=r"prompt p0 \(ticket 0\) is not running"):
            end([ticket])


def test_the_oldest_running_prompt_is_dated_by_what_was_served_once_it_is_handed_over() -> None:
    waiting = queue()
    assert waiting.oldest_running() is None
    first, second = running(waiting, 2, asks=1)
    assert waiting.oldest_running() == version(1)
    waiting.mark_started([first], version(4))
    waiting.mark_started([second], version(3))
    assert waiting.oldest_running() == version(3)
    waiting.finish([second])
    assert waiting.oldest_running() == version(4)


def test_prompts_are_released_when_the_last_of_their_batch_has_ended(store: MemoryStore) -> None:
    waiting = queue(max_tries=1)
    tickets = running(waiting, 3)
    waiting.finish(tickets[:1])
    waiting.fail(tickets[1:2], OSError())
    assert len(store.keys()) == 2
    waiting.give_back(tickets[2:], OSError())
    assert len(store.keys()) == 0


def test_prompts_of_tickets_come_in_their_order_from_any_batch() -> None:
    waiting = queue()
    a, b = running(waiting, 2), running(waiting, 2, first=2)
    batch = prompts_of([b[1], a[0], a[1]])
    assert batch["uid"].tolist() == ["p3", "p0", "p1"]
    assert batch["prompts"].tolist() == [[3], [0], [1]]
    assert batch.meta_info == {}


def test_a_feeder_draws_what_is_asked_for_and_keeps_the_rest(store: MemoryStore) -> None:
    drawn: list[DataProto] = []

    def draw() -> DataProto:
        drawn.append(prompts(4, first=4 * len(drawn)))
        return drawn[-1]

    waiting = queue()
    feeder = PromptFeeder(waiting, draw)
    feeder.feed(3, enqueue_step=1, min_weight_version=version(0))
    feeder.feed(0, enqueue_step=1, min_weight_version=version(0))
    waiting.finish(waiting.claim_nowait(3, always))
    assert len(store.keys()) == 2, "the rows that are kept are still needed"
    feeder.feed(6, enqueue_step=2, min_weight_version=version(1))
    assert len(drawn) == 3
    tickets = waiting.claim_nowait(10, always)
    assert uids(tickets) == [f"p{number}" for number in range(3, 9)]
    assert {(ticket.enqueue_step, ticket.min_weight_version.n) for ticket in tickets} == {(2, 1)}
    waiting.finish(tickets)
    assert len(store.keys()) == 2, "only the third batch is left"


def test_some_rows_of_a_batch_need_a_counted_one() -> None:
    with pytest.raises(ValueError, match="only if it is counted"):
        queue().add(prompts(2), [0], enqueue_step=1, min_weight_version=version(0))


@pytest.mark.parametrize(
    "numbers", [{"max_inflight_prompts": 0}, {"max_inflight_prompts": 1, "max_tries": 0}]
)
def test_limits_are_positive(numbers: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="must be >= 1"):
        PromptQueue(**numbers)


def test_whoever_waits_is_woken_by_new_prompts_and_by_ends() -> None:
    async def scenario() -> None:
        waiting = queue()
        for change in (
            lambda: waiting.add(prompts(2), enqueue_step=1, min_weight_version=version(0)),
            lambda: waiting.give_back(waiting.claim_nowait(1, always), OSError()),
            lambda: waiting.finish(waiting.claim_nowait(1, always)),
        ):
            wait = asyncio.create_task(waiting.wait_changed(60))
            await asyncio.sleep(0)
            change()
            await asyncio.wait_for(wait, timeout=5)

    asyncio.run(scenario())


class QueueModel(RuleBasedStateMachine):
    """Any order of adding, claiming and ending: each prompt is in one state, and nothing is lost."""

    MOST, TRIES = 4, 3

    def __init__(self) -> None:
        super().__init__()
        self.store = MemoryStore()
        self.using = use_store(self.store)
        self.using.__enter__()
        self.queue = PromptQueue(max_inflight_prompts=self.MOST, max_tries=self.TRIES)
        self.asked: dict[int, int] = {}
        self.tries: dict[int, int] = {}
        self.pending: set[int] = set()
        self.running: dict[int, PromptTicket] = {}
        self.ended: set[int] = set()
        self.failed: set[int] = set()
        self.batches: list[set[int]] = []

    def teardown(self) -> None:
        self.using.__exit__(None, None, None)
        self.store.close()

    @rule(count=st.integers(1, 4), asks=st.integers(0, 2))
    def add(self, count: int, asks: int) -> None:
        added = self.queue.add(prompts(count), enqueue_step=1, min_weight_version=version(asks))
        serials = {ticket.serial for ticket in added}
        assert len(serials) == count
        assert not serials & self.asked.keys()
        self.batches.append(serials)
        self.pending |= serials
        self.asked.update(dict.fromkeys(serials, asks))
        self.tries.update(dict.fromkeys(serials, 0))

    @rule(limit=st.integers(0, 5), served=st.integers(-1, 2))
    def claim(self, limit: int, served: int) -> None:
        room = min(limit, self.MOST - len(self.running))
        ready = sorted(serial for serial in self.pending if self.asked[serial] <= served)
        claimed = self.queue.claim_nowait(limit, lambda asked: asked.n <= served)
        assert [ticket.serial for ticket in claimed] == ready[: max(0, room)]
        for ticket in claimed:
            assert ticket.tries == self.tries[ticket.serial]
            self.running[ticket.serial] = ticket
            self.pending.remove(ticket.serial)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), how=st.sampled_from(["finish", "fail", "give_back"]))
    def end(self, data: st.DataObject, how: str) -> None:
        serial = data.draw(st.sampled_from(sorted(self.running)))
        ticket = self.running.pop(serial)
        if how == "finish":
            self.queue.finish([ticket])
            self.ended.add(serial)
            return
        getattr(self.queue, how)([ticket], OSError("lost"))
        self.tries[serial] += how == "give_back"
        if how == "give_back" and self.tries[serial] < self.TRIES:
            self.pending.add(serial)
        else:
            self.ended.add(serial)
            self.failed.add(serial)

    @invariant()
    def every_prompt_is_in_one_state(self) -> None:
        assert self.queue.counts() == PromptCounts(
            pending=len(self.pending),
            running=len(self.running),
            finished=len(self.ended - self.failed),
            failed=len(self.failed),
        )
        if self.failed:
            with pytest.raises(PromptFailed):
                self.queue.raise_if_failed()
        else:
            self.queue.raise_if_failed()

    @invariant()
    def prompts_are_stored_while_one_of_their_batch_may_be_needed(self) -> None:
        assert len(self.store.keys()) == 2 * sum(not batch <= self.ended for batch in self.batches)


TestQueueModel = QueueModel.TestCase
TestQueueModel.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
