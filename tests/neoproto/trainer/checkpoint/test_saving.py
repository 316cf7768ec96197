"""The trainers' checkpoints on fake groups: when they are saved, what goes on meanwhile, and going on."""

from __future__ import annotations

import asyncio
import errno
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from neoproto.config import load_config
from neoproto.errors import CheckpointError, ConfigError, DeadlineExceeded, WorkerDied
from neoproto.store import MemoryStore
from neoproto.trainer.asynchronous import AsyncTrainer
from neoproto.trainer.checkpoint.folder import Checkpoint, CheckpointFolder, problems
from neoproto.trainer.checkpoint.history import PromptLog, positions
from neoproto.trainer.checkpoint.resume import StartPoint, check_fits, read_state
from neoproto.trainer.metrics.record import TrainingResult, training_parts
from neoproto.trainer.sync import SyncTrainer
from neoproto.weights import WeightVersion
from tests.neoproto.trainer.fakes import PROMPTS, FakePrompts, World
from tests.neoproto.trainer.recording import Recorder
from tests.neoproto.trainer.test_asynchronous import BOTH, Scene

KL = {
    "use_kl_in_reward": True,
    "kl_ctrl": {"type": "adaptive", "kl_coef": 0.1, "target_kl": 0.5, "horizon": 20},
}


class FakeStates:
    """The workers' half: `save` copies, `finish` says what was written."""

    def __init__(self) -> None:
        self.folders: list[Path] = []
        self.on_finish: Callable[[], Any] = lambda: None

    def save(self, folder: str) -> None:
        self.folders.append(Path(folder))

    async def finish(self) -> list[dict[str, str]]:
        result = self.on_finish()
        if result is not None:
            await result
        digests = []
        for rank in range(2):
            data = f"state of rank {rank}".encode()
            (self.folders[-1] / f"rank{rank}").write_bytes(data)
            digests.append({f"rank{rank}": hashlib.sha256(data).hexdigest()})
        return digests


class Job:
    """Starts of one run in one folder."""

    def __init__(self, run_dir: Path, steps: int = 6, *, save_freq: int = 2, keep: int | None = None) -> None:
        self.run_dir, self.steps, self.save_freq = run_dir, steps, save_freq
        self.checkpoints = CheckpointFolder(run_dir / "checkpoints", keep)
        self.actor, self.critic = FakeStates(), FakeStates()
        self.world, self.recorder = World(old=-1.2, lengths=(2, 2)), Recorder()
        self.prompts = FakePrompts(validation=1)

    def start_point(self, epoch: int = 1) -> StartPoint:
        newest = self.checkpoints.newest()
        assert newest is not None
        return StartPoint(epoch=epoch, checkpoint=newest, state=read_state(newest))

    def run(self, start: StartPoint | None = None, **trainer: Any) -> TrainingResult:
        if start is not None and start.state is not None:
            self.prompts.load_state_dict(start.state.loader)
        workers = self.world.workers(reference=True)
        for trained, states in ((workers.actor, self.actor), (workers.critic, self.critic)):
            trained.group.methods |= {  # type: ignore[union-attr,attr-defined]
                "save_checkpoint": states.save,
                "finish_checkpoint": states.finish,
            }
        parts = training_parts(
            load_config(
                {
                    "trainer": {"save_freq": self.save_freq, "timeouts": {"checkpoint": 9.0}} | trainer,
                    "algorithm": KL,
                }
            ),
            workers,
            self.prompts,
            tracker=self.recorder,
            show=self.recorder,
            run_dir=self.run_dir,
            total_steps=self.steps,
            start=start,
            checkpoints=self.checkpoints,
            prompt_log=PromptLog(self.run_dir / "prompts.jsonl"),
        )
        return asyncio.run(SyncTrainer(parts).run())

    def steps_saved(self) -> list[int]:
        return [one.step for one in self.checkpoints.all()]


def without_times(row: dict[str, float]) -> dict[str, float]:
    # What the store has moved so far is counted by each start for itself.
    timed = ("timing_s/", "perf/", "store/")
    return {name: value for name, value in row.items() if not name.startswith(timed)}


