"""Random schedules of publishing, leasing, reading, lapsing and crashing.

The store writes into the same few slots again and again and lets anybody read them at any time, as memory
that is read by RDMA would: only leases stand between a reader and a slot that is being overwritten.

    NEOPROTO_SCHEDULES=100000 python -m pytest tests/neoproto/weights/test_schedules.py

runs as many schedules as it says, from seeds, besides a hundred of hypothesis's; a few hundred by default.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from neoproto.errors import KeyMissing, NeoProtoError, StoreFull, TornRead, WeightsInUse
from neoproto.store import MemoryStore
from neoproto.weights import Publisher, Puller, WeightOptions, WeightRegistry, WeightVersion
from neoproto.weights.registry import VersionState
from tests.neoproto.weights.manifests import AtOnce

SCHEDULES = int(os.environ.get("NEOPROTO_SCHEDULES", "300"))
TTL = 9.0
NAMES = ("a", "b", "c")
TROUBLES = ("", "", "", "full", "unannounced")
TIMES = (1.0, TTL / 3, TTL - 0.5, TTL, 2 * TTL)
COUNTS: Counter[str] = Counter()


class Loop(asyncio.SelectorEventLoop):
    """Its time passes when it is told to."""

    now = 0.0

    def time(self) -> float:
        return self.now

    def turns(self, count: int = 6) -> None:
        """Run what is ready, and what that makes ready."""
        for _ in range(count):
            self.call_soon(self.stop)
            self.run_forever()


LOOP = Loop()


class SlotStore(MemoryStore):
    """Recycled memory that is written in place and can be read by whoever knows where it is."""

    def __init__(self) -> None:
        super().__init__()
        self.full = False
        self.memory: dict[str, torch.Tensor] = {}
        self.free: list[torch.Tensor] = []
        self.made = 0

    def put_batch(self, values: Any, *, blocking: bool = True) -> Any:
        if self.full:
            raise StoreFull("no room")
        for key, value in values.items():
            if self.free:
                self.memory[key] = self.free.pop(0)
            else:
                self.memory[key] = torch.empty_like(value)
                self.made += 1
            self.memory[key].copy_(value)
        return list(values)

    def get(self, key: Any, *, rows: Any = None, blocking: bool = True) -> Any:
        return self.memory[key]

    def delete_batch(self, keys: Any, *, missing_ok: bool = False, blocking: bool = True) -> Any:
        """What is deleted can be read on, until it is written again."""
        self.free += [self.memory[key] for key in keys]
        self.deleted(keys)

    def deleted(self, keys: Any) -> None:
        """Told of every deletion."""


class Access:
    """The publisher's access to the registry, and each replica's: one that can be stuck, or gone."""

    def __init__(self, registry: WeightRegistry) -> None:
        self._registry = registry
        self.crashed = False
        self.running = asyncio.Event()
        self.running.set()

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._registry, name)

        async def call(*args: Any, **kwargs: Any) -> Any:
            await self.running.wait()
            if self.crashed:
                raise NeoProtoError("the process is gone")
            return await method(*args, **kwargs)

        return call


class Announcing:
    """A publisher's access. It waits for nothing: a lease that lives is in the way."""

    broken = False

    def __init__(self, registry: WeightRegistry) -> None:
        self._registry = AtOnce(registry)

    def announce(self, manifest: Any) -> None:
        if self.broken:
            raise LookupError("the registry does not answer")
        self._registry.publish(manifest)

    def withdraw(self, version: WeightVersion, timeout: float) -> Any:
        self._registry.retire(version)
        return self._registry.wait_reclaimed(version, 0)


class StepwisePuller(Puller):
    """Reads a step whenever it is let."""

    gate: asyncio.Semaphore

    async def _finish(self, reading: Any, stop: Any) -> Any:
        while True:
            await self.gate.acquire()
            if stop.is_set():
                return {}
            try:
                next(reading)
            except StopIteration as end:
                return end.value


