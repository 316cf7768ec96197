"""The update agent with a real registry and puller, an engine that only notes calls, and virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from neoproto.errors import LeaseExpired, NeoProtoError, RolloutError, TornRead, WeightMismatch
from neoproto.store import MemoryStore
from neoproto.weights import Publisher, Puller, TensorLayout, WeightRegistry, check_layout
from neoproto.weights.agent import MOST_TORN_READS, UpdateAgent, run_to_end
from neoproto.weights.options import PauseMode, UpdateOptions
from neoproto.weights.puller import finish
from tests.neoproto.weights.manifests import version
from tests.virtual_time import run

TTL = 5.0


class NotedEngine:
    """Notes calls in `said`; `on_load` runs inside a load."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.on_load: Callable[[], Awaitable[None]] | None = None
        self.layout = {"w": TensorLayout(dtype="float32", shape=(2,))}
        self.cause: BaseException | None = None

    async def check_layout(self, layout: Mapping[str, TensorLayout], what: str) -> None:
        check_layout(layout, self.layout, what=what)

    async def pause(self, mode: PauseMode, drain_s: float) -> None:
        self.said.append(f"pause {mode} {drain_s:g}")

    async def load(self, served: Any, tensors: Mapping[str, Tensor]) -> None:
        assert tensors["w"].tolist() == [float(served.n)] * 2
        if self.on_load is not None:
            await self.on_load()
        self.said.append(f"load {served}")

    async def resume(self) -> None:
        self.said.append("resume")

    async def fail(self, cause: BaseException) -> None:
        self.cause = cause
        self.said.append("fail")

    @property
    def loads(self) -> list[str]:
        return [what for what in self.said if what.startswith("load")]


class TornPuller(Puller):
    """Tears the next `torn` reads: at once, or, with `late`, when their lease is checked at last.

    With `gate` a read, once `begun`, goes on when the gate is opened.
    """

    torn, late = 0, False
    gate: asyncio.Event | None = None

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.begun, self.under_way = asyncio.Event(), 0

    @asynccontextmanager
    async def pull(self, *args: Any, **kwargs: Any) -> AsyncIterator[Any]:
        async with super().pull(*args, **kwargs) as pulled:
            if self.torn > 0:
                self.torn -= 1
                if not self.late:
                    raise TornRead("the lease lapsed")
                pulled.loaded = self._torn_load  # type: ignore[method-assign]
            yield pulled

    async def _torn_load(self, replica: str) -> None:
        raise TornRead("the lease lapsed while it was loaded")

    async def _finish(self, reading: Any, stop: Any) -> Any:
        self.under_way += 1
        self.begun.set()
        if self.gate is not None:
            await self.gate.wait()
        try:
            return finish(reading, stop)
        finally:
            self.under_way -= 1


class Counted:
    """A registry whose messages are noted."""

    def __init__(self, registry: WeightRegistry) -> None:
        self._registry, self.messages = registry, list[str]()

    def __getattr__(self, name: str) -> Any:
        self.messages.append(name)
        return getattr(self._registry, name)

    def taken(self) -> list[str]:
        """The messages since the last look."""
        taken, self.messages = self.messages, []
        return taken


class Replica:
    """An agent with what it needs. `publish(n)` publishes version n, whose weights are [n, n]."""

    def __init__(self, registry: WeightRegistry | None = None, **options: Any) -> None:
        self.store, self.registry, self.engine = MemoryStore(), registry or WeightRegistry(), NotedEngine()
        self.sent = Counted(self.registry)
        self.puller = TornPuller(self.store, self.sent, "rollout/0", TTL)
        self.agent = UpdateAgent(
            self.sent,  # type: ignore[arg-type]
            self.puller,
            self.engine,
            UpdateOptions(**({"poll_interval": 1.0, "drain_timeout": 0.0} | options)),
            replica="rollout/0",
        )

    async def publish(self, n: int, name: str = "w") -> None:
        manifest = Publisher(self.store).publish(version(n), {name: torch.full((2,), float(n))})
        await self.registry.publish(manifest)

    async def serves(self, n: int) -> None:
        assert await self.registry.wait_serving(["rollout/0"], version(n), 10)


@asynccontextmanager
async def running(agent: UpdateAgent) -> AsyncIterator[asyncio.Task[Any]]:
    task = asyncio.create_task(agent.run())
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.wait([task])


