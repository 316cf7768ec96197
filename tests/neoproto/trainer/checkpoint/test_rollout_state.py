"""Queue, feeder and buffer saved and restored at any moment: no prompt is lost, and none comes back twice."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from neoproto.data import DataProto
from neoproto.errors import SamplesMissing
from neoproto.store import MemoryStore, use_store
from neoproto.trainer.checkpoint.rollout_state import RolloutSnapshot, restore_rollout
from neoproto.trainer.prompt_queue import PromptFeeder, PromptQueue, PromptTicket
from neoproto.trainer.replay_buffer import ReplayBuffer
from neoproto.weights import WeightVersion
from tests.neoproto.trainer.replay import always, answers_of, prompts, version

N, DRAWN, BATCH = 2, 3, 2


class Life:
    """One process's queue, feeder and buffer; `drawn` prompts of the data were used before."""

    def __init__(self, epoch: int = 0, drawn: int = 0, published: int = 0) -> None:
        self.drawn, self.epoch = drawn, epoch
        self.newest = WeightVersion(epoch=epoch, n=published)
        self.queue = PromptQueue(max_inflight_prompts=100, max_tries=1000)
        self.feeder = PromptFeeder(self.queue, self.draw)
        self.buffer = ReplayBuffer(
            self.queue,
            n=N,
            epoch=epoch,
            max_off_policy_threshold=1,
            strategy="drop",
            refill=self.feed,
            poll_interval=0.01,
        )
        self.running: list[PromptTicket] = []
        self.trained: list[int] = []

    def draw(self) -> DataProto:
        batch = prompts(DRAWN, self.drawn)
        self.drawn += DRAWN
        return batch

    def feed(self, count: int) -> None:
        self.feeder.feed(count, enqueue_step=1, min_weight_version=self.newest)

    def claim(self, count: int) -> None:
        tickets = self.queue.claim_nowait(count, always)
        self.queue.mark_started(tickets, self.newest)
        self.running += tickets

    def finish(self, count: int) -> None:
        """Answered on the version that they were started on, or the newest."""
        done, self.running = self.running[:count], self.running[count:]
        if done:
            self.buffer.add_chunk(done, answers_of(done, n=N, served=self.newest.n))
            self.queue.finish(done)

    def give_back(self, count: int) -> None:
        back, self.running = self.running[:count], self.running[count:]
        self.queue.give_back(back, RuntimeError("its replica died"))

    def sample(self, _: int) -> None:
        """Train on a batch, if so many groups are left when those too old have been evicted."""
        if len(self.buffer) >= BATCH:
            try:
                sampled = asyncio.run(self.buffer.sample(BATCH, self.newest, timeout=0.0))
            except SamplesMissing:
                assert len(self.buffer) < BATCH
                return
            self.trained += [group.ticket.serial for group in sampled.groups]
            assert [str(uid) for uid in sampled.batch["uid"]] == [
                f"p{group.ticket.serial}" for group in sampled.groups for _ in range(N)
            ]
            self.buffer.done(sampled)

    def publish(self, count: int) -> None:
        """Each makes finished groups older; those too old are evicted when the next batch is sampled."""
        for _ in range(count):
            self.newest = self.newest.next()

    def waiting(self) -> list[int]:
        """Serials that are in the queue or the buffer."""
        queued = [ticket.serial for ticket in self.queue.state().tickets]
        return sorted(queued + [group.ticket.serial for group in self.buffer.state().groups])

    def save(self, folder: Path) -> dict[str, Any]:
        snapshot = RolloutSnapshot(self.queue, self.feeder, self.buffer)
        digests = snapshot.write(folder)
        assert sorted(digests) == ["buffer.batch", "queue.batch"]
        snapshot.release()
        return {"drawn": self.drawn, "trained": list(self.trained), "published": self.newest.n}

    @classmethod
    def restored(cls, folder: Path, saved: dict[str, Any], epoch: int) -> Life:
        life = cls(epoch=epoch, drawn=saved["drawn"], published=saved["published"])
        restore_rollout(folder, life.queue, life.feeder, life.buffer)
        life.trained = list(saved["trained"])
        return life


ACTIONS = ("feed", "claim", "finish", "give_back", "sample", "publish", "save", "restart")
Schedule = list[tuple[str, int]]


