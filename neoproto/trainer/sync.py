"""The synchronous trainer: every step generates on the weights of the step before.

for each step:  generate ─> annotate ─> estimate ─> update ─> publish version n ─> every replica loads it
"""

from __future__ import annotations

from neoproto.trainer.phases import PhaseClock
from neoproto.trainer.record import TrainingParts, TrainingResult
from neoproto.trainer.saving import Checkpointer, Moment
from neoproto.trainer.step import ppo_step
from neoproto.trainer.store_metrics import store_metrics
from neoproto.trainer.tasks import owned_tasks
from neoproto.trainer.weight_flow import DrivenFlow, WeightFlow


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
        parts, start = self._parts, self._parts.start
        limit = parts.config.trainer.timeouts.weights
        async with owned_tasks() as tasks:
            flow = DrivenFlow(parts.workers, tasks, limit=limit, first=start.version)
            saver = Checkpointer(parts, tasks)
            await flow.publish().committed(PhaseClock())
            if start.step == 0 and parts.validator.due(0):
                await parts.validator.run(0)
            for step in range(start.step + 1, parts.total_steps + 1):
                await self._step(step, flow)
                if parts.validator.due(step):
                    await parts.validator.run(step)
                if saver.due(step):
                    await saver.save(step, lambda: Moment(version=flow.newest.version))
            await saver.finished()
        return parts.recorder.result()

    async def _step(self, step: int, flow: WeightFlow) -> None:
        parts, clock = self._parts, PhaseClock()
        prompts = parts.prompts.next_batch()
        prompts.meta_info |= {"step": step, "validate": False, "keep_text": parts.sample_log.on}
        batch, figures = await ppo_step(parts.workers, prompts, parts.settings, clock)
        await flow.publish().committed(clock)
        samples = len(batch)
        if parts.prompt_log.on:
            parts.prompt_log.log(step, [str(uid) for uid in prompts["uid"]])
        parts.sample_log.log(step, batch)
        batch.release()
        prompts.release()
        parts.recorder.step(step, figures | await store_metrics(), clock, samples)