def test_it_saves_every_so_many_steps_and_at_the_end(tmp_path: Path, store: MemoryStore) -> None:
    job = Job(tmp_path, steps=5)
    job.run()
    assert job.steps_saved() == [2, 4, 5]
    for one in job.checkpoints.all():
        assert problems(one) == []
        names = sorted(str(path.relative_to(one.path)) for path in one.path.rglob("*") if path.is_file())
        ranks = [f"{role}/rank{rank}" for role in ("actor", "critic") for rank in (0, 1)]
        assert names == [*ranks, "manifest.json", "trainer.json"]
    assert store.keys() == []


@pytest.mark.usefixtures("store")
@pytest.mark.parametrize("save_freq", [-1, 0])
def test_without_a_frequency_nothing_is_saved(tmp_path: Path, save_freq: int) -> None:
    job = Job(tmp_path, steps=2, save_freq=save_freq)
    job.run()
    assert job.steps_saved() == []


@pytest.mark.usefixtures("store")
def test_a_step_is_saved_after_its_publish_and_its_validation(tmp_path: Path) -> None:
    job = Job(tmp_path, steps=2)
    job.run(test_freq=2)
    order = job.world.order()
    save = order.index("save_checkpoint")
    validation = 2 * ["generate_sequences", "compute_score"]
    assert order[:save][-6:] == ["publish_weights", "update_weights", *validation]
    calls = job.world.called("save_checkpoint", "finish_checkpoint")
    assert {(call.group, call.method, call.timeout) for call in calls} == {
        (group, method, 9.0)
        for group in ("actor", "critic")
        for method in ("save_checkpoint", "finish_checkpoint")
    }


@pytest.mark.usefixtures("store")
@pytest.mark.parametrize("validated", [True, False])
def test_a_run_that_goes_on_is_the_run_that_was_not_interrupted(tmp_path: Path, validated: bool) -> None:
    """Metrics, the adapted KL coefficient, data and totals; versions go on in a new epoch."""
    (tmp_path / "whole").mkdir()
    (tmp_path / "parts").mkdir()
    options = {"test_freq": 3} if validated else {}
    whole, first, then = Job(tmp_path / "whole"), Job(tmp_path / "parts"), Job(tmp_path / "parts")
    expected = whole.run(**options)
    first.steps = 4
    first.run(**options)
    start = then.start_point()
    got = then.run(start, **options)
    assert start.step == 4
    rows = [(step, without_times(row)) for step, row in then.recorder.logged if without_times(row)]
    assert rows == [
        (s, without_times(row)) for s, row in whole.recorder.logged if s > 4 and without_times(row)
    ]
    coefficients = [row["actor/reward_kl_penalty_coeff"] for _, row in whole.recorder.steps_logged()]
    assert len(set(coefficients)) == 6, "the coefficient moves, so that losing it would show"
    versions = [WeightVersion(epoch=1, n=n) for n in (4, 5, 6)]
    assert then.world.published == then.world.served == versions
    assert (got.steps, got.samples, got.tokens) == (6, expected.samples, expected.tokens)
    assert got.first_validation == expected.first_validation
    assert got.last_validation == expected.last_validation
    assert got.training_seconds > start.state.recorder["training_seconds"]  # type: ignore[union-attr]
    logged = [json.loads(line) for line in (tmp_path / "parts/prompts.jsonl").read_text().splitlines()]
    assert logged == [{"step": step, "uids": [f"u{10 * step}", f"u{10 * step + 1}"]} for step in range(1, 7)]
    assert (tmp_path / "whole/prompts.jsonl").read_text() == (tmp_path / "parts/prompts.jsonl").read_text()


@pytest.mark.usefixtures("store")
def test_a_run_that_was_killed_at_its_very_end_trains_nothing_more(tmp_path: Path) -> None:
    """Between its last checkpoint and its model."""
    first, then = Job(tmp_path, steps=4), Job(tmp_path, steps=4)
    expected = first.run()
    got = then.run(then.start_point())
    assert then.world.order() == ["publish_weights", "update_weights"]
    assert (got.steps, got.tokens, got.last_validation) == (4, expected.tokens, expected.last_validation)
    (tmp_path / "async").mkdir()
    scene = SavingScene(tmp_path / "async", "decoupled_async", steps=4)
    scene.train()
    then_scene = SavingScene(tmp_path / "async", "decoupled_async", steps=4)
    then_scene.go_on(epoch=1)
    assert then_scene.train() == []
    assert then_scene.world.order() == ["publish_weights"]


