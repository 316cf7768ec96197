"""A trainer loop of your own: best of n (RAFT, arXiv 2304.06767).

Of each prompt's samples the policy imitates the best one, if that is right.

python docs/examples/best_of_n.py --config-name grpo_monarch
"""

from __future__ import annotations

from typing import Any

import torch

from neoproto.data import DataProto
from neoproto.run.process import run_command
from neoproto.trainer.checkpoint.saving import CheckpointContext, Checkpointer
from neoproto.trainer.metrics.batch import batch_metrics
from neoproto.trainer.metrics.phases import PhaseClock
from neoproto.trainer.metrics.record import TrainingParts, TrainingResult
from neoproto.trainer.tasks import owned_tasks
from neoproto.trainer.weight_flow import DrivenFlow


async def best_of_n(parts: TrainingParts) -> TrainingResult:
    """Generate, choose, imitate, publish; validation and checkpoints where they are due."""
    start = parts.start  # the beginning, or a checkpoint that the workers have loaded already
    async with owned_tasks() as tasks:
        weights = DrivenFlow(
            parts.workers, tasks, limit=parts.config.trainer.timeouts.weights, first=start.version
        )
        saver = Checkpointer(parts, tasks)
        await weights.publish().committed(PhaseClock())
        if start.step == 0 and parts.validator.due(0):
            await parts.validator.run(0)
        for step in range(start.step + 1, parts.total_steps + 1):
            clock, prompts = PhaseClock(), parts.prompts.next_batch()
            batch, metrics = await learn(parts, prompts, clock)
            await weights.publish().committed(clock)  # every replica serves them when this returns
            parts.prompt_log.log(step, [str(uid) for uid in prompts["uid"]])
            parts.sample_log.log(step, batch)  # writes with trainer.log_samples=true
            parts.recorder.step(step, metrics, clock, samples=len(batch))
            batch.release()  # what the store holds of it
            prompts.release()
            if parts.validator.due(step):
                await parts.validator.run(step)
            if saver.due(step):
                await saver.save(step, lambda: CheckpointContext(version=weights.newest.version))
        await saver.finished()
    return parts.recorder.result()


async def learn(
    parts: TrainingParts, prompts: DataProto, clock: PhaseClock
) -> tuple[DataProto, dict[str, float]]:
    """One step: calls on worker groups, each with a deadline; what travels in `batch` are references."""
    workers, limits = parts.workers, parts.config.trainer.timeouts
    prompts.meta_info["keep_text"] = parts.sample_log.on
    rollout, reward = workers.rollout.within(limits.generate), workers.reward.within(limits.reward)
    batch = await clock.wait("gen", rollout.generate_sequences(prompts))
    batch = batch.union(await clock.wait("reward", reward.compute_score(batch)))
    log_probs = workers.actor.within(limits.log_prob).compute_log_prob(batch)
    batch = batch.union(await clock.wait("old_log_prob", log_probs))
    with clock.phase("choose"):
        batch, metrics = choose(batch)
    update = await clock.wait("update_actor", workers.actor.within(limits.update).update_actor(batch))
    return batch, metrics | update


def choose(batch: DataProto) -> tuple[DataProto, dict[str, float]]:
    """Leave the loss mask of chosen rows only, with advantage 1: these samples are made more likely."""
    columns: dict[str, Any] = batch.materialize(
        ["uid", "token_level_scores", "response_mask", "attention_mask", "truncated"]
    )
    score_b = columns["token_level_scores"].sum(1)
    best: dict[str, int] = {}
    for row, uid in enumerate(columns["uid"].tolist()):
        if score_b[row] > score_b[best.setdefault(uid, row)]:
            best[uid] = row
    chosen = [row for row in best.values() if score_b[row] > 0]
    mask_bt = torch.zeros_like(columns["response_mask"])
    mask_bt[chosen] = columns["response_mask"][chosen]
    new = {"response_mask": mask_bt, "advantages": mask_bt.float()}
    metrics = batch_metrics(columns | new | {"token_level_rewards": columns["token_level_scores"]})
    metrics["best_of_n/chosen"] = len(chosen) / len(best)
    # Renamed, not dropped, so that releasing the batch releases it too.
    batch = batch.rename("response_mask", "generated_mask")
    return batch.union(DataProto.from_dict(tensors=new)), metrics


if __name__ == "__main__":
    run_command(best_of_n)
