"""Where a run starts: at its beginning, or from a checkpoint that was verified before a worker is started.

resume_mode  auto: the newest checkpoint of the run's folder      path: that of another      disable: none
                    └── files verified ── state read ── options and data compared ──> StartPoint
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from neoproto.config import RunConfig
from neoproto.data.paths import user_path
from neoproto.errors import ConfigError
from neoproto.run.folder import completed_steps, holds_run, next_epoch
from neoproto.run.prepare import PreparedRun, Stage
from neoproto.trainer.checkpoint import CHECKPOINTS, Checkpoint, CheckpointFolder, locate, problems
from neoproto.trainer.history import cut_history
from neoproto.trainer.resume import StartPoint, TrainerState, check_fits, read_state

log = logging.getLogger("neoproto.run")


def checkpoint_at_path(config: RunConfig) -> Checkpoint | None:
    """What `trainer.resume_from_path` names; None without it.

    Raises:
        ConfigError: there is no checkpoint.
    """
    if config.trainer.resume_from_path is None:
        return None
    field = "trainer.resume_from_path"
    path = user_path(config.trainer.resume_from_path, field=field).absolute()
    found = locate(path)
    if found is None:
        what = "no checkpoint (global_step_N with a manifest.json) in" if path.is_dir() else "no such folder:"
        raise ConfigError(f"{field}: {what} {path}")
    return found


class Starts:
    """The starts of one run, the first and those after failures.

    Args:
        given: a checkpoint of elsewhere to start from while there is no own one.
    """

    def __init__(self, prepared: PreparedRun, folder: Path, given: Checkpoint | None, stage: Stage) -> None:
        self._prepared, self._folder, self._given, self._stage = prepared, folder, given, stage
        self._beginning: Mapping[str, Any] = prepared.loader.state_dict()
        self.checkpoints = CheckpointFolder(folder / CHECKPOINTS, prepared.config.trainer.max_ckpt_to_keep)

    def complete(self) -> int | None:
        """The steps of the run if it is complete as configured; None if there is something to do."""
        steps = completed_steps(self._folder)
        return steps if steps is not None and steps >= self._prepared.total_steps else None

    def newest(self) -> Checkpoint | None:
        """The checkpoint that the next start goes on from."""
        return self.checkpoints.newest() or self._given

    def next(self) -> StartPoint:
        """Verify the newest checkpoint and set the data to its position; a start of the run begins here.

        Raises:
            ConfigError: it is damaged, or of other data, another algorithm, more steps.
        """
        self.checkpoints.sweep()
        newest = self.newest()
        state = None if newest is None else open_checkpoint(newest, self._prepared, self._stage)
        self._prepared.loader.load_state_dict(dict(self._beginning if state is None else state.loader))
        least = 0 if state is None else state.version.epoch + 1
        return StartPoint(epoch=next_epoch(self._folder, least), checkpoint=newest, state=state)

    def cut(self, start: StartPoint) -> None:
        """Set aside what was written down after the point that the run goes on from."""
        own = start.checkpoint is not None and start.checkpoint.path.parent == self.checkpoints.root
        at = start.state.positions if own and start.state is not None else {}
        if lines := cut_history(self._folder, at, start.step):
            log.info("%d lines of metrics and prompts after step %d were set aside", lines, start.step)

    def told(self, start: StartPoint) -> str | None:
        """What a person should know of where the run starts; None for a new one."""
        if start.checkpoint is not None:
            return f"going on from the checkpoint of step {start.step}: {start.checkpoint.path}"
        if holds_run(self._folder):
            return (
                "this folder's run has no checkpoint: starting from the beginning, its metrics are kept as "
                "metrics.superseded.jsonl"
            )
        return None


def open_checkpoint(checkpoint: Checkpoint, prepared: PreparedRun, stage: Stage) -> TrainerState:
    """The controller's state of a checkpoint whose every file is as it was written.

    Raises:
        ConfigError: with everything that is wrong with it, or does not fit the run.
    """
    with stage("verifying the checkpoint"):
        if wrong := problems(checkpoint):
            hint = f"{checkpoint.path} is damaged: remove it to go on from an older one"
            raise ConfigError(*wrong, hint)
    state = read_state(checkpoint)
    check_fits(prepared.config, checkpoint, state)
    if state.step > prepared.total_steps:
        raise ConfigError(
            f"trainer.total_training_steps: got {prepared.total_steps} steps in all, but {checkpoint.path} "
            f"is of step {state.step}"
        )
    return state