class Replica:
    """Pulls once, uses what it got for a while, and compares what it was handed with what it should be.

    Half of them load it, as update agents do: what was copied while the lease lived is served, once `loaded`
    says so, although the slot may be written again by then.
    """

    def __init__(self, store: SlotStore, registry: WeightRegistry, name: str, loads: bool) -> None:
        self.access, self.name, self.loads = Access(registry), name, loads
        self.puller = StepwisePuller(store, self.access, name, TTL)
        self.puller.gate = asyncio.Semaphore(0)
        self.use_on = asyncio.Event()
        self.handed_over = self.torn = self.loaded = 0
        self.task = LOOP.create_task(self.run())

    async def run(self) -> None:
        try:
            async with self.puller.pull() as pulled:
                self.compare(pulled.version, pulled.tensors)
                self.handed_over += 1
                await self.use_on.wait()
                if self.loads:
                    engine = {name: tensor.clone() for name, tensor in pulled.tensors.items()}
                    await pulled.loaded(self.name)
                    self.compare(pulled.version, engine)
                    self.loaded += 1
                else:
                    await pulled.check()
                    self.compare(pulled.version, pulled.tensors)
        except TornRead:
            self.torn += 1
        except KeyMissing:
            assert not self.handed_over, "nothing was ready"
        except NeoProtoError:
            assert self.access.crashed

    def compare(self, version: WeightVersion, tensors: dict[str, torch.Tensor]) -> None:
        found = {name: tensor.unique().tolist() for name, tensor in tensors.items()}
        assert found == {name: [version.n] for name in NAMES}, f"a torn read of {version}: {found}"


class Schedules(RuleBasedStateMachine):
    """One publisher with two slots, up to three replicas at a time."""

    def __init__(self) -> None:
        super().__init__()
        asyncio.set_event_loop(LOOP)
        self.registry = WeightRegistry(LOOP.time)
        self.store = SlotStore()
        self.store.deleted = self.nobody_reads
        self.announcing, self.look = Announcing(self.registry), AtOnce(self.registry)
        options = WeightOptions(num_slots=2, bucket_bytes=64)
        self.publisher = Publisher(self.store, self.announcing, options)
        self.replicas: list[Replica] = []
        self.n = self.pulls = 0
        self.counts: Counter[str] = Counter()

    def nobody_reads(self, keys: Any) -> None:
        """No bytes go while a lease on their version lives."""
        for held in self.registry._leases.values():
            alive = held.until > LOOP.now
            assert not (alive and any(f"/{held.version}/" in key for key in keys))

    def pick(self, at: int) -> Replica:
        return self.replicas[at % len(self.replicas)]

    @rule(count=st.integers(1, 3), trouble=st.sampled_from(TROUBLES))
    def publish(self, count: int, trouble: str) -> None:
        self.store.full, self.announcing.broken = trouble == "full", trouble == "unannounced"
        for _ in range(count):
            tensors = {name: torch.full((16,), float(self.n)) for name in NAMES}
            # What finds no room, or is not announced, changes nothing else; the next publish may succeed.
            try:
                self.publisher.publish(WeightVersion(epoch=0, n=self.n), tensors)
                assert self.look.latest().version.n == self.n
            except WeightsInUse:
                self.counts["in use"] += 1
            except (StoreFull, LookupError):
                self.counts[trouble] += 1
            self.n += 1
        LOOP.turns()

    @precondition(lambda self: len(self.replicas) < 3)
    @rule()
    def pull(self) -> None:
        self.pulls += 1
        replica = Replica(self.store, self.registry, f"r{self.pulls}", loads=self.pulls % 2 == 0)
        self.replicas.append(replica)
        LOOP.turns()

    @precondition(lambda self: self.replicas)
    @rule(at=st.integers(0, 2), steps=st.integers(1, 4))
    def read(self, at: int, steps: int) -> None:
        for _ in range(steps):
            self.pick(at).puller.gate.release()
        LOOP.turns()

    @precondition(lambda self: self.replicas)
    @rule(at=st.integers(0, 2))
    def finish_using(self, at: int) -> None:
        self.pick(at).use_on.set()
        LOOP.turns()

    @rule(seconds=st.sampled_from(TIMES))
    def pass_time(self, seconds: float) -> None:
        LOOP.now += seconds
        LOOP.turns()

    @precondition(lambda self: self.replicas)
    @rule(at=st.integers(0, 2))
    def get_stuck_or_go_on(self, at: int) -> None:
        """A process that is stuck renews nothing, and later goes on where it was."""
        running = self.pick(at).access.running
        if running.is_set():
            running.clear()
        else:
            running.set()
        LOOP.turns()

    @precondition(lambda self: self.replicas)
    @rule(at=st.integers(0, 2), publishes=st.integers(0, 3))
    def fall_behind(self, at: int, publishes: int) -> None:
        """Stuck for longer than the lease lasts, while versions are published."""
        running = self.pick(at).access.running
        running.clear()
        self.pass_time(2 * TTL)
        if publishes:
            self.publish(publishes, "")
        running.set()
        LOOP.turns()

    @precondition(lambda self: self.replicas)
    @rule(at=st.integers(0, 2))
    def crash(self, at: int) -> None:
        """Nothing is released; the lease lapses."""
        self.end(self.pick(at), crashed=True)

    @precondition(lambda self: self.replicas)
    @rule(at=st.integers(0, 2))
    def cancel(self, at: int) -> None:
        self.end(self.pick(at), crashed=False)

    def end(self, replica: Replica, *, crashed: bool) -> None:
        replica.access.crashed = crashed
        replica.access.running.set()
        replica.task.cancel()
        for _ in range(8):
            replica.puller.gate.release()
        LOOP.turns(10)
        assert replica.task.done()
        self.settle()

    @invariant()
    def settle(self) -> None:
        """Whatever a replica found wrong is raised here."""
        for replica in [one for one in self.replicas if one.task.done()]:
            self.replicas.remove(replica)
            self.counts["handed over"] += replica.handed_over
            self.counts["torn"] += replica.torn
            self.counts["loaded"] += replica.loaded
            served = self.look.serving().get(replica.name)
            assert (served is not None) >= (replica.loaded > 0), "loaded, and not reported"
            assert served is None or not replica.torn, "a torn load is reported as served"
            if not replica.task.cancelled():
                replica.task.result()

    @invariant()
    def slots_are_bounded_and_versions_are_there(self) -> None:
        state = self.look.state()
        assert len(state.versions) <= 2
        assert self.store.made <= 2 * len(NAMES)
        ready = {one.version for one in state.versions if one.state is VersionState.READY}
        assert ready <= set(self.publisher.live)

    def teardown(self) -> None:
        for replica in list(self.replicas):
            self.end(replica, crashed=False)
        LOOP.now += 2 * TTL
        for version in self.publisher.live:
            self.publisher.retire(version, timeout=0)
        state = self.look.state()
        self.counts["lapsed"] += state.lapsed
        assert state.versions == ()
        assert self.registry._leases == {}, "a lease leaked"
        assert len(self.store.free) == self.store.made, "a slot leaked"
        self.store.close()


