from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest

from neoproto.data import DataProto
from neoproto.errors import DeadlineExceeded, PromptFailed, ReplicaFailed, RolloutError, WorkerDied
from neoproto.trainer.dispatcher import Dispatcher
from neoproto.trainer.prompt_queue import PromptCounts, PromptQueue
from neoproto.trainer.replay_buffer import ReplayBuffer
from neoproto.weights import WeightVersion
from tests.neoproto.trainer.replay import answers, prompts, version
from tests.virtual_time import run

N = 2
MEANWHILE = 5.0
"""Seconds in which a dispatcher that would do it has done it many times over."""
LONG = 600.0


class FakeReplica:
    """Answers on its version when `gate` is open; a test may make it fail, or never end."""

    def __init__(self, name: str, served: int | None = 0) -> None:
        self.name, self.served, self.up = name, served, True
        self.calls: list[list[str]] = []
        self.timeouts: list[float] = []
        self.metas: list[dict[str, Any]] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.failure: BaseException | None = None

    async def generate(self, batch: DataProto, timeout: float) -> DataProto:
        uids = [str(uid) for uid in batch["uid"]]
        self.calls.append(uids)
        self.timeouts.append(timeout)
        self.metas.append(dict(batch.meta_info))
        await self.gate.wait()
        if self.failure is not None:
            self.up = not isinstance(self.failure, ReplicaFailed)
            raise self.failure
        assert self.served is not None
        return answers([uid for uid in uids for _ in range(N)], [[self.served] for _ in uids * N])


class Scene:
    def __init__(self, *served: int | None, most: int = 100, **options: Any) -> None:
        self.replicas = [FakeReplica(f"rollout/{rank}", n) for rank, n in enumerate(served)]
        self.queue = PromptQueue(max_inflight_prompts=most)
        self.buffer = ReplayBuffer(
            self.queue,
            n=N,
            epoch=0,
            max_off_policy_threshold=100,
            strategy="drop",
            refill=lambda count: None,
            poll_interval=0.01,
        )
        usual: dict[str, Any] = {
            "max_inflight_prompts": most,
            "max_per_call": 2,
            "poll_interval": 0.01,
            "timeout": 7.0,
            "version_aware": True,
        }
        self.dispatcher = Dispatcher(
            self.queue, self.buffer, self.replicas, lambda: self.serving(), **(usual | options)
        )

    async def serving(self) -> Mapping[str, WeightVersion]:
        return {r.name: version(r.served) for r in self.replicas if r.served is not None}

    def add(self, count: int, *, asks: int = 0, first: int = 0) -> None:
        self.queue.add(prompts(count, first), enqueue_step=1, min_weight_version=version(asks))

    @property
    def calls(self) -> list[list[list[str]]]:
        return [replica.calls for replica in self.replicas]

    async def until(self, holds: Callable[[], bool]) -> None:
        """Return when it holds; in virtual time, so a limit says nothing of the machine."""
        async with asyncio.timeout(LONG):
            while not holds():  # noqa: ASYNC110 -- what is looked at has no event
                await asyncio.sleep(0.01)

    async def during(self, play: Callable[[], Any]) -> None:
        """Run the dispatcher while `play` runs; the dispatcher's failure is the test's."""
        running = asyncio.create_task(self.dispatcher.run())
        playing = asyncio.create_task(play())
        await asyncio.wait([running, playing], return_when=asyncio.FIRST_COMPLETED)
        for task in (playing, running):
            if task.done():
                task.result()
            task.cancel()
        await asyncio.gather(running, playing, return_exceptions=True)


def test_prompts_are_spread_over_replicas_in_chunks_and_their_groups_reach_the_buffer() -> None:
    async def scenario() -> None:
        scene = Scene(0, 0)

        async def course() -> None:
            scene.add(6)
            await scene.until(lambda: len(scene.buffer) == 6)
            scene.add(1, first=6)
            await scene.until(lambda: len(scene.buffer) == 7)

        await scene.during(course)
        assert scene.calls == [[["p0", "p1"], ["p4", "p5"], ["p6"]], [["p2", "p3"]]]
        assert scene.queue.counts() == PromptCounts(pending=0, running=0, finished=7, failed=0)
        assert scene.replicas[0].timeouts[0] == 7.0
        assert scene.replicas[0].metas[0] == {"validate": False}

    run(scenario)