@given(schedule=st.lists(st.tuples(st.sampled_from(ACTIONS), st.integers(1, 4)), max_size=40))
@example(schedule=[("feed", 1), ("claim", 1), ("finish", 1), ("publish", 2)])
def test_whatever_happens_no_prompt_is_lost_or_doubled(
    tmp_path_factory: pytest.TempPathFactory, schedule: Schedule
) -> None:
    folder = tmp_path_factory.mktemp("saved")
    store = MemoryStore()
    with use_store(store):
        life, epoch = Life(), 0
        saved, waiting, tries = life.save(folder), life.waiting(), {}
        for action, count in schedule:
            if action == "save":
                saved, waiting = life.save(folder), life.waiting()
                tries = {ticket.serial: ticket.tries for ticket in life.queue.state().tickets}
            elif action == "restart":
                epoch += 1
                life = Life.restored(folder, saved, epoch)
                assert life.waiting() == waiting
                assert {t.serial: t.tries for t in life.queue.state().tickets} == tries
                assert life.queue.counts().running == 0
            else:
                getattr(life, action)(count)
        check_the_end(life)
    store.close()


def check_the_end(life: Life) -> None:
    """Finish everything: each serial that was ever given was trained on once, or dropped as too old."""
    while life.waiting():
        life.give_back(100)
        life.claim(100)
        life.finish(100)
        if len(life.buffer) < BATCH:
            life.feed(1)
        else:
            life.sample(0)
    assert len(life.trained) == len(set(life.trained))
    counted = life.queue.state()
    assert counted.tickets == ()
    assert counted.finished == counted.next_serial
    assert set(life.trained) <= set(range(counted.next_serial))
    rest = life.feeder.remainder()
    assert life.drawn == counted.next_serial + (0 if rest is None else len(rest[1]))


def test_without_evictions_every_serial_is_trained_on(tmp_path: Path, store: MemoryStore) -> None:
    """Saved with prompts in every state: pending, running, finished, and drawn but not yet enqueued."""
    life = Life()
    life.feed(7)
    life.claim(5)
    life.finish(3)
    saved = life.save(tmp_path)
    life.finish(2)
    life.sample(0)
    assert life.trained == [0, 1]
    life = Life.restored(tmp_path, saved, epoch=1)
    assert life.waiting() == [0, 1, 2, 3, 4, 5, 6]
    assert len(life.buffer) == 3
    life.feed(1)
    life.claim(100)
    life.finish(100)
    while len(life.buffer):
        life.sample(0)
    assert life.trained == [0, 1, 2, 3, 4, 5, 6, 7]
    assert life.drawn == 9


def test_restored_batches_are_released_with_their_last_part(tmp_path: Path) -> None:
    with use_store(MemoryStore()):
        life = Life()
        life.feed(4)
        life.claim(3)
        life.finish(2)
        saved = life.save(tmp_path)
    store = MemoryStore()
    with use_store(store):
        life = Life.restored(tmp_path, saved, epoch=1)
        assert store.keys() != []
        life.feed(2)
        life.claim(100)
        life.finish(100)
        while len(life.buffer):
            life.sample(0)
        assert life.trained == [0, 1, 2, 3, 4, 5]
        assert store.keys() == []


def test_columns_stay_alive_while_they_are_written(tmp_path: Path, store: MemoryStore) -> None:
    """Everything is trained on between the snapshot and its writing, and released only after that."""
    life = Life()
    life.feed(3)
    life.claim(3)
    life.finish(2)
    snapshot = RolloutSnapshot(life.queue, life.feeder, life.buffer)
    life.sample(0)
    life.finish(1)
    life.feed(1)
    life.claim(1)
    life.finish(1)
    life.sample(0)
    assert life.trained == [0, 1, 2, 3]
    snapshot.write(tmp_path)
    before = len(store.keys())
    snapshot.release()
    assert len(store.keys()) < before
    back = Life.restored(tmp_path, {"drawn": 3, "trained": [], "published": 0}, epoch=1)
    assert back.waiting() == [0, 1, 2]


def test_clocks_spans_and_tickets_are_kept(tmp_path: Path, store: MemoryStore) -> None:
    life = Life(published=3)
    life.feed(2)
    life.claim(2)
    life.give_back(1)
    life.finish(1)
    saved = life.save(tmp_path)
    back = Life.restored(tmp_path, saved, epoch=1)
    (ticket,) = back.queue.state().tickets
    assert (ticket.serial, ticket.uid, ticket.tries, ticket.enqueue_step) == (0, "p0", 1, 1)
    assert ticket.min_weight_version == version(3)
    (group,) = back.buffer.state().groups
    assert (group.ticket.serial, group.clock, group.spans) == (1, version(3), (1, 1))
    assert np.array_equal(np.asarray(group.chunk.batch["weight_versions"])[:, 0], [3, 3])


def test_only_unused_parts_are_restored(tmp_path: Path, store: MemoryStore) -> None:
    life = Life()
    life.feed(2)
    life.claim(2)
    life.finish(2)
    life.save(tmp_path)
    with pytest.raises(ValueError, match="only an unused prompt queue"):
        life.queue.restore(life.queue.state())
    with pytest.raises(ValueError, match="only an unused replay buffer"):
        life.buffer.restore(life.buffer.state())
