"""The three loops on replicas that die: nothing is lost, and who calls what of a replica."""

from __future__ import annotations

import asyncio
import dataclasses
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from neoproto.config import load_config
from neoproto.data import DataProto
from neoproto.errors import ReplicaLost
from neoproto.store import MemoryStore
from neoproto.trainer.asynchronous import AsyncTrainer
from neoproto.trainer.metrics.record import training_parts
from neoproto.trainer.sync import SyncTrainer
from neoproto.trainer.tasks import beside
from neoproto.weights import Manifest, WeightVersion
from tests.neoproto.trainer.fakes import PROMPTS, FakePrompts, World
from tests.neoproto.trainer.processes import Cluster, Process
from tests.neoproto.trainer.recording import Recorder

MODES = pytest.mark.parametrize("mode", ["sync", "separate_async", "decoupled_async"])
STEPS = 6


class Generating(Process):
    """Answers as the world does, on the version it serves; dies of the calls of these numbers."""

    world: World
    dies_of: Sequence[int] = ()
    calls = 0

    async def generate_sequences(self, batch: DataProto) -> DataProto:
        self.calls += 1
        if self.calls in self.dies_of:
            self.die()
        await asyncio.sleep(0.002)
        if self.death is not None:  # of another call: a killed process puts nothing into the store
            raise self.death
        assert self.served is not None
        answered = self.world.generate(batch)
        versions = answered.batch["weight_versions"]
        answered.pop(["weight_versions"]).release()
        return answered.union(
            DataProto.from_dict(
                tensors={"weight_versions": torch.where(versions < 0, versions, self.served.n)}
            )
        )


class Run(Cluster):
    """One run of `STEPS` steps.

    Attributes:
        trained: uids, step by step.
        asked: what the trainer called of the replicas as one.
    """

    def __init__(self, tmp_path: Path, mode: str, replicas: int, **options: Any) -> None:
        self.world, self.mode, self.tmp_path = World(lengths=(2, 2)), mode, tmp_path
        super().__init__(replicas, agents=mode == "decoupled_async", heartbeat_timeout=5.0, **options)
        self.recorder, self.trained, self.asked = Recorder(), list[list[str]](), list[str]()
        self.world.publish = self.published  # type: ignore[method-assign,assignment]
        self.world.score, self._score = self.scored, self.world.score  # type: ignore[method-assign]

    def process(self, name: str) -> Generating:
        made = Generating(name, self.registry)
        made.world = self.world
        return made

    async def published(self, version: WeightVersion) -> None:
        self.world.published.append(version)
        await self.registry.publish(Manifest(version=version, entries=(), buckets=(), bucket_bytes=()))

    def scored(self, batch: DataProto) -> DataProto:
        if not batch.meta_info.get("validate"):
            self.trained.append([str(uid) for uid in batch["uid"]])
        return self._score(batch)

    def within(self, timeout: float) -> Any:
        calls = self.set.within(timeout)

        def noting(method: str) -> Callable[..., Any]:
            def call(*args: Any) -> Any:
                self.asked.append(method)
                return getattr(calls, method)(*args)

            return call

        return SimpleNamespace(**{name: noting(name) for name in ("generate_sequences", "update_weights")})

    def train(self) -> list[dict[str, float]]:
        config = load_config(
            {
                "data": {"train_batch_size": PROMPTS},
                "actor_rollout_ref": {"actor": {"ppo_mini_batch_size": PROMPTS}},
                "critic": {"ppo_mini_batch_size": PROMPTS},
                "trainer": {"mode": self.mode, "timeouts": {"generate": 5.0, "weights": 5.0}},
            }
        )
        workers = dataclasses.replace(self.world.workers(), rollout=self)
        parts = training_parts(
            config,
            workers,
            FakePrompts(validation=1),
            tracker=self.recorder,
            show=self.recorder,
            run_dir=self.tmp_path,
            total_steps=STEPS,
            gauges=self.set.metrics,
        )
        training = (
            SyncTrainer(parts).run()
            if self.mode == "sync"
            else AsyncTrainer(parts, self.set, self.set.replicas).run()
        )
        asyncio.run(asyncio.wait_for(beside(training, {"supervision": self.supervisor.run()}), 20))
        return [row for _, row in self.recorder.steps_logged()]


@MODES
@pytest.mark.parametrize("replicas", [1, 3])
def test_every_prompt_is_trained_on_once_whoever_dies(
    tmp_path: Path, store: MemoryStore, mode: str, replicas: int
) -> None:
    run = Run(tmp_path, mode, replicas)
    for number, process in enumerate(run.processes):
        process.dies_of = (2 + number,)  # type: ignore[attr-defined]
    rows = run.train()
    uids = [uid for batch in run.trained for uid in batch]
    assert sorted(uids) == sorted(
        f"u{10 * step + row}" for step in range(1, STEPS + 1) for row in range(PROMPTS)
    )
    assert len(rows) == STEPS
    assert rows[-1]["training/replica_restarts"] >= 1
    assert {row["rollout/replicas_up"] for row in rows} <= set(range(replicas + 1))
    assert len(run.recorder.validations) == 2
    assert store.keys() == []


@MODES
@pytest.mark.usefixtures("store")
def test_a_death_makes_no_sample_older_than_it_may_be(tmp_path: Path, mode: str) -> None:
    run = Run(tmp_path, mode, 2)
    run.processes[0].dies_of = (2,)  # type: ignore[attr-defined]
    for row in run.train():
        assert row.get("training/off_policy/trajectory_staleness/max", 0) <= 2


@MODES
@pytest.mark.usefixtures("store")
def test_a_replica_that_is_lost_ends_the_run_with_its_history(tmp_path: Path, mode: str) -> None:
    run = Run(tmp_path, mode, 2, max_restarts=0)
    run.processes[0].dies_of = (1,)  # type: ignore[attr-defined]
    with pytest.raises(ReplicaLost, match=r"rollout-0 is lost after 0 restart\(s\): 1\. worker .*SIGKILL"):
        run.train()


@MODES
@pytest.mark.usefixtures("store")
def test_who_calls_what_of_a_replica(tmp_path: Path, mode: str) -> None:
    """In `decoupled_async` the trainer has validation generate, and that is all; nor does it load by others.

    What brings a process up is called once for each, by its supervisor.
    """
    run = Run(tmp_path, mode, 2)
    run.processes[0].dies_of = (2,)  # type: ignore[attr-defined]
    run.train()
    by_trainer = Counter(run.asked)
    passes = 2 * 2  # sampled and greedy, before and after
    driven = {"update_weights": STEPS + 1}
    assert (
        by_trainer
        == {
            "sync": {"generate_sequences": passes + STEPS} | driven,
            "separate_async": {"generate_sequences": passes} | driven,
            "decoupled_async": {"generate_sequences": passes},
        }[mode]
    )
    if mode == "decoupled_async":
        for process in run.processes:
            called = [name for name in process.methods_called if name not in ("ping", "generate_sequences")]
            # One that is started as training ends may not have come so far.
            assert called in (["attach_registry", "update_weights", "run_agent"][:n] for n in range(4))
        assert len(run.processes) == 3