def test_no_more_prompts_are_out_than_allowed_and_no_replica_has_more_than_its_share() -> None:
    async def scenario() -> None:
        scene = Scene(1, 0, most=4, max_per_call=4)
        for replica in scene.replicas:
            replica.gate.clear()

        async def course() -> None:
            scene.add(6, asks=1)
            await scene.until(lambda: len(scene.calls[0]) == 1)
            await asyncio.sleep(MEANWHILE)
            assert scene.calls == [[["p0", "p1"]], []]  # half of four, though it alone serves version 1
            scene.replicas[1].served = 1
            await scene.until(lambda: len(scene.calls[1]) == 1)
            await asyncio.sleep(MEANWHILE)
            assert scene.queue.counts().running == 4
            scene.replicas[0].gate.set()
            await scene.until(lambda: len(scene.calls[0]) == 2)

        await scene.during(course)
        assert scene.calls == [[["p0", "p1"], ["p4", "p5"]], [["p2", "p3"]]]

    run(scenario)


@pytest.mark.parametrize("aware", [True, False])
def test_a_prompt_starts_once_a_replica_or_all_of_them_serve_its_version(aware: bool) -> None:
    async def scenario() -> None:
        scene = Scene(1, None, version_aware=aware)

        async def course() -> None:
            scene.add(1, asks=1)
            await asyncio.sleep(MEANWHILE)
            assert len(scene.buffer) == int(aware)
            scene.replicas[1].served = 0
            await asyncio.sleep(MEANWHILE)
            assert len(scene.buffer) == int(aware)
            scene.replicas[1].served = 2
            await scene.until(lambda: len(scene.buffer) == 1)

        await scene.during(course)

    run(scenario)


def test_a_chunk_holds_only_prompts_that_its_replica_may_answer() -> None:
    async def scenario() -> None:
        scene = Scene(1, 0, version_aware=False, max_per_call=8)

        async def course() -> None:
            scene.add(1, asks=0)
            scene.add(1, asks=1, first=1)
            await scene.until(lambda: len(scene.buffer) == 1)
            await asyncio.sleep(MEANWHILE)
            assert scene.calls == [[["p0"]], []]
            scene.replicas[1].served = 1
            await scene.until(lambda: len(scene.buffer) == 2)

        await scene.during(course)

    run(scenario)


def test_running_prompts_are_dated_by_what_their_replica_served() -> None:
    async def scenario() -> None:
        scene = Scene(3)
        scene.replicas[0].gate.clear()

        async def course() -> None:
            scene.add(1)
            await scene.until(lambda: scene.queue.counts().running == 1)
            assert scene.queue.oldest_running() == version(3)

        await scene.during(course)

    run(scenario)


DEAD = ReplicaFailed("rollout/0", "signal 9 (SIGKILL)")


def test_prompts_of_a_replica_that_failed_go_to_others_at_once() -> None:
    async def scenario() -> None:
        scene = Scene(0, 0, poll_interval=60.0)  # nobody looks again at what replicas serve
        scene.replicas[0].failure = DEAD

        async def course() -> None:
            scene.add(4)
            await scene.until(lambda: len(scene.buffer) == 4)
            scene.add(3, first=4)
            await scene.until(lambda: len(scene.buffer) == 7)

        await scene.during(course)
        assert scene.calls == [[["p0", "p1"]], [["p2", "p3"], ["p0", "p1"], ["p4", "p5"], ["p6"]]]
        assert scene.queue.counts() == PromptCounts(pending=0, running=0, finished=7, failed=0)

    run(scenario)


def test_prompts_of_the_only_replica_wait_until_it_is_up_again() -> None:
    async def scenario() -> None:
        scene = Scene(0)
        (replica,) = scene.replicas
        replica.failure = DEAD

        async def course() -> None:
            scene.add(2)
            await scene.until(lambda: not replica.up)
            await asyncio.sleep(MEANWHILE)
            assert scene.queue.counts().pending == 2
            assert len(replica.calls) == 1
            replica.failure, replica.up = None, True
            await scene.until(lambda: len(scene.buffer) == 2)

        await scene.during(course)

    run(scenario)


def test_a_replica_that_failed_idle_is_given_nothing_and_costs_no_prompt_a_try() -> None:
    async def scenario() -> None:
        scene = Scene(0, 0, poll_interval=60.0)

        async def course() -> None:
            scene.add(1)
            await scene.until(lambda: len(scene.buffer) == 1)
            scene.replicas[0].up = False
            scene.add(2, first=1)
            await scene.until(lambda: len(scene.buffer) == 3)

        await scene.during(course)
        assert scene.calls == [[["p0"]], [["p1", "p2"]]]

    run(scenario)


