"""Whatever dies, and whenever: each prompt is answered, and none twice."""

from __future__ import annotations

import asyncio

from hypothesis import given, settings
from hypothesis import strategies as st

from neoproto.data import DataProto
from neoproto.trainer.dispatcher import Dispatcher
from neoproto.trainer.prompt_queue import PromptCounts, PromptQueue
from neoproto.trainer.replay_buffer import ReplayBuffer
from neoproto.trainer.tasks import beside
from tests.neoproto.trainer.processes import Cluster, Process
from tests.neoproto.trainer.replay import prompts, version

N = 2
ENOUGH = 1000
"""Tries and restarts."""


class SlowProcess(Process):
    """Takes some turns of the event loop to answer."""

    async def generate_sequences(self, batch: DataProto) -> DataProto:
        for _ in range(3):
            await asyncio.sleep(0)
        return await super().generate_sequences(batch)


class DyingCluster(Cluster):
    def process(self, name: str) -> Process:
        return SlowProcess(name, self.registry, self._n)


moments = st.lists(st.tuples(st.integers(0, 6), st.integers(0, 2), st.booleans()), max_size=12)


@settings(max_examples=25)
@given(
    replicas=st.integers(1, 3),
    count=st.integers(1, 12),
    per_call=st.integers(1, 4),
    in_flight=st.integers(1, 12),
    deaths=moments,
)
def test_no_prompt_is_lost_or_answered_twice(
    replicas: int, count: int, per_call: int, in_flight: int, deaths: list[tuple[int, int, bool]]
) -> None:
    """Deaths come after so many turns, of any replica, some with a publish at the same time."""
    cluster = DyingCluster(replicas, n=N, agents=True, max_restarts=ENOUGH)
    queue = PromptQueue(max_inflight_prompts=in_flight, max_tries=ENOUGH)
    buffer = ReplayBuffer(
        queue,
        n=N,
        epoch=0,
        max_off_policy_threshold=ENOUGH,
        strategy="drop",
        refill=lambda evicted: None,
        poll_interval=0.01,
    )

    async def play() -> None:
        await cluster.publish(0)
        assert await cluster.set.wait_serving([one.name for one in cluster.set.replicas], version(0), 5)
        dispatcher = Dispatcher(
            queue,
            buffer,
            cluster.set.replicas,
            cluster.set.serving,
            max_inflight_prompts=in_flight,
            max_per_call=per_call,
            poll_interval=0.001,
            timeout=5.0,
            version_aware=True,
        )
        await beside(course(), {"the dispatcher": dispatcher.run()})

    async def course() -> None:
        queue.add(prompts(count), enqueue_step=1, min_weight_version=version(0))
        for number, (turns, index, publishes) in enumerate(deaths, start=1):
            for _ in range(turns):
                await asyncio.sleep(0)
            if publishes:
                await cluster.publish(number)
            group = cluster.set.replicas[index % replicas].process.group
            assert isinstance(group, Process)
            group.die()
        await cluster.until(lambda: queue.counts().finished == count)

    cluster.run(play)
    assert queue.counts() == PromptCounts(pending=0, running=0, finished=count, failed=0)
    groups = buffer.state().groups
    assert sorted(group.ticket.serial for group in groups) == list(range(count))
    assert sorted(group.ticket.uid for group in groups) == sorted(f"p{number}" for number in range(count))
    assert len(buffer) == count
