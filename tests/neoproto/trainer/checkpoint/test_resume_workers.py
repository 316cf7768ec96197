"""The synchronous trainer with policy and critic that really train and save, killed at every step.

What they train on depends on the prompts of the step: a prompt lost or doubled changes the weights.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from neoproto.data import DataProto
from neoproto.errors import WorkerDied
from neoproto.trainer.checkpoint.folder import problems
from neoproto.trainer.checkpoint.history import cut_history
from tests.actors.checkpoint_program import Trained, differing
from tests.actors.tiny_llama import make_folder
from tests.neoproto.trainer.checkpoint.test_saving import Job, without_times

STEPS = 5


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = make_folder(tmp_path_factory.mktemp("tied") / "model", tied=True)
    return folder


class TrainedGroup:
    """Stands for a group: one model in training, which dies in the update after so many."""

    def __init__(self, kind: str, model: Path, updates: int | None) -> None:
        self.trained, self._left = Trained(kind, model), updates

    def update(self, batch: DataProto) -> dict[str, float]:
        if self._left is not None:
            if self._left == 0:
                raise WorkerDied("actor", 0, "host", "signal 9 (SIGKILL)")
            self._left -= 1
        return self.trained.update(seed=int(str(batch["uid"][0]).removeprefix("u")))

    def save(self, folder: str) -> None:
        self.trained.checkpoints.save(Path(folder))

    async def finish(self) -> list[dict[str, str]]:
        return [await self.trained.checkpoints.finish()]


class TrainedJob(Job):
    """One start of a run whose policy dies in the update after `updates`; None: it does not."""

    def __init__(self, run_dir: Path, model: Path, updates: int | None = None) -> None:
        super().__init__(run_dir, STEPS)
        self.groups = {
            "actor": TrainedGroup("policy", model, updates),
            "critic": TrainedGroup("critic", model, None),
        }
        self.actor, self.critic = self.groups["actor"], self.groups["critic"]  # type: ignore[assignment]
        make = self.world.workers

        def workers(**kwargs: Any) -> Any:
            made = make(**kwargs)
            made.actor.group.methods["update_actor"] = self.groups["actor"].update
            made.critic.group.methods["update_critic"] = self.groups["critic"].update  # type: ignore[union-attr]
            return made

        self.world.workers = workers  # type: ignore[method-assign]

    def go_on(self, epoch: int) -> None:
        """As a start of the run does, if there is something to go on from."""
        newest = self.checkpoints.newest()
        self.checkpoints.sweep()
        if newest is None:
            cut_history(self.run_dir, {}, 0)
            self.run()
            return
        assert problems(newest) == []
        start = self.start_point(epoch)
        assert start.state is not None
        cut_history(self.run_dir, start.state.positions, start.step)
        for role, group in self.groups.items():
            group.trained.checkpoints.load(newest.path / role)
        self.run(start)

    def states(self) -> dict[str, Tensor]:
        return {
            f"{role}.{name}": value
            for role, group in self.groups.items()
            for name, value in group.trained.state().items()
        }

    def rows(self) -> dict[int, dict[str, float]]:
        return {step: without_times(row) for step, row in self.recorder.steps_logged()}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, llama: Path) -> TrainedJob:
    job = TrainedJob(tmp_path_factory.mktemp("whole"), llama)
    job.run()
    return job


@pytest.mark.parametrize("kills", [(0,), (1,), (2,), (3,), (4,), (3, 0), (2, 1, 2)])
def test_however_often_it_is_killed_the_result_is_the_same_to_the_bit(
    tmp_path: Path, llama: Path, whole: TrainedJob, kills: tuple[int, ...]
) -> None:
    rows: dict[int, dict[str, float]] = {}
    for epoch, updates in enumerate(kills):
        job = TrainedJob(tmp_path, llama, updates)
        with pytest.raises(WorkerDied):
            job.go_on(epoch)
        rows |= job.rows()
    last = TrainedJob(tmp_path, llama)
    last.go_on(len(kills))
    assert differing(last.states(), whole.states()) == []
    assert rows | last.rows() == whole.rows()
    assert (tmp_path / "prompts.jsonl").read_bytes() == (whole.run_dir / "prompts.jsonl").read_bytes()
