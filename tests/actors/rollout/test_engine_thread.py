"""The engine's thread: overlapping callers, failures, cancellation, the end."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import Iterator

import pytest
import torch

from actors.rollout.engine_thread import EngineThread
from neoproto.data.generation import GenerateRequest, SamplingParams
from neoproto.errors import RolloutError, WeightMismatch
from neoproto.weights import TensorLayout, WeightVersion
from tests.actors.fake_engine import FakeEngine, answer

LAYOUT = {"w": TensorLayout(dtype="float32", shape=(2,))}


def requests(count: int, *, tokens: int = 5, name: str = "u") -> list[GenerateRequest]:
    sampling = SamplingParams(max_tokens=tokens)
    return [
        GenerateRequest(
            uid=name, sample_index=i, prompt_ids=(1, i), sampling=sampling, seed=7 * i + len(name)
        )
        for i in range(count)
    ]


def never_ending(name: str = "long") -> GenerateRequest:
    return GenerateRequest(
        uid=name, sample_index=0, prompt_ids=(1,), sampling=SamplingParams(max_tokens=10**6), seed=10**6 - 2
    )


@pytest.fixture
def fake() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
def engine(fake: FakeEngine) -> Iterator[EngineThread]:
    thread = EngineThread(lambda: fake)
    yield thread
    thread.close()


def test_answers_come_in_the_order_of_the_requests(engine: EngineThread, fake: FakeEngine) -> None:
    asked = requests(20)
    assert asyncio.run(engine.generate(asked)) == [answer(request, 0) for request in asked]
    assert asyncio.run(engine.generate([])) == []
    assert fake.threads.isdisjoint({threading.get_ident()})
    assert len(fake.threads) == 1


def test_callers_share_the_running_batch(engine: EngineThread, fake: FakeEngine) -> None:
    together = []
    first_step = threading.Event()
    second_asked = threading.Event()

    def on_step(running: int) -> None:
        first_step.set()
        second_asked.wait(5)
        together.append(running)

    fake.on_step = on_step

    async def main() -> None:
        long = asyncio.create_task(engine.generate([never_ending()]))
        await asyncio.to_thread(first_step.wait, 5)
        short = asyncio.create_task(engine.generate(requests(3, name="short")))
        await asyncio.sleep(0)
        second_asked.set()
        assert [made.uid for made in await short] == ["short"] * 3
        assert not long.done()
        long.cancel()
        with pytest.raises(asyncio.CancelledError):
            await long

    asyncio.run(main())
    assert max(together) == 4


def test_a_cancelled_callers_requests_are_aborted_and_others_go_on(
    engine: EngineThread, fake: FakeEngine
) -> None:
    async def main() -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await engine.generate([never_ending()])
        assert len(await engine.generate(requests(2))) == 2

    asyncio.run(main())
    assert len(fake.aborted) == 1
    assert not fake.busy


def test_a_request_that_can_never_run_fails_its_caller_alone(engine: EngineThread, fake: FakeEngine) -> None:
    too_long = GenerateRequest(
        uid="x", sample_index=1, prompt_ids=(1,) * 200, sampling=SamplingParams(max_tokens=5), seed=0
    )

    async def main() -> None:
        with pytest.raises(RolloutError, match=r"sample x/1 \(200 prompt tokens, up to 5 new\).*too long"):
            await engine.generate([never_ending(), too_long])
        assert len(await engine.generate(requests(2))) == 2

    asyncio.run(main())
    assert len(fake.aborted) == 1


def test_a_failing_step_ends_the_engine_for_every_caller(engine: EngineThread, fake: FakeEngine) -> None:
    started = threading.Event()
    fail = threading.Event()

    def on_step(running: int) -> None:
        started.set()
        if fail.is_set():
            raise OSError("kernel missing")

    fake.on_step = on_step

    async def main() -> None:
        one = asyncio.create_task(engine.generate([never_ending("a")]))
        two = asyncio.create_task(engine.generate([never_ending("b")]))
        await asyncio.to_thread(started.wait, 5)
        fail.set()
        for task in (one, two):
            with pytest.raises(RolloutError, match="has failed: OSError: kernel missing") as caught:
                await task
            assert isinstance(caught.value.__cause__, OSError)
        with pytest.raises(RolloutError, match="kernel missing"):
            await engine.generate(requests(1))
        with pytest.raises(RolloutError, match="kernel missing"):
            await engine.load(WeightVersion(epoch=0, n=1), {"w": torch.zeros(2)})

    asyncio.run(main())


def test_weights_are_replaced_between_steps(engine: EngineThread, fake: FakeEngine) -> None:
    async def main() -> None:
        await engine.check_layout(LAYOUT, "weights 0.4")
        await engine.load(WeightVersion(epoch=0, n=4), {"w": torch.ones(2)})
        (made,) = await engine.generate(requests(1))
        assert set(made.weight_versions) == {4}

    asyncio.run(main())
    assert torch.equal(fake.loaded["w"], torch.ones(2))


def test_a_layout_that_does_not_fit_leaves_the_engine_alone(engine: EngineThread) -> None:
    async def main() -> None:
        with pytest.raises(WeightMismatch, match=r"weights 0\.1 .* unexpected: v"):
            await engine.check_layout(LAYOUT | {"v": LAYOUT["w"]}, "weights 0.1")
        assert len(await engine.generate(requests(2))) == 2

    asyncio.run(main())


def test_a_load_that_fails_half_way_ends_the_replica(engine: EngineThread, fake: FakeEngine) -> None:
    def on_load() -> None:
        raise RuntimeError("out of memory")

    fake.on_load = on_load

    async def main() -> None:
        running = asyncio.create_task(engine.generate([never_ending()]))
        with pytest.raises(RolloutError, match=r"loading weights 0\.2 failed: RuntimeError: out of memory"):
            await engine.load(WeightVersion(epoch=0, n=2), {"w": torch.zeros(2)})
        with pytest.raises(RolloutError, match="out of memory"):
            await running
        with pytest.raises(RolloutError, match="out of memory"):
            await engine.generate(requests(1))

    asyncio.run(main())


def test_closing_ends_calls_in_flight_and_refuses_later_ones(engine: EngineThread) -> None:
    async def main() -> None:
        running = asyncio.create_task(engine.generate([never_ending()]))
        await asyncio.sleep(0)  # it is queued, before the command that closes
        engine.close()
        with pytest.raises(RolloutError, match="has been closed"):
            await running
        with pytest.raises(RolloutError, match="has been closed"):
            await engine.generate(requests(1))

    asyncio.run(main())
    engine.close()


def test_an_engine_that_cannot_be_built_raises_where_it_was_asked_for() -> None:
    def build() -> FakeEngine:
        raise ValueError("no such model")

    with pytest.raises(ValueError, match="no such model"):
        EngineThread(build)


def test_the_thread_carries_the_callers_context() -> None:
    variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable", default="unset")
    seen = []

    def build() -> FakeEngine:
        seen.append(variable.get())
        return FakeEngine()

    variable.set("set")
    EngineThread(build).close()
    assert seen == ["set"]