@pytest.mark.usefixtures("store")
def test_training_goes_on_while_a_checkpoint_is_written_and_one_at_a_time(tmp_path: Path) -> None:
    job = Job(tmp_path, steps=4, save_freq=1)
    gates: list[asyncio.Event] = []
    seen: list[int] = []

    async def wait() -> None:
        gate = asyncio.Event()
        gates.append(gate)
        assert sum(not one.is_set() for one in gates) == 1, "two at once"
        await asyncio.sleep(0.2)  # time for many steps
        seen.append(len(job.recorder.reports))
        gate.set()

    job.actor.on_finish = wait
    job.run()
    assert job.steps_saved() == [1, 2, 3, 4]
    assert seen == [2, 3, 4, 4], "each was written while the next step was made"


@pytest.mark.usefixtures("store")
@pytest.mark.parametrize(
    ("cause", "kind", "said"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), CheckpointError, "step 4 .* No space left"),
        (WorkerDied("actor", 0, "host", "signal 9"), WorkerDied, "signal 9"),
        (DeadlineExceeded("finish_checkpoint", "actor", [0], 9.0), DeadlineExceeded, "within 9.0 s"),
    ],
)
def test_a_save_that_fails_ends_the_run_and_leaves_the_one_before(
    tmp_path: Path, cause: Exception, kind: type[Exception], said: str
) -> None:
    job = Job(tmp_path, steps=100)

    def fail() -> None:
        if len(job.actor.folders) == 2:
            raise cause

    job.actor.on_finish = fail
    with pytest.raises(kind, match=said):
        job.run()
    assert job.steps_saved() == [2]
    (partial,) = (tmp_path / "checkpoints").glob(".global_step_4.*.partial")
    job.checkpoints.sweep()
    assert not partial.exists()


