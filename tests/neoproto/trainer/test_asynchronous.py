"""The asynchronous loops on fake groups, with the real queue, dispatcher, replay buffer and registry."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from neoproto import trace
from neoproto.config import load_config
from neoproto.data import DataProto
from neoproto.errors import ReplicaFailed, RolloutError
from neoproto.store import MemoryStore
from neoproto.trace import TraceWriter
from neoproto.trainer.asynchronous import AsyncTrainer
from neoproto.trainer.metrics.record import TrainingResult, training_parts
from neoproto.trainer.tasks import beside
from neoproto.weights import Manifest, WeightVersion
from neoproto.weights.registry import WeightRegistry
from tests.neoproto.trainer.fakes import PROMPTS, FakePrompts, World
from tests.neoproto.trainer.recording import Recorder

OFF_POLICY = "training/off_policy"


class FakeReplica:
    """Generates on the version it serves."""

    up = True

    def __init__(self, scene: Scene, name: str) -> None:
        self.scene, self.name = scene, name
        self.served: WeightVersion | None = None
        self.lag = 1
        self.generated: list[tuple[WeightVersion, list[str]]] = []
        self.failure: BaseException | None = None

    async def generate(self, prompts: DataProto, timeout: float) -> DataProto:
        await asyncio.sleep(self.scene.seconds)
        if self.failure is not None:
            self.up = not isinstance(self.failure, ReplicaFailed)
            raise self.failure
        assert self.served is not None
        self.generated.append((self.served, [str(uid) for uid in prompts["uid"]]))
        batch = self.scene.world.generate(prompts)
        versions = batch.batch["weight_versions"]
        batch.pop(["weight_versions"]).release()
        return batch.union(
            DataProto.from_dict(
                tensors={"weight_versions": torch.where(versions < 0, versions, self.served.n)}
            )
        )

    async def serve(self, version: WeightVersion) -> None:
        self.served = version
        await self.scene.board.report_serving(self.name, version)

    async def agent(self) -> None:
        """Load whatever is new, as an update agent does."""
        while True:
            await asyncio.sleep(0)
            newest = await self.scene.board.wait_newer(self.served, 1.0, min_version_lag=self.lag)
            await asyncio.sleep(0.005)
            if newest is not None:
                await self.serve(newest)


class Scene:
    """One run of `steps` steps; a test changes what it is about before `train`."""

    def __init__(
        self, tmp_path: Path, mode: str, *, replicas: int = 1, steps: int = 4, **trainer: Any
    ) -> None:
        self.world, self.board, self.seconds = World(lengths=(2, 2)), WeightRegistry(), 0.0
        self.training_seconds = 0.0
        self.recorder, self.prompts, self.steps = Recorder(), FakePrompts(), steps
        self.tmp_path = tmp_path
        self.trained: list[list[str]] = []
        self.config = load_config(
            {
                "data": {"train_batch_size": PROMPTS},
                "actor_rollout_ref": {"actor": {"ppo_mini_batch_size": PROMPTS}},
                "critic": {"ppo_mini_batch_size": PROMPTS},
                "trainer": {"mode": mode, "timeouts": {"generate": 5.0, "weights": 5.0}} | trainer,
            }
        )
        self.replicas = [FakeReplica(self, f"rollout/{rank}") for rank in range(replicas)]
        self.world.publish = self.publish  # type: ignore[method-assign,assignment]
        self.world.load = self.load  # type: ignore[method-assign,assignment]
        self.world.log_prob = self.log_prob  # type: ignore[method-assign,assignment]
        self.score = self.world.score
        self.world.score = self.scored  # type: ignore[method-assign]

    async def publish(self, version: WeightVersion) -> None:
        self.world.published.append(version)
        await self.board.publish(Manifest(version=version, entries=(), buckets=(), bucket_bytes=()))

    async def log_prob(self, batch: DataProto) -> DataProto:
        await asyncio.sleep(self.training_seconds)
        return World.log_prob(self.world, batch)

    async def load(self, version: WeightVersion) -> None:
        self.world.served.append(version)
        for replica in self.replicas:
            await replica.serve(version)

    def scored(self, batch: DataProto) -> DataProto:
        if not batch.meta_info.get("validate"):
            self.trained.append([str(uid) for uid in batch["uid"]])
        return self.score(batch)

    def more(self) -> dict[str, Any]:
        """More of the run's parts."""
        return {}

    async def _run(self) -> TrainingResult:
        parts = training_parts(
            self.config,
            self.world.workers(),
            self.prompts,
            tracker=self.recorder,
            show=self.recorder,
            run_dir=self.tmp_path,
            total_steps=self.steps,
            **self.more(),
        )
        agents = {}
        if self.config.trainer.mode == "decoupled_async":
            agents = {f"the agent of {one.name}": one.agent() for one in self.replicas}
        return await beside(AsyncTrainer(parts, self.board, self.replicas).run(), agents)

    def train(self) -> list[dict[str, float]]:
        """The metrics of the steps."""
        asyncio.run(asyncio.wait_for(self._run(), 20))
        return [row for _, row in self.recorder.steps_logged()]


