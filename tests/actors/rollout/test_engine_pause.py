"""Pausing, loading in mid-generation, going on: nothing is lost, and every token says its weights."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from actors.rollout import engine_thread
from actors.rollout.continuation import Partial, continued, joined
from actors.rollout.engine_thread import EngineThread
from neoproto.data.generation import GenerateRequest, Generation, SamplingParams
from neoproto.errors import RolloutError
from neoproto.weights import WeightVersion
from neoproto.weights.options import PauseMode
from tests.actors.fake_engine import FakeEngine, answer, length_of

WEIGHTS = {"w": torch.zeros(2)}
ONE = WeightVersion(epoch=0, n=1)


def request(length: int, name: str = "u", most: int = 2000) -> GenerateRequest:
    """A request whose answer has so many tokens."""
    made = GenerateRequest(
        uid=name,
        sample_index=0,
        prompt_ids=(1,),
        sampling=SamplingParams(max_tokens=most),
        seed=(length - 2) % (most + 1),
    )
    assert length_of(made)[0] == length
    return made


class Steps:
    """Lets the engine run up to a chosen step, and no further before it is told."""

    def __init__(self, fake: FakeEngine) -> None:
        self.count, self._stop_at = 0, 10**9
        self.reached, self._go = threading.Event(), threading.Event()
        self.in_flight: list[int] = []
        fake.on_step = self._step

    def stop_at(self, step: int) -> None:
        self._stop_at = step
        self.reached.clear()
        self._go.clear()

    def go(self) -> None:
        self._go.set()

    def _step(self, running: int) -> None:
        self.count += 1
        self.in_flight.append(running)
        if self.count == self._stop_at:
            self.reached.set()
            assert self._go.wait(10)


@pytest.fixture
def fake() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
def steps(fake: FakeEngine) -> Steps:
    return Steps(fake)


@pytest.fixture
def engine(fake: FakeEngine, steps: Steps) -> Iterator[EngineThread]:
    thread = EngineThread(lambda: fake)
    yield thread
    thread.close()


async def pause_after(
    engine: EngineThread, steps: Steps, count: int, mode: PauseMode, drain_s: float = 0.0
) -> None:
    """Pause when the engine has made `count` steps."""
    assert await asyncio.to_thread(steps.reached.wait, 10)
    assert steps.count == count
    pausing = asyncio.create_task(engine.pause(mode, drain_s))
    await asyncio.sleep(0)  # its command is queued: the thread finds it after this step
    steps.go()
    await pausing


async def turns(engine: EngineThread, fake: FakeEngine, count: int = 20) -> None:
    """Let the thread look `count` times whether there is something to step."""
    for _ in range(count):
        await engine.check_layout(fake.layout, "the model")


def test_a_kept_request_goes_on_where_it_was_on_the_new_weights(
    engine: EngineThread, fake: FakeEngine, steps: Steps
) -> None:
    async def main() -> None:
        steps.stop_at(4)
        running = asyncio.create_task(engine.generate([request(9), request(3, "short")]))
        await pause_after(engine, steps, 4, "keep")
        await turns(engine, fake)
        assert steps.count == 4
        await engine.load(ONE, WEIGHTS)
        await engine.resume()
        assert await running == [answer(request(9), 0, 0, 0, 0, 1), answer(request(3, "short"), 0)]

    asyncio.run(main())
    assert engine.version == ONE
    assert fake.aborted == []


def test_an_aborted_request_goes_on_as_a_continuation_of_what_it_had(
    engine: EngineThread, fake: FakeEngine, steps: Steps
) -> None:
    asked = request(9, most=12)

    def pieces() -> Generation:
        first = answer(asked, 0)
        begun = Partial(
            token_ids=first.token_ids[:3], log_probs=first.log_probs[:3], weight_versions=(0, 0, 0)
        )
        second = answer(continued(asked, begun), 1)
        begun = begun.followed_by(
            Partial(token_ids=second.token_ids[:2], log_probs=second.log_probs[:2], weight_versions=(1, 1))
        )
        return joined(asked, begun, answer(continued(asked, begun), 2))

    async def main() -> None:
        steps.stop_at(3)
        running = asyncio.create_task(engine.generate([asked]))
        await pause_after(engine, steps, 3, "abort")
        assert not fake.running
        await engine.load(ONE, WEIGHTS)
        steps.stop_at(5)
        await engine.resume()
        await pause_after(engine, steps, 5, "abort")
        await engine.load(ONE.next(), WEIGHTS)
        await engine.resume()
        (made,) = await running
        assert made == pieces()
        assert made.prompt_ids == asked.prompt_ids
        assert made.weight_versions[:5] == (0, 0, 0, 1, 1)
        assert set(made.weight_versions[5:]) == {2}
        assert len(made.token_ids) <= asked.sampling.max_tokens

    asyncio.run(main())


def test_a_continuation_asks_for_what_is_left_with_other_random_numbers() -> None:
    asked = request(9, most=12)
    begun = Partial(token_ids=(5, 6), log_probs=(-1.0, -2.0), weight_versions=(3, 3))
    rest = continued(asked, begun)
    assert rest.prompt_ids == (1, 5, 6)
    assert rest.sampling == SamplingParams(max_tokens=10)
    assert rest.seed != asked.seed
    assert rest.seed != continued(asked, begun.followed_by(begun)).seed
    assert continued(asked, Partial()) == asked


@pytest.mark.parametrize("mode", ["abort", "keep"])
def test_requests_that_arrive_while_paused_start_on_the_new_weights(
    engine: EngineThread, fake: FakeEngine, steps: Steps, mode: PauseMode
) -> None:
    async def main() -> None:
        await engine.pause(mode, 0.0)
        late = asyncio.create_task(engine.generate([request(3, "late")]))
        left = asyncio.create_task(engine.generate([request(3, "left")]))
        await turns(engine, fake)
        assert not fake.running
        left.cancel()
        await engine.load(ONE, WEIGHTS)
        await engine.resume()
        assert await late == [answer(request(3, "late"), 1)]
        assert left.cancelled()

    asyncio.run(main())
    assert max(steps.in_flight) == 1


def test_draining_lets_short_requests_end_on_their_weights_and_new_ones_wait(
    engine: EngineThread, steps: Steps
) -> None:
    async def main() -> None:
        steps.stop_at(2)
        running = asyncio.create_task(engine.generate([request(40, "old")]))
        assert await asyncio.to_thread(steps.reached.wait, 10)
        pausing = asyncio.create_task(engine.pause("abort", 30.0))
        await asyncio.sleep(0)
        late = asyncio.create_task(engine.generate([request(3, "late")]))
        await asyncio.sleep(0)
        steps.go()
        await pausing
        assert await running == [answer(request(40, "old"), 0)]
        await engine.load(ONE, WEIGHTS)
        await engine.resume()
        assert await late == [answer(request(3, "late"), 1)]

    asyncio.run(main())
    assert max(steps.in_flight) == 1


def test_draining_ends_when_its_time_is_up(engine: EngineThread, fake: FakeEngine) -> None:
    begun, slow = threading.Event(), threading.Event()

    def on_step(running: int) -> None:
        begun.set()
        slow.wait(0.02)

    fake.on_step = on_step

    async def main() -> None:
        running = asyncio.create_task(engine.generate([request(1500)]))
        assert await asyncio.to_thread(begun.wait, 10)
        await engine.pause("keep", 0.1)
        assert not running.done()
        await engine.load(ONE, WEIGHTS)
        slow.set()
        await engine.resume()
        (made,) = await running
        assert set(made.weight_versions) == {0, 1}

    asyncio.run(main())


def test_an_interrupted_request_whose_caller_left_does_not_come_back(
    engine: EngineThread, fake: FakeEngine, steps: Steps
) -> None:
    async def main() -> None:
        steps.stop_at(2)
        running = asyncio.create_task(engine.generate([request(9)]))
        await pause_after(engine, steps, 2, "abort")
        running.cancel()
        await asyncio.wait([running])
        await engine.resume()
        assert await engine.generate([request(3)]) == [answer(request(3), 0)]

    asyncio.run(main())
    assert not fake.busy


def test_a_cancelled_pause_leaves_the_engine_running(
    engine: EngineThread, fake: FakeEngine, steps: Steps
) -> None:
    async def main() -> None:
        steps.stop_at(2)
        running = asyncio.create_task(engine.generate([request(300)]))
        assert await asyncio.to_thread(steps.reached.wait, 10)
        pausing = asyncio.create_task(engine.pause("abort", 30.0))
        await asyncio.sleep(0)
        with pytest.raises(RolloutError, match="paused already"):
            await engine.pause("keep", 0.0)
        pausing.cancel()
        await asyncio.wait([pausing])
        steps.go()
        assert await running == [answer(request(300), 0)]
        await engine.pause("keep", 30.0)
        await engine.resume()

    asyncio.run(main())


def test_a_cancelled_load_returns_when_nothing_reads_the_tensors_any_more(
    engine: EngineThread, fake: FakeEngine
) -> None:
    loading, finish = threading.Event(), threading.Event()

    def on_load() -> None:
        loading.set()
        assert finish.wait(10)

    fake.on_load = on_load

    async def main() -> None:
        await engine.pause("keep", 0.0)
        load = asyncio.create_task(engine.load(ONE, WEIGHTS))
        await asyncio.to_thread(loading.wait, 10)
        for _ in range(2):
            load.cancel()
            for _ in range(20):  # turns enough for it to end, if it did not wait for the thread
                await asyncio.sleep(0)
            assert not load.done()
        finish.set()
        with pytest.raises(asyncio.CancelledError):
            await load
        assert engine.version == ONE
        await engine.resume()
        assert await engine.generate([request(3)]) == [answer(request(3), 1)]

    asyncio.run(main())


@pytest.mark.parametrize("end", ["load", "fail", "close"])
def test_whoever_waits_for_a_paused_engine_that_ends_is_refused(
    engine: EngineThread, fake: FakeEngine, steps: Steps, end: str
) -> None:
    def broken() -> None:
        raise OSError("out of memory")

    async def finish() -> str:
        if end == "close":
            engine.close()
            return "has been closed"
        if end == "fail":
            await engine.fail(OSError("lost its lease"))
            return "lost its lease"
        fake.on_load = broken
        with pytest.raises(RolloutError, match=r"loading weights 0\.1 failed"):
            await engine.load(ONE, WEIGHTS)
        await engine.resume()
        return "out of memory"

    async def main() -> None:
        steps.stop_at(2)
        running: list[asyncio.Task[Any]] = [asyncio.create_task(engine.generate([request(9)]))]
        await pause_after(engine, steps, 2, "abort")
        running.append(asyncio.create_task(engine.generate([request(9)])))
        await asyncio.sleep(0)
        said = await finish()
        for task in running:
            with pytest.raises(RolloutError, match=said):
                await asyncio.wait_for(task, 10)
        with pytest.raises(RolloutError, match=said):
            await engine.pause("keep", 5.0)
        with pytest.raises(RolloutError, match=said):
            await asyncio.wait_for(engine.generate([request(3)]), 10)

    asyncio.run(main())
    assert not fake.running or end == "close"


def test_the_time_it_stood_still_holds_the_time_it_loaded_but_not_the_draining(
    engine: EngineThread, fake: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, begun = 0.0, threading.Event()
    monkeypatch.setattr(engine_thread, "time", SimpleNamespace(perf_counter=lambda: now))

    def takes(seconds: float) -> None:
        nonlocal now
        now += seconds
        begun.set()

    fake.on_step = lambda running: takes(1.0)
    fake.on_load = lambda: takes(30.0)

    async def main() -> None:
        running = asyncio.create_task(engine.generate([request(20)]))
        assert await asyncio.to_thread(begun.wait, 10)
        await engine.pause("keep", 30.0)
        await running
        takes(5.0)
        await engine.load(ONE, WEIGHTS)
        await engine.resume()

    asyncio.run(main())
    times = engine.times
    assert (times.last_loading, times.last_paused) == (30.0, 35.0)
    assert (times.paused, times.loading) == (times.last_paused, times.last_loading)