@pytest.mark.usefixtures("store")
def test_a_folder_that_cannot_be_made_is_the_cause(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").touch()
    with pytest.raises(CheckpointError, match="the checkpoint of step 2 could not be written"):
        Job(tmp_path).run()


@pytest.mark.usefixtures("store")
def test_writing_that_takes_for_ever_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("neoproto.trainer.checkpoint.saving._GRACE_S", 0.05)
    job = Job(tmp_path)
    job.actor.on_finish = lambda: asyncio.sleep(60)
    with pytest.raises(DeadlineExceeded, match=r"controller\.write checkpoint"):
        job.run(timeouts={"checkpoint": 0.05})


@pytest.mark.usefixtures("store")
def test_the_history_is_as_long_as_it_was_when_the_state_was_taken(tmp_path: Path) -> None:
    job = Job(tmp_path, steps=2)
    job.run()
    state = job.start_point().state
    assert state is not None
    assert state.positions == positions(tmp_path)
    assert state.positions["prompts.jsonl"] > 0


class SavingScene(Scene):
    """The asynchronous loops with checkpoints, started again and again in one folder."""

    def __init__(self, tmp_path: Path, mode: str, **options: Any) -> None:
        super().__init__(tmp_path, mode, save_freq=2, **options)
        self.checkpoints = CheckpointFolder(tmp_path / "checkpoints")
        self.start: StartPoint | None = None
        states = {"actor": FakeStates(), "critic": FakeStates()}
        workers = self.world.workers

        def with_states(**kwargs: Any) -> Any:
            made = workers(**kwargs)
            for name, one in states.items():
                getattr(made, name).group.methods.update(
                    save_checkpoint=one.save, finish_checkpoint=one.finish
                )
            return made

        self.world.workers = with_states  # type: ignore[method-assign]

    def more(self) -> dict[str, Any]:
        log = PromptLog(self.tmp_path / "prompts.jsonl")
        return {"start": self.start, "checkpoints": self.checkpoints, "prompt_log": log}

    def go_on(self, epoch: int) -> None:
        newest = self.checkpoints.newest()
        assert newest is not None
        state = read_state(newest)
        self.start = StartPoint(epoch=epoch, checkpoint=newest, state=state)
        self.prompts.load_state_dict(state.loader)
        path = self.tmp_path / "prompts.jsonl"
        path.write_bytes(path.read_bytes()[: state.positions["prompts.jsonl"]])


@BOTH
@pytest.mark.parametrize("warmup", [0, 1, 2])
@pytest.mark.parametrize("first", [3, 4, 5])
def test_asynchronous_runs_lose_and_double_no_prompt(
    tmp_path: Path, store: MemoryStore, mode: str, warmup: int, first: int
) -> None:
    """Ended after `first` steps, with more asked for then: rollout has to be given work ahead again."""
    options: dict[str, Any] = {
        mode: {"num_warmup_batches": warmup},
        "replay_buffer": {"max_off_policy_threshold": 4},
    }
    scene = SavingScene(tmp_path, mode, steps=first, replicas=2, **options)
    scene.train()
    assert store.keys() == []
    then = SavingScene(tmp_path, mode, steps=8, replicas=2, **options)
    then.go_on(epoch=1)
    then.train()
    assert store.keys() == []
    rows = [json.loads(line) for line in (tmp_path / "prompts.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, 9))
    assert sorted(serial for row in rows for serial in row["serials"]) == list(range(8 * PROMPTS))
    uids = sorted(uid for row in rows for uid in row["uids"])
    assert uids == sorted(f"u{10 * batch + row}" for batch in range(1, 9) for row in range(PROMPTS))
    assert [one.epoch for one in then.world.published] == [1] * len(then.world.published)


@BOTH
@pytest.mark.usefixtures("store")
def test_an_asynchronous_run_that_was_interrupted_goes_on_with_what_was_on_its_way(
    tmp_path: Path, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed at step 5 of 8: the queue and the buffer of step 4's checkpoint are not empty."""
    scene = SavingScene(tmp_path, mode, steps=8, replay_buffer={"max_off_policy_threshold": 4})
    scene.world.workers = failing(scene, after=5)  # type: ignore[method-assign]
    with pytest.raises(WorkerDied):
        scene.train()
    then = SavingScene(tmp_path, mode, steps=8, replay_buffer={"max_off_policy_threshold": 4})
    then.go_on(epoch=1)
    assert then.start is not None
    assert then.start.state is not None
    assert then.start.state.rollout is not None
    assert then.start.state.rollout.batches == then.start.step + 2
    fed: list[int] = []
    feed_batch = AsyncTrainer._feed_batch

    def fed_batch(trainer: AsyncTrainer) -> None:
        fed.append(trainer._step)
        feed_batch(trainer)

    monkeypatch.setattr(AsyncTrainer, "_feed_batch", fed_batch)
    then.train()
    assert fed == list(range(then.start.step + 1, 9)), "one after each step: there is work ahead already"
    assert then.prompts.state_dict() == {"drawn": 8}, "and no prompt more than is trained on"
    rows = [json.loads(line) for line in (tmp_path / "prompts.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, 9))
    assert sorted(serial for row in rows for serial in row["serials"]) == list(range(8 * PROMPTS))


def failing(scene: SavingScene, after: int) -> Callable[..., Any]:
    """Workers whose policy dies in the update after so many."""
    workers, updates = scene.world.workers, 0

    def update(_: Any) -> dict[str, float]:
        nonlocal updates
        updates += 1
        if updates > after:
            raise WorkerDied("actor", 0, "host", "signal 9 (SIGKILL)")
        return {"actor/pg_loss": 0.25}

    def made(**kwargs: Any) -> Any:
        found = workers(**kwargs)
        found.actor.group.methods["update_actor"] = update
        return found

    return made


def test_a_checkpoint_of_another_kind_of_run_is_refused(tmp_path: Path, store: MemoryStore) -> None:
    scene = SavingScene(tmp_path, "separate_async", steps=2)
    scene.train()
    scene.go_on(epoch=1)
    assert scene.start is not None
    checkpoint, state = scene.start.checkpoint, scene.start.state
    assert isinstance(checkpoint, Checkpoint)
    assert state is not None
    check_fits(scene.config, checkpoint, state)
    check_fits(Scene(tmp_path, "decoupled_async").config, checkpoint, state)
    assert (state.fixed["reward"], state.fixed["trainer loop"]) == ("auto", "the one of trainer.mode")
    with pytest.raises(ConfigError, match=r"trainer\.mode: got 'sync', but .*global_step_2 was saved with"):
        check_fits(load_config({}), checkpoint, state)
    other = {
        "trainer": {"mode": "separate_async"},
        "algorithm": {"adv_estimator": "grpo"},
        "actor_rollout_ref": {"rollout": {"n": 4}},
    }
    with pytest.raises(ConfigError) as caught:
        check_fits(load_config(other), checkpoint, state)
    assert [text.partition(":")[0] for text in caught.value.problems] == [
        "actor_rollout_ref.rollout.n",
        "algorithm.adv_estimator",
        "data.train_batch_size",
    ]