BOTH = pytest.mark.parametrize("mode", ["separate_async", "decoupled_async"])


@BOTH
@pytest.mark.parametrize("replicas", [1, 3])
def test_every_prompt_is_trained_on_once_and_every_object_released(
    tmp_path: Path, store: MemoryStore, mode: str, replicas: int
) -> None:
    scene = Scene(tmp_path, mode, replicas=replicas, steps=5)
    scene.train()
    uids = [uid for batch in scene.trained for uid in batch]
    assert sorted(uids) == sorted(f"u{10 * step + row}" for step in range(1, 6) for row in range(PROMPTS))
    assert store.bytes_in > 0
    assert store.keys() == []


@BOTH
@pytest.mark.usefixtures("store")
def test_rollout_runs_one_batch_ahead(tmp_path: Path, mode: str) -> None:
    """A batch is generated on weights one publish older than those it updates, the first on the newest."""
    scene = Scene(tmp_path, mode)
    scene.training_seconds = 0.2
    rows = scene.train()
    assert [row[f"{OFF_POLICY}/trajectory_staleness/max"] for row in rows] == [0, 1, 1, 1]
    assert {row[f"{OFF_POLICY}/trajectory_spans/max"] for row in rows} == {1}
    assert {row[f"{OFF_POLICY}/evicted_samples/stale"] for row in rows} == {0}
    assert {"timing_s/gen", "timing_s/update_weights", "actor/pg_loss"} <= rows[-1].keys()


@BOTH
@pytest.mark.usefixtures("store")
def test_without_warmup_it_is_on_policy(tmp_path: Path, mode: str) -> None:
    rows = Scene(tmp_path, mode, **{mode: {"num_warmup_batches": 0}}).train()
    assert [row[f"{OFF_POLICY}/trajectory_staleness/max"] for row in rows] == [0, 0, 0, 0]


@pytest.mark.usefixtures("store")
def test_in_decoupled_mode_the_trainer_makes_no_call_that_controls_rollout(tmp_path: Path) -> None:
    """Of all calls to the rollout group only validation's are left: they generate."""
    scene = Scene(tmp_path, "decoupled_async", replicas=2)
    scene.prompts = FakePrompts(validation=1)
    scene.train()
    to_rollout = [call for call in scene.world.calls if call.group == "rollout"]
    assert {(call.method, call.meta.get("validate")) for call in to_rollout} == {("generate_sequences", True)}
    assert scene.world.published == [WeightVersion(epoch=0, n=n) for n in range(5)]


@pytest.mark.usefixtures("store")
def test_prompts_ask_for_no_more_than_replicas_load_by_themselves(tmp_path: Path) -> None:
    """Replicas load every other version; only validation, at the end, has them load below their lag."""
    scene = Scene(
        tmp_path,
        "decoupled_async",
        steps=5,
        decoupled_async={"min_version_lag": 2},
        replay_buffer={"max_off_policy_threshold": 4},
    )
    scene.prompts, scene.training_seconds = FakePrompts(validation=1), 0.1
    scene.replicas[0].lag = 2
    rows = scene.train()
    assert len(rows) == 5
    assert {served.n for served, _ in scene.replicas[0].generated} == {0, 2}
    assert scene.replicas[0].served == WeightVersion(epoch=0, n=5)


@pytest.mark.usefixtures("store")
def test_in_separate_mode_every_sync_loads_all_replicas_before_training_goes_on(tmp_path: Path) -> None:
    scene = Scene(tmp_path, "separate_async", separate_async={"parameter_sync_step": 2}, steps=5)
    scene.prompts = FakePrompts(validation=1)
    scene.train()
    handed = [m for m in scene.world.order() if m in ("publish_weights", "update_weights", "update_actor")]
    sync = ["publish_weights", "update_weights"]
    step = ["update_actor"]
    # The last step is published for validation, although 5 is no multiple of 2.
    assert handed == sync + 2 * step + sync + 2 * step + sync + step + sync