def test_a_replica_follows_what_is_published() -> None:
    async def scenario() -> None:
        one = Replica(pause_mode="keep", drain_timeout=2.5)
        async with running(one.agent):
            await asyncio.sleep(60)
            assert one.agent.version is None
            for n in (3, 4):
                await one.publish(n)
                await one.serves(n)
        assert one.engine.said == [
            "pause keep 2.5",
            "load 0.3",
            "resume",
            "pause keep 2.5",
            "load 0.4",
            "resume",
        ]
        assert one.agent.version == version(4)
        assert (one.agent.stats.loads, one.agent.stats.torn_reads) == (2, 0)

    run(scenario)


def test_the_first_version_loads_at_once_and_later_ones_when_the_lag_is_reached() -> None:
    async def scenario() -> None:
        one = Replica(min_version_lag=3)
        async with running(one.agent):
            await one.publish(0)
            await one.serves(0)
            for n in (1, 2):
                await one.publish(n)
                await asyncio.sleep(60)
            assert one.engine.loads == ["load 0.0"]
            await one.publish(3)
            await one.serves(3)
        assert one.engine.loads == ["load 0.0", "load 0.3"]

    run(scenario)


def test_who_waits_for_a_version_gets_it_below_the_lag() -> None:
    async def scenario() -> None:
        one = Replica(min_version_lag=10)
        async with running(one.agent):
            await one.publish(0)
            await one.agent.wait_for_version(version(0), 5)
            waiting = asyncio.create_task(one.agent.wait_for_version(version(2), 100))
            await one.publish(1)
            await asyncio.sleep(60)
            assert not waiting.done()
            await one.publish(2)
            await waiting
            await one.agent.wait_for_version(version(1), 5)
            with pytest.raises(
                TimeoutError, match=r"rollout/0 waited 7\.5 s for weights 0\.9; it serves 0\.2"
            ):
                await one.agent.wait_for_version(version(9), 7.5)
        assert one.engine.loads == ["load 0.0", "load 0.2"]
        assert await one.registry.serving() == {"rollout/0": version(2)}

    run(scenario)


def test_a_version_that_the_trainer_waits_for_loads_below_the_lag() -> None:
    async def scenario() -> None:
        one = Replica(min_version_lag=10)
        async with running(one.agent):
            await one.publish(0)
            await one.serves(0)
            await one.publish(1)
            await asyncio.sleep(60)
            assert one.engine.loads == ["load 0.0"]
            await one.serves(1)  # as validation does
            await one.publish(2)
            await asyncio.sleep(60)
        assert one.engine.loads == ["load 0.0", "load 0.1"]

    run(scenario)


def test_the_trainer_may_drive_it_version_by_version() -> None:
    async def scenario() -> None:
        one = Replica(min_version_lag=4)
        with pytest.raises(ValueError, match=r"rollout/0 cannot have weights 0\.0 or newer; ready: none"):
            await one.agent.load(version(0))
        for n in (0, 1):
            await one.publish(n)
            await asyncio.gather(one.agent.load(version(n)), one.agent.load(version(n)))
        await one.agent.load(version(0))
        with pytest.raises(ValueError, match=r"cannot have weights 0\.5 or newer; ready: 0\.0, 0\.1"):
            await one.agent.load(version(5))
        assert one.engine.loads == ["load 0.0", "load 0.1"]

    run(scenario)


def test_it_reads_while_the_engine_generates_and_pauses_only_to_load() -> None:
    async def scenario() -> None:
        one = Replica()
        one.puller.gate = asyncio.Event()
        async with running(one.agent):
            await one.publish(0)
            await one.puller.begun.wait()
            await asyncio.sleep(60)
            assert one.engine.said == []
            one.puller.gate.set()
            await one.serves(0)
        assert one.engine.said == ["pause abort 0", "load 0.0", "resume"]
        assert one.agent.stats.last_pull == one.agent.stats.pull_seconds == pytest.approx(60)
        assert one.agent.stats.update_seconds == 0

    run(scenario)


def test_a_load_is_three_messages_to_the_registry_and_renewals() -> None:
    async def scenario() -> None:
        one = Replica()
        for n in (0, 1):
            await one.publish(n)
            await one.agent.load(version(n))
            assert one.sent.taken() == ["acquire", "validate", "loaded"]
            await asyncio.gather(one.agent.load(version(n)), one.agent.load(version(0)))
            assert one.sent.taken() == [], "it is served already"

        async def long() -> None:
            await asyncio.sleep(3 * TTL)

        one.engine.on_load = long
        async with running(one.agent):
            await asyncio.sleep(1.5)
            assert set(one.sent.taken()) == {"wait_newer"}
            await one.publish(2)
            await asyncio.sleep(3.1 * TTL)
        sent = one.sent.taken()
        loading = [name for name in sent if name not in ("wait_newer", "renew")]
        assert loading == ["acquire", "validate", "loaded"]
        assert sent.count("renew") == 8, "every third of the lease, and none after its end"
        assert sent.count("wait_newer") <= 2, "none while it loads, one each poll_interval else"
        assert await one.registry.serving() == {"rollout/0": version(2)}
        assert (await one.registry.state()).lapsed == 0

    run(scenario)