@pytest.mark.parametrize("aware", [True, False])
def test_nobody_waits_for_the_version_of_a_replica_that_is_down(aware: bool) -> None:
    async def scenario() -> None:
        scene = Scene(1, 0, version_aware=aware)
        scene.replicas[1].up = False

        async def course() -> None:
            scene.add(1, asks=1)
            await scene.until(lambda: len(scene.buffer) == 1)

        await scene.during(course)
        assert scene.calls == [[["p0"]], []]

    run(scenario)


def test_a_prompt_that_every_replica_fails_on_is_a_failed_prompt() -> None:
    async def scenario() -> None:
        scene = Scene(0, 0, 0)
        for replica in scene.replicas:
            replica.failure = DEAD

        async def course() -> None:
            scene.add(1)
            await scene.until(lambda: scene.queue.counts().failed == 1)
            with pytest.raises(PromptFailed, match=r"p0 failed after 3 tries: .*SIGKILL") as caught:
                scene.queue.raise_if_failed()
            assert caught.value.__cause__ is DEAD

        await scene.during(course)

    run(scenario)


def test_a_call_that_fails_otherwise_ends_the_dispatcher_and_its_prompts_are_pending_again() -> None:
    async def scenario() -> Sequence[str]:
        scene = Scene(0)
        scene.replicas[0].failure = WorkerDied("registry", 0, "here", "signal 9 (SIGKILL)")
        scene.add(2)
        with pytest.raises(WorkerDied, match="SIGKILL"):
            await scene.dispatcher.run()
        assert scene.queue.counts() == PromptCounts(pending=2, running=0, finished=0, failed=0)
        return [str(ticket.tries) for ticket in scene.queue.claim_nowait(5, lambda asked: True)]

    assert run(scenario) == ["1", "1"]


def test_an_answer_that_breaks_the_contract_ends_the_dispatcher() -> None:
    async def scenario() -> None:
        scene = Scene(0)
        scene.add(1, asks=0)
        scene.replicas[0].served = 5

        async def serving() -> Mapping[str, WeightVersion]:
            return {"rollout/0": version(9)}

        scene.serving = serving  # type: ignore[method-assign]
        scene.add(1, asks=9, first=1)
        with pytest.raises(RolloutError, match=r"asked for weights 0\.9"):
            await scene.dispatcher.run()

    run(scenario)


def test_a_replica_that_keeps_no_deadline_is_given_up_a_little_later() -> None:
    async def scenario() -> None:
        scene = Scene(0, timeout=7.0)
        scene.replicas[0].gate.clear()
        scene.add(1)
        with pytest.raises(DeadlineExceeded, match=r"rollout/0\.generate did not answer within 12\.0 s"):
            await scene.dispatcher.run()
        assert asyncio.get_running_loop().time() == pytest.approx(12.0)

    run(scenario)


def test_a_deadline_of_the_call_keeps_its_own_words() -> None:
    async def scenario() -> None:
        scene = Scene(0)
        scene.replicas[0].failure = DeadlineExceeded("generate_sequences", "rollout", [0], 7.0, {0: "stack"})
        scene.add(1)
        with pytest.raises(DeadlineExceeded, match=r"generate_sequences .*\n.*rank 0 was at .*\nstack"):
            await scene.dispatcher.run()

    run(scenario)


def test_a_registry_that_fails_ends_the_dispatcher_and_stops_its_calls() -> None:
    async def scenario() -> None:
        scene = Scene(0)
        scene.replicas[0].gate.clear()
        looks: list[int] = []

        async def serving() -> Mapping[str, WeightVersion]:
            looks.append(1)
            if len(looks) == 3:
                raise WorkerDied("registry", 0, "here", "exit code 1")
            return {"rollout/0": version(0)}

        scene.serving = serving  # type: ignore[method-assign]
        scene.add(1)
        with pytest.raises(WorkerDied, match=r"registry\[0\]"):
            await scene.dispatcher.run()
        assert scene.calls == [[["p0"]]]
        assert asyncio.all_tasks() == {asyncio.current_task()}

    run(scenario)


@pytest.mark.parametrize(("names", "per_call"), [((), 1), (("a", "a"), 1), (("a",), 0)])
def test_replicas_and_calls_are_checked(names: tuple[str, ...], per_call: int) -> None:
    scene = Scene(0)
    with pytest.raises(ValueError, match="replicas with different names and max_per_call >= 1"):
        Dispatcher(
            scene.queue,
            scene.buffer,
            [FakeReplica(name) for name in names],
            scene.serving,
            max_inflight_prompts=1,
            max_per_call=per_call,
            poll_interval=1.0,
            timeout=1.0,
            version_aware=True,
        )