Schedules.TestCase.settings = settings(
    max_examples=100, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
)
test_schedules = Schedules.TestCase


def next_step(machine: Schedules, choose: random.Random) -> Callable[[], None]:
    """One of the rules that may come next."""
    at = choose.randrange(3)
    steps: list[Callable[[], None]] = [
        lambda: machine.publish(choose.randint(1, 3), choose.choice(TROUBLES)),
        lambda: machine.pass_time(choose.choice(TIMES)),
    ]
    if len(machine.replicas) < 3:
        steps += [machine.pull] * 2
    if machine.replicas:
        steps += [lambda: machine.read(at, choose.randint(1, 4))] * 2
        steps += [
            lambda: machine.fall_behind(at, choose.randint(0, 3)),
            lambda: machine.finish_using(at),
            lambda: machine.get_stuck_or_go_on(at),
            lambda: choose.choice([machine.crash, machine.cancel])(at),
        ]
    return choose.choice(steps)


def random_schedule(seed: int) -> None:
    """One schedule without hypothesis, which is several times slower; the seed says which."""
    choose = random.Random(seed)
    machine = Schedules()
    for _ in range(30):
        next_step(machine, choose)()
        machine.settle()
        machine.slots_are_bounded_and_versions_are_there()
    machine.teardown()
    for name, count in machine.counts.items():
        COUNTS[name] += count


def test_many_schedules(capsys):
    logging.getLogger("neoproto.weights.puller").setLevel(logging.ERROR)
    COUNTS.clear()
    for seed in range(SCHEDULES):
        try:
            random_schedule(seed)
        except BaseException as error:
            error.add_note(f"schedule {seed}")
            raise
    with capsys.disabled():
        print(f"\n{SCHEDULES} schedules: {dict(COUNTS)}")
    assert all(
        COUNTS[name] for name in ("handed over", "loaded", "torn", "in use", "full", "unannounced", "lapsed")
    )