def test_a_lease_that_lapses_in_a_load_is_not_served_and_the_load_is_made_again() -> None:
    class Refusing(WeightRegistry):
        """Takes no renewals at first, as if they came too late."""

        refuses = True

        async def renew(self, lease_id: str) -> None:
            if self.refuses:
                raise LeaseExpired(lease_id)
            await super().renew(lease_id)

    async def scenario() -> None:
        registry = Refusing()
        one = Replica(registry)

        async def long() -> None:
            assert await registry.serving() == {}
            await asyncio.sleep(TTL)
            registry.refuses, one.engine.on_load = False, None

        one.engine.on_load = long
        await one.publish(0)
        await one.agent.load(version(0))
        assert one.engine.said == ["pause abort 0", "load 0.0", "load 0.0", "resume"]
        assert one.agent.stats.torn_reads == 1
        assert one.agent.stats.update_seconds == pytest.approx(TTL)
        assert await registry.serving() == {"rollout/0": version(0)}
        assert await registry.holders(version(0)) == ()

    run(scenario)


def test_a_registry_that_cannot_verify_a_load_ends_the_engine() -> None:
    class Silent(WeightRegistry):
        async def loaded(self, lease_id: str, replica: str) -> bool:
            raise NeoProtoError("the registry did not answer")

    async def scenario() -> None:
        one = Replica(Silent())
        await one.publish(0)
        with pytest.raises(NeoProtoError, match="did not answer"):
            await one.agent.load(version(0))
        assert one.engine.said == ["pause abort 0", "load 0.0", "fail", "resume"]
        assert await one.registry.serving() == {}
        assert await one.registry.holders(version(0)) == (), "the lease is released all the same"

    run(scenario)


def test_a_version_that_is_retired_before_it_is_leased_is_no_failure() -> None:
    class Retiring(WeightRegistry):
        """Retires what is there as somebody asks for a lease on it, once."""

        async def acquire(self, holder: str, *args: Any, **kwargs: Any) -> Any:
            if (latest := await self.latest()) is not None and latest.version == version(0):
                await self.retire(latest.version)
            return await super().acquire(holder, *args, **kwargs)

    async def scenario() -> None:
        one = Replica(Retiring())
        await one.publish(0)
        async with running(one.agent) as task:
            await asyncio.sleep(60)
            assert not task.done()
            assert one.engine.said == []
            await one.publish(1)
            await one.serves(1)
        assert one.engine.loads == ["load 0.1"]

    run(scenario)


def test_versions_never_go_backwards() -> None:
    async def scenario() -> None:
        one = Replica()
        for n in (1, 2):
            await one.publish(n)
        await one.agent.load(version(2))
        await one.registry.retire(version(2))
        async with running(one.agent):
            await asyncio.sleep(60)
            await one.agent.load(version(1))
        assert one.engine.loads == ["load 0.2"]

    run(scenario)


def test_a_torn_read_is_made_again_and_counted() -> None:
    async def scenario() -> None:
        one = Replica()
        one.puller.torn = 2
        await one.publish(0)
        await one.agent.load(version(0))
        assert one.engine.said == ["pause abort 0", "load 0.0", "resume"]
        assert (one.agent.stats.torn_reads, one.agent.stats.loads) == (2, 1)

    run(scenario)


def test_weights_whose_lease_lapsed_in_the_load_are_loaded_again_before_the_engine_goes_on() -> None:
    async def scenario() -> None:
        one = Replica()
        one.puller.torn, one.puller.late = 1, True
        await one.publish(0)
        await one.agent.load(version(0))
        assert one.engine.said == ["pause abort 0", "load 0.0", "load 0.0", "resume"]
        assert (one.agent.stats.torn_reads, one.agent.stats.loads) == (1, 1)

    run(scenario)


def test_an_engine_with_unverified_weights_takes_older_ones_where_only_those_are_left() -> None:
    async def scenario() -> None:
        one = Replica()
        await one.publish(0)
        await one.agent.load(version(0))
        await one.publish(1)
        one.puller.torn, one.puller.late = 1, True

        async def retired() -> None:
            await one.registry.retire(version(1))
            one.engine.on_load = None

        one.engine.on_load = retired
        await one.agent.load(version(1))
        assert one.engine.loads == ["load 0.0", "load 0.1", "load 0.0"]
        assert await one.registry.serving() == {"rollout/0": version(0)}

    run(scenario)