@BOTH
@pytest.mark.usefixtures("store")
def test_validation_waits_for_the_newest_version_everywhere(tmp_path: Path, mode: str) -> None:
    scene = Scene(tmp_path, mode, replicas=2, test_freq=1)
    scene.prompts = FakePrompts(validation=1)
    seen = []

    def generate(prompts: DataProto) -> DataProto:
        seen.append([replica.served for replica in scene.replicas])
        return World.generate(scene.world, prompts)

    workers = scene.world.workers

    def with_watch(**kwargs: Any) -> Any:
        made = workers(**kwargs)
        made.rollout.group.methods["generate_sequences"] = generate  # type: ignore[attr-defined]
        return made

    scene.world.workers = with_watch  # type: ignore[method-assign]
    scene.train()
    wanted = [WeightVersion(epoch=0, n=n) for n in (0, 0, 1, 1, 2, 2, 3, 3, 4, 4)]
    assert seen == [[version, version] for version in wanted]


@pytest.mark.usefixtures("store")
def test_what_is_too_stale_is_dropped_and_asked_for_again(tmp_path: Path) -> None:
    """With a threshold of 1 nothing older is trained on, whatever the timing."""
    scene = Scene(
        tmp_path,
        "separate_async",
        separate_async={"num_warmup_batches": 2, "parameter_sync_step": 2},
        replay_buffer={"max_off_policy_threshold": 1},
        steps=8,
    )
    rows = scene.train()
    assert len(rows) == 8
    assert max(row[f"{OFF_POLICY}/trajectory_staleness/max"] for row in rows) <= 1


@BOTH
@pytest.mark.usefixtures("store")
def test_a_replica_that_fails_takes_no_prompt_along(tmp_path: Path, mode: str) -> None:
    scene = Scene(tmp_path, mode, replicas=2, steps=5)
    scene.replicas[1].failure = ReplicaFailed("rollout/1", "signal 9 (SIGKILL)")
    scene.train()
    assert not scene.replicas[1].up
    uids = [uid for batch in scene.trained for uid in batch]
    assert sorted(uids) == sorted(f"u{10 * step + row}" for step in range(1, 6) for row in range(PROMPTS))


@BOTH
@pytest.mark.usefixtures("store")
def test_a_call_that_fails_otherwise_fails_the_run_with_its_cause(tmp_path: Path, mode: str) -> None:
    scene = Scene(tmp_path, mode, replicas=2)
    scene.replicas[1].failure = RolloutError("a sample has no token")
    with pytest.raises(RolloutError, match="a sample has no token"):
        scene.train()


class TracedScene(Scene):
    """Each fake process writes the calls that it takes to a lane of its own."""

    def __init__(self, tmp_path: Path) -> None:
        super().__init__(tmp_path, "decoupled_async")
        self.seconds = self.training_seconds = 0.05
        self.replicas = [TracedReplica(self, "rollout/0")]
        self.lanes = {
            name: TraceWriter(tmp_path / "trace", name) for name in ("actor-rank0", "rollout-rank0")
        }

    async def log_prob(self, batch: DataProto) -> DataProto:
        with self.lanes["actor-rank0"].span("compute_log_prob", "call"):
            return await super().log_prob(batch)

    async def publish(self, version: WeightVersion) -> None:
        with self.lanes["actor-rank0"].span("publish_weights", "call"):
            await super().publish(version)


class TracedReplica(FakeReplica):
    async def generate(self, prompts: DataProto, timeout: float) -> DataProto:
        assert isinstance(self.scene, TracedScene)
        with self.scene.lanes["rollout-rank0"].span("generate_sequences", "call"):
            return await super().generate(prompts, timeout)


def intervals(run_dir: Path, lane: str, name: str) -> list[tuple[float, float]]:
    """Start and end of a lane's events of one name, in microseconds."""
    events = json.loads((run_dir / "trace.json").read_text())["traceEvents"]
    (pid,) = (
        one["pid"] for one in events if one["name"] == "process_name" and one["args"]["name"].startswith(lane)
    )
    return [(one["ts"], one["ts"] + one["dur"]) for one in events if (one["pid"], one["name"]) == (pid, name)]


def test_the_trace_shows_generation_beside_training(tmp_path: Path, store: MemoryStore) -> None:
    scene = TracedScene(tmp_path)
    trace.open_process("controller", tmp_path / "trace")
    try:
        scene.train()
    finally:
        trace.close_process()
        for writer in scene.lanes.values():
            writer.close()
    merged = trace.merge_parts(tmp_path)
    assert merged is not None
    assert merged.lanes == 3
    generating = intervals(tmp_path, "rollout-rank0", "generate_sequences")
    training = intervals(tmp_path, "actor-rank0", "compute_log_prob")
    assert len(training) == 4
    assert any(a < d and c < b for a, b in generating for c, d in training)
    assert len(intervals(tmp_path, "actor-rank0", "publish_weights")) == 5
    (first, *_), waits = intervals(tmp_path, "controller", "step 1"), intervals(tmp_path, "controller", "gen")
    assert len(waits) == 4
    # A step's phases lie in it; a microsecond for rounding.
    assert first[0] - 1 <= waits[0][0] <= waits[0][1] <= first[1] + 1
