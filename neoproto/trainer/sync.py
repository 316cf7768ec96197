"""The synchronous trainer: every step generates on the weights of the step before.

for each step:  generate ─> annotate ─> estimate ─> update ─> publish version n ─> every replica loads it
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from neoproto.data import DataProto
from neoproto.trainer.checkpoint.saving import CheckpointContext, Checkpointer
from neoproto.trainer.metrics.phases import PhaseClock
from neoproto.trainer.metrics.record import TrainingParts, TrainingResult
from neoproto.trainer.metrics.store import store_metrics
from neoproto.trainer.step import ppo_step
from neoproto.trainer.tasks import owned_tasks
from neoproto.trainer.weight_flow import DrivenFlow


def release(batch: DataProto, prompts: DataProto) -> None:
    """Delete what a finished step has in the store."""
    batch.release()
    prompts.release()


class SyncTrainer:
    """Generates and trains in turn, on the same devices."""

    def __init__(self, parts: TrainingParts) -> None:
        self._parts = parts

    async def run(self) -> TrainingResult:
        """Train up to `total_steps` steps, from where the run starts.

        Consumes: prompts. Waits for: worker calls, each with its deadline. Produces: metrics, validation
        samples, weight versions, checkpoints. Unblocked by: a result, an error or the deadline of the call it
        waits for.
        """
        parts = self._parts
        async with owned_tasks() as tasks:
            steps = SyncSteps(parts, tasks)
            await steps.begin()
            for step in range(parts.start.step + 1, parts.total_steps + 1):
                await steps.take(step)
            await steps.finished()
        return parts.recorder.result()


class SyncSteps:
    """The steps of a run, taken one by one by the caller: `begin`, `take` in order, `finished`.

    Args:
        tasks: owns the publishing of weights and the writing of checkpoints; a failure there ends it.
        done: what becomes of the batch of a finished step, and of the prompts that it refers to.
        keep_text: batches have the answers' text too, `response_text`.
    """

    def __init__(
        self,
        parts: TrainingParts,
        tasks: asyncio.TaskGroup,
        done: Callable[[DataProto, DataProto], None] = release,
        *,
        keep_text: bool = False,
    ) -> None:
        self._parts, self._done, self._keep_text = parts, done, keep_text
        limit = parts.config.trainer.timeouts.weights
        self._flow = DrivenFlow(parts.workers, tasks, limit=limit, first=parts.start.version)
        self._saver = Checkpointer(parts, tasks)

    async def begin(self) -> None:
        """Return when every replica serves the first weights, and the validation before training is done."""
        await self._flow.publish().committed(PhaseClock())
        if self._parts.start.step == 0 and self._parts.validator.due(0):
            await self._parts.validator.run(0)

    async def take(self, step: int) -> None:
        """One step, with the validation and the checkpoint that are due after it."""
        await self._train(step)
        if self._parts.validator.due(step):
            await self._parts.validator.run(step)
        if self._saver.due(step):
            await self._saver.save(step, lambda: CheckpointContext(version=self._flow.newest.version))

    async def finished(self) -> None:
        """Return when no checkpoint is being written."""
        await self._saver.finished()

    async def _train(self, step: int) -> None:
        parts, clock = self._parts, PhaseClock()
        prompts = parts.prompts.next_batch()
        keep_text = self._keep_text or parts.sample_log.on
        prompts.meta_info |= {"step": step, "validate": False, "keep_text": keep_text}
        batch, metrics = await ppo_step(parts.workers, prompts, parts.settings, clock)
        await self._flow.publish().committed(clock)
        samples = len(batch)
        if parts.prompt_log.on:
            parts.prompt_log.log(step, [str(uid) for uid in prompts["uid"]])
        parts.sample_log.log(step, batch)
        self._done(batch, prompts)
        parts.recorder.step(step, metrics | await store_metrics(), clock, samples)