@pytest.mark.parametrize("late", [False, True])
def test_reads_torn_again_and_again_end_the_agent_and_never_serve(late: bool) -> None:
    async def scenario() -> None:
        one = Replica()
        one.puller.torn, one.puller.late = MOST_TORN_READS, late
        await one.publish(0)
        with pytest.raises(TornRead, match=f"gave up after {MOST_TORN_READS} torn reads"):
            await one.agent.run()
        assert await one.registry.serving() == {}
        assert ("fail" in one.engine.said) == late
        if late:
            assert one.engine.said[-2:] == ["fail", "resume"]
            assert isinstance(one.engine.cause, TornRead)

    run(scenario)


def test_a_load_that_fails_ends_the_agent_for_everybody() -> None:
    async def broken() -> None:
        raise RolloutError("loading failed: out of memory")

    async def scenario() -> None:
        one = Replica()
        async with running(one.agent) as task:
            await asyncio.sleep(60)
            one.engine.on_load = broken
            await one.publish(0)
            with pytest.raises(RolloutError, match="out of memory"):
                await task
        assert one.engine.said == ["pause abort 0", "fail", "resume"]
        with pytest.raises(NeoProtoError, match="rollout/0 updates no more: RolloutError"):
            await one.agent.load(version(0))
        assert await one.registry.serving() == {}
        assert await one.registry.holders(version(0)) == ()

    run(scenario)


def test_run_ends_when_another_callers_load_failed() -> None:
    async def broken() -> None:
        raise RolloutError("out of memory")

    async def scenario() -> None:
        one = Replica(min_version_lag=5)
        async with running(one.agent) as task:
            await one.publish(0)
            await one.serves(0)
            one.engine.on_load = broken
            await one.publish(1)
            with pytest.raises(RolloutError, match="out of memory"):
                await one.agent.load(version(1))
            with pytest.raises(NeoProtoError, match="updates no more"):
                await asyncio.wait_for(task, 5)

    run(scenario)


def test_weights_of_another_model_are_refused_before_the_pause() -> None:
    async def scenario() -> None:
        one = Replica()
        await one.publish(0, name="v")
        with pytest.raises(WeightMismatch, match=r"weights 0\.0 do not fit the model: 1 missing: w"):
            await one.agent.run()
        assert one.engine.said == []

    run(scenario)


def test_cancelled_while_it_reads_it_releases_the_lease_once_the_read_has_stopped() -> None:
    async def scenario() -> None:
        one = Replica()
        one.puller.gate = asyncio.Event()
        await one.publish(0)
        task = asyncio.create_task(one.agent.run())
        await one.puller.begun.wait()
        task.cancel()
        await asyncio.sleep(60)
        assert not task.done()
        assert len(await one.registry.holders(version(0))) == 1
        one.puller.gate.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert one.puller.under_way == 0
        assert await one.registry.holders(version(0)) == ()
        assert one.engine.said == []

    run(scenario)


def test_cancelled_while_it_loads_it_ends_the_load_and_the_engine_goes_on() -> None:
    begun, go_on = asyncio.Event(), asyncio.Event()

    async def on_load() -> None:
        begun.set()
        await go_on.wait()

    async def scenario() -> None:
        one = Replica()
        one.engine.on_load = on_load
        await one.publish(0)
        task = asyncio.create_task(one.agent.run())
        await begun.wait()
        task.cancel()
        await asyncio.sleep(60)
        assert len(await one.registry.holders(version(0))) == 1
        go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert one.engine.said == ["pause abort 0", "load 0.0", "resume"]
        assert await one.registry.holders(version(0)) == ()
        assert one.agent.version == version(0)

    run(scenario)


def test_work_that_runs_to_its_end_reports_a_failure_and_a_cancellation() -> None:
    async def scenario() -> None:
        async def fails() -> None:
            await asyncio.sleep(0.01)
            raise ValueError("no")

        with pytest.raises(ValueError, match="no"):
            await run_to_end(fails())
        task = asyncio.create_task(run_to_end(fails()))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    run(scenario)


@pytest.mark.parametrize(
    "wrong", [{"min_version_lag": 0}, {"poll_interval": 0}, {"drain_timeout": -1}, {"pause_mode": "wait"}]
)
def test_options_out_of_range_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        UpdateOptions(**wrong)
