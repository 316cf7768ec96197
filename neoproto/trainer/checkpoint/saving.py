"""Saving checkpoints beside training.

step ends ─> workers copy their state ─> controller takes its own ─> the next step begins
                   │ (awaited)                  │
                   └─ write, sync ──────────────┴─ write ─> manifest, name       (owned task, one at a time)
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from neoproto.errors import CheckpointError, DeadlineExceeded
from neoproto.files import write_synced
from neoproto.trainer.checkpoint.folder import CheckpointFolder
from neoproto.trainer.checkpoint.history import positions, sync_history
from neoproto.trainer.checkpoint.resume import (
    STATE,
    RolloutProgress,
    TrainerState,
    code_options,
    fixed_options,
)
from neoproto.trainer.checkpoint.rollout_state import RolloutSnapshot
from neoproto.trainer.metrics.phases import PhaseClock
from neoproto.trainer.metrics.record import TrainingParts
from neoproto.trainer.protocols import Trained
from neoproto.trainer.tasks import owned_tasks, together
from neoproto.weights.version import WeightVersion

PHASE = "save_checkpoint"
_GRACE_S = 5.0
"""How much later than a worker's own deadline the whole may end."""

log = logging.getLogger("neoproto.trainer")


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointContext:
    """What a trainer adds: the newest version and, in the asynchronous modes, queue and buffer."""

    version: WeightVersion
    progress: RolloutProgress | None = None
    rollout: RolloutSnapshot | None = None


Moment = CheckpointContext
"""The former name, kept for one release."""


class Checkpointer:
    """Saves when it is due. Belongs to the trainer's event loop.

    Args:
        tasks: of the trainer: owns the writing, so that its failure ends the run.
    """

    def __init__(self, parts: TrainingParts, tasks: asyncio.TaskGroup) -> None:
        self._parts, self._tasks = parts, tasks
        self._freq = parts.config.trainer.save_freq
        self._limit = parts.config.trainer.timeouts.checkpoint
        workers = parts.workers
        self._trained: dict[str, Trained] = {"actor": workers.actor}
        if workers.critic is not None:
            self._trained["critic"] = workers.critic
        self._writing: asyncio.Task[None] | None = None
        # Now, as the workers were started with it: a file of the user's may be changed during the run.
        self._fixed = fixed_options(parts.config) | code_options(parts.config, parts.loop)

    def due(self, step: int) -> bool:
        """Whether to save after this step: after every `save_freq`, and after the last."""
        last = step == self._parts.total_steps
        return self._parts.checkpoints is not None and self._freq > 0 and (last or step % self._freq == 0)

    async def save(self, step: int, take: Callable[[], CheckpointContext]) -> None:
        """Start saving the run as it is after `step`; returns when training may continue.

        Consumes: nothing. Waits for: the checkpoint before, and the workers' copies. Produces: a task that
        writes. Unblocked by: a result, an error or the deadline of what it waits for.

        Args:
            take: called once the workers have their copies.

        Raises:
            CheckpointError: the disk. DeadlineExceeded, WorkerDied, …: a worker.
        """
        await self.finished()
        folder, clock = self._parts.checkpoints, PhaseClock()
        assert folder is not None
        started = time.perf_counter()
        with _disk_errors(step, folder.root):
            partial = await asyncio.to_thread(self._begin, folder, step)
        async with owned_tasks() as tasks:
            for role, trained in self._trained.items():
                saving = trained.within(self._limit).save_checkpoint(str(partial / role))
                tasks.create_task(clock.wait(PHASE, saving))
        self._parts.recorder.saved(step, time.perf_counter() - started)
        # The workers hold copies of this step. Nothing is awaited from here to the task: queue, buffer,
        # position in the data and metrics are of the same moment.
        context = take()
        state = self._state(step, context)
        self._writing = self._tasks.create_task(
            self._write(folder, partial, state, context.rollout), name=f"checkpoint of step {step}"
        )

    async def finished(self) -> None:
        """Return when nothing is being written; whatever writing raised ends the task group too."""
        if self._writing is not None:
            await asyncio.shield(self._writing)

    def _begin(self, folder: CheckpointFolder, step: int) -> Path:
        partial = folder.begin(step)
        for role in self._trained:
            (partial / role).mkdir()
        return partial

    def _state(self, step: int, context: CheckpointContext) -> TrainerState:
        parts = self._parts
        kl = parts.settings.kl
        return TrainerState(
            step=step,
            version=context.version,
            loader=parts.prompts.state_dict(),
            kl={} if kl is None else kl.state_dict(),
            recorder=parts.recorder.state_dict(),
            positions=positions(parts.run_dir),
            ranks={role: trained.group.world_size for role, trained in self._trained.items()},
            fixed=self._fixed,
            rollout=context.progress,
        )

    async def _write(
        self, folder: CheckpointFolder, partial: Path, state: TrainerState, rollout: RolloutSnapshot | None
    ) -> None:
        """Consumes: copies and snapshot. Waits for: workers' writing, and threads of this process. Produces:
        a checkpoint. Unblocked by: results, errors, or the deadline."""
        started = time.perf_counter()
        with _disk_errors(state.step, partial):
            try:
                async with asyncio.timeout(self._limit + _GRACE_S) as scope:
                    digests = await self._files(partial, state, rollout)
                    await asyncio.to_thread(folder.commit, partial, state.step, digests)
            except TimeoutError:
                if not scope.expired():  # a worker's own deadline, with its own words
                    raise
                limit = self._limit + _GRACE_S
                raise DeadlineExceeded("write checkpoint", "controller", (), limit) from None
        if rollout is not None:
            rollout.release()
        log.info("checkpoint of step %d: written in %.2f s", state.step, time.perf_counter() - started)

    async def _files(
        self, partial: Path, state: TrainerState, rollout: RolloutSnapshot | None
    ) -> dict[str, str]:
        """Relative name -> SHA-256 of every file, once all are on the disk."""

        async def of_workers(role: str, trained: Trained) -> dict[str, str]:
            ranks = await trained.within(self._limit).finish_checkpoint()
            return {f"{role}/{name}": sha for files in ranks for name, sha in files.items()}

        async def of_controller() -> dict[str, str]:
            return await asyncio.to_thread(self._own_files, partial, state, rollout)

        works: list[Any] = [of_workers(role, trained) for role, trained in self._trained.items()]
        digests: dict[str, str] = {}
        for files in await together(of_controller(), *works):
            digests |= files
        return digests

    def _own_files(
        self, partial: Path, state: TrainerState, rollout: RolloutSnapshot | None
    ) -> dict[str, str]:
        sync_history(self._parts.run_dir)
        own = state.to_json()
        write_synced(partial / STATE, own)
        digests = {STATE: hashlib.sha256(own).hexdigest()}
        return digests if rollout is None else digests | rollout.write(partial)


@contextmanager
def _disk_errors(step: int, path: Path) -> Iterator[None]:
    """Add the checkpoint's name to an error of the disk. Deadlines are OSErrors too, and stay as is."""
    try:
        yield
    except OSError as error:
        if isinstance(error, TimeoutError):
            raise
        text = f"the checkpoint of step {step} could not be written to {path}: {error}"
        raise CheckpointError(text) from error
