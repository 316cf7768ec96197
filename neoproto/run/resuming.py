"""Where a run starts: at its beginning, or from a checkpoint that was verified before a worker is started.

resume_mode  auto: the newest checkpoint of the run's folder      path: that of another      disable: none
                    └── files verified ── state read ── options and data compared ──> StartPoint
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from neoproto.config import RunConfig
from neoproto.errors import ConfigError
from neoproto.files import user_path
from neoproto.run.folder import completed_steps, holds_run, next_epoch, write_config
from neoproto.trainer.checkpoint.folder import CHECKPOINTS, Checkpoint, CheckpointFolder, locate, problems
from neoproto.trainer.checkpoint.history import cut_history
from neoproto.trainer.checkpoint.resume import (
    StartPoint,
    TrainerState,
    check_fits,
    code_options,
    differing,
    read_state,
)

if TYPE_CHECKING:
    from neoproto.run.prepare import PreparedRun, Stage

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


@dataclass(frozen=True, kw_only=True, slots=True)
class Opened:
    """A checkpoint that was verified, with the controller's state in it."""

    checkpoint: Checkpoint
    state: TrainerState


class ResumePoints:
    """The points that one run starts from: at first, on a resume and after each failure.

    Args:
        given: a checkpoint of elsewhere to start from while there is no own one.
    """

    def __init__(self, prepared: PreparedRun, folder: Path, given: Opened | None, stage: Stage) -> None:
        self._prepared, self._folder, self._given, self._stage = prepared, folder, given, stage
        self._beginning: Mapping[str, Any] = prepared.loader.state_dict()
        self.checkpoints = CheckpointFolder(folder / CHECKPOINTS, prepared.config.trainer.max_ckpt_to_keep)

    def complete(self) -> int | None:
        """The steps of the run if it is complete as configured; None if there is something to do."""
        steps = completed_steps(self._folder)
        return steps if steps is not None and steps >= self._prepared.total_steps else None

    def newest(self) -> Checkpoint | None:
        """The checkpoint that the next start resumes from."""
        own = self.checkpoints.newest()
        return own if own is not None or self._given is None else self._given.checkpoint

    def next(self) -> StartPoint:
        """Verify the newest checkpoint and set the data to its position; a start of the run begins here.

        The folder has the run's configuration from then on: what is refused leaves the one before.

        Raises:
            ConfigError: see `open`.
        """
        self.checkpoints.sweep()
        opened = self.open()
        write_config(self._folder, self._prepared.config)
        if opened is None:
            self._prepared.loader.load_state_dict(dict(self._beginning))
            return StartPoint(epoch=next_epoch(self._folder))
        epoch = next_epoch(self._folder, opened.state.version.epoch + 1)
        return StartPoint(epoch=epoch, checkpoint=opened.checkpoint, state=opened.state)

    def open(self) -> Opened | None:
        """What the next start resumes from, verified, the data set to its position; no file is changed.

        Raises:
            ConfigError: it is damaged, or of other data, another algorithm, more steps.
        """
        own = self.checkpoints.newest()
        opened = self._given if own is None else open_checkpoint(own, self._prepared, self._stage)
        if opened is not None:
            self._prepared.loader.load_state_dict(dict(opened.state.loader))
        return opened

    def cut(self, start: StartPoint) -> None:
        """Set aside what was written down after the point that the run resumes from."""
        own = start.checkpoint is not None and start.checkpoint.path.parent == self.checkpoints.root
        at = start.state.positions if own and start.state is not None else {}
        if lines := cut_history(self._folder, at, start.step):
            log.info("%d lines of metrics and prompts after step %d were set aside", lines, start.step)

    def describe(self, start: StartPoint) -> str | None:
        """One line on where the run starts; None for a new one."""
        if start.checkpoint is not None:
            where = f"resuming from the checkpoint of step {start.step}: {start.checkpoint.path}"
            return "; ".join((where, *self._cautions(start)))
        if holds_run(self._folder):
            return (
                "this folder's run has no checkpoint: starting from the beginning, its metrics are kept as "
                "metrics.superseded.jsonl"
            )
        return None

    def _cautions(self, start: StartPoint) -> Iterator[str]:
        assert start.checkpoint is not None
        assert start.state is not None
        code = code_options(self._prepared.config, self._prepared.loop)
        if "judged" not in start.state.loader:
            yield (
                "it is of an earlier version and does not record what judged its rows, nor which "
                "code, so neither is compared"
            )
        yield from differing(code, start.checkpoint, start.state)


def open_checkpoint(checkpoint: Checkpoint, prepared: PreparedRun, stage: Stage) -> Opened:
    """Read every file of a checkpoint, and see whether it is as it was written and fits the run.

    Raises:
        ConfigError: with everything that is wrong with it, or does not fit the run.
    """
    with stage("verifying the checkpoint"):
        if wrong := problems(checkpoint):
            hint = f"{checkpoint.path} is damaged: remove it to resume from an older one"
            raise ConfigError(*wrong, hint)
    state = read_state(checkpoint)
    check_fits(prepared.config, checkpoint, state, prepared.loop)
    if state.step > prepared.total_steps:
        raise ConfigError(
            f"trainer.total_training_steps: got {prepared.total_steps} steps in all, but {checkpoint.path} "
            f"is of step {state.step}"
        )
    return Opened(checkpoint=checkpoint, state=state)
