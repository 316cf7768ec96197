"""Steps that are ordered one at a time, on fake groups and an in-memory store."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from neoproto.config import load_config
from neoproto.data import DataProto
from neoproto.errors import NonFiniteLoss, RuntimeClosed, WorkerDied
from neoproto.run.stepping import ENDED, Order, StepThread
from neoproto.store import MemoryStore, use_store
from neoproto.trainer.metrics.record import training_parts
from neoproto.trainer.sync import release
from tests.neoproto.trainer.fakes import FakePrompts, World
from tests.neoproto.trainer.recording import Recorder

LIMIT_S = 20.0


async def for_ever() -> None:
    await asyncio.Event().wait()


class Bench:
    """A thread over a world, and what it told."""

    def __init__(self, folder: Path) -> None:
        self.world, self.recorder = World(), Recorder()
        self.done: list[tuple[DataProto, DataProto]] = []
        self.others: dict[str, Callable[[], Coroutine[Any, Any, Any]]] = {"the watch": for_ever}
        self.folder = folder
        self.thread: StepThread | None = None

    def start(self) -> StepThread:
        parts = training_parts(
            load_config({}),
            self.world.workers(),
            FakePrompts(),
            tracker=self.recorder,
            run_dir=self.folder,
            total_steps=9,
            show=self.recorder,
        )
        self.thread = StepThread(parts, self.others, lambda *batches: self.done.append(batches))
        return self.thread

    def hold(self) -> tuple[threading.Event, Future[None]]:
        """Have generating wait: an event for when it does, and what lets it go on."""
        waits, go_on = threading.Event(), Future[None]()
        generate = self.world.generate

        async def held(prompts: DataProto) -> DataProto:
            waits.set()
            await asyncio.wrap_future(go_on)
            return generate(prompts)

        self.world.generate = held  # type: ignore[method-assign, assignment]
        return waits, go_on


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    store = MemoryStore()
    with use_store(store):
        made = Bench(tmp_path)
        yield made
        if made.thread is not None:
            made.thread.close()
            assert not made.thread._thread.is_alive()
    store.close()


def step(thread: StepThread, number: int) -> Order[int]:
    async def take(steps: Any) -> int:
        await steps.take(number)
        return number

    return thread.order(f"step {number}", take)


def test_steps_are_taken_when_they_are_ordered_and_in_order(bench: Bench) -> None:
    thread = bench.start()
    thread.began.result(LIMIT_S)
    assert bench.world.order() == ["publish_weights", "update_weights"]
    assert step(thread, 1).result(LIMIT_S) == 1
    orders = [step(thread, number) for number in (2, 3)]
    assert [order.result(LIMIT_S) for order in orders] == [2, 3]
    assert [row["training/global_step"] for _, row in bench.recorder.steps_logged()] == [1, 2, 3]
    assert [version.n for version in bench.world.served] == [0, 1, 2, 3]
    # Whoever is handed the batch decides what becomes of it: it can still be read.
    assert len(bench.done) == 3
    assert bench.done[-1][0]["uid"].tolist() == ["u30", "u31"]
    assert all(call.meta["keep_text"] for call in bench.world.called("generate_sequences"))
    for batches in bench.done:
        release(*batches)
    assert orders[-1]._title() == "step 3"


def test_steps_can_be_awaited_on_another_loop(bench: Bench) -> None:
    thread = bench.start()

    async def cell() -> list[int]:
        return [await step(thread, 1), *await asyncio.gather(step(thread, 2), step(thread, 3))]

    assert asyncio.run(cell()) == [1, 2, 3]


def test_a_wait_that_is_given_up_leaves_the_step_going_on(bench: Bench) -> None:
    waits, go_on = bench.hold()
    thread = bench.start()
    first, second = step(thread, 1), step(thread, 2)

    async def cell() -> None:
        async with asyncio.timeout(0.05):
            await first

    with pytest.raises(TimeoutError):
        asyncio.run(cell())
    with pytest.raises(TimeoutError):
        first.result(0.01)
    assert waits.wait(LIMIT_S)
    assert first.cancel() is False
    go_on.set_result(None)
    assert (second.result(LIMIT_S), first.result(0)) == (2, 1)


def test_a_step_that_fails_ends_the_thread_and_every_order(bench: Bench) -> None:
    bench.world.scores = (float("nan"), 0.0)
    thread = bench.start()
    orders = [step(thread, 1), step(thread, 2)]
    for order in orders:
        with pytest.raises(NonFiniteLoss) as caught:
            order.result(LIMIT_S)
    assert caught.value.__notes__ == [ENDED]
    thread._thread.join(LIMIT_S)
    with pytest.raises(NonFiniteLoss):
        step(thread, 3).result(LIMIT_S)


def test_what_trains_nothing_may_fail_and_the_steps_go_on(bench: Bench) -> None:
    thread = bench.start()

    async def save(_: Any) -> None:
        raise OSError("the disk is full")

    order = thread.order("save", save, trains=False)
    with pytest.raises(OSError, match="the disk is full"):
        order.result(LIMIT_S)
    assert step(thread, 1).result(LIMIT_S) == 1


def test_closing_before_it_has_begun_begins_nothing(bench: Bench, monkeypatch: Any) -> None:
    go_on = threading.Event()
    run = StepThread._run

    def late(self: StepThread) -> None:
        assert go_on.wait(LIMIT_S)
        run(self)

    monkeypatch.setattr(StepThread, "_run", late)
    thread = bench.start()
    threading.Timer(0.1, go_on.set).start()
    thread.close()
    with pytest.raises(RuntimeClosed):
        thread.began.result(0)
    assert bench.world.order() == []


def test_a_start_that_fails_is_what_began_raises(bench: Bench) -> None:
    def publish(_: Any) -> None:
        raise RuntimeError("no weights")

    bench.world.publish = publish  # type: ignore[method-assign, assignment]
    with pytest.raises(RuntimeError, match="no weights"):
        bench.start().began.result(LIMIT_S)


def test_what_fails_beside_the_steps_ends_them_also_between_two(bench: Bench) -> None:
    lost = Future[None]()

    async def watch() -> None:
        await asyncio.wrap_future(lost)
        raise WorkerDied("actor", 0, "h", "signal 9 (SIGKILL)")

    bench.others = {"the watch": watch}
    thread = bench.start()
    step(thread, 1).result(LIMIT_S)
    lost.set_result(None)
    thread._thread.join(LIMIT_S)
    with pytest.raises(WorkerDied):
        step(thread, 2).result(0)


def test_closing_gives_up_the_step_under_way_and_those_that_wait(bench: Bench) -> None:
    waits, _ = bench.hold()
    thread = bench.start()
    orders = [step(thread, 1), step(thread, 2)]
    assert waits.wait(LIMIT_S)
    thread.close()
    for order in [*orders, step(thread, 3)]:
        with pytest.raises(RuntimeClosed, match="has been closed"):
            order.result(0)
    thread.close()


def test_closing_between_two_steps_waits_for_a_checkpoint(bench: Bench, monkeypatch: Any) -> None:
    finished: list[str] = []

    async def late(_: Any) -> None:
        await asyncio.sleep(0.1)
        finished.append("written")

    monkeypatch.setattr("neoproto.trainer.checkpoint.saving.Checkpointer.finished", late)
    thread = bench.start()
    step(thread, 1).result(LIMIT_S)
    thread.close()
    assert finished == ["written"]


def test_closing_does_not_wait_for_a_checkpoint_for_ever(bench: Bench, monkeypatch: Any) -> None:
    async def never(_: Any) -> None:
        await for_ever()

    monkeypatch.setattr("neoproto.trainer.checkpoint.saving.Checkpointer.finished", never)
    thread = bench.start()
    step(thread, 1).result(LIMIT_S)
    thread.close(0.05)
    assert not thread._thread.is_alive()
