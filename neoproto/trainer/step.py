"""One PPO step, as endpoint calls.

    prompts ─> rollout ─> batch ─┬─> reward        ─┐
                                 ├─> actor (old)   ─┤      (not with bypass_mode)
                                 ├─> reference     ─┼─> rewards, advantages, weights ─┬─> critic update
                                 └─> critic values ─┘           (controller)          └─> actor update

Batches are references: what moves between the groups goes through the store. The controller reads only the
per-token numbers that the advantages and the metrics are made of.

Shape legend: b = samples, t = response tokens (fixed width R).
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from neoproto.algorithms.advantages import AdvantageInputs, AdvantageOptions
from neoproto.algorithms.checks import require_finite
from neoproto.algorithms.groups import group_ids_from_uids
from neoproto.algorithms.kl import AdaptiveKLController, FixedKLController, KLController, apply_kl_in_reward
from neoproto.algorithms.masking import onto_masked
from neoproto.algorithms.rollout_correction import RolloutCorrection, importance_weights
from neoproto.config import RunConfig
from neoproto.config.trainer import TimeoutsConfig
from neoproto.data import DataProto
from neoproto.trainer.advantages import EstimatorFunction, advantage_options, chosen_estimator
from neoproto.trainer.metrics.batch import batch_metrics, importance_metrics, logprob_difference
from neoproto.trainer.metrics.phases import PhaseClock
from neoproto.trainer.protocols import Call, Workers
from neoproto.trainer.tasks import owned_tasks

READ_COLUMNS = (
    "response_mask",
    "attention_mask",
    "truncated",
    "token_level_scores",
    "rollout_log_probs",
    "old_log_probs",
    "uid",
)

OPTIONAL_COLUMNS = ("values", "bootstrap_values", "ref_log_prob", "reward_failed")


@dataclass(frozen=True, kw_only=True, slots=True)
class StepSettings:
    """What a step needs of the configuration.

    Attributes:
        estimator: of advantages, a built-in or the user's.
        advantages: its options.
        truncated: what a response cut at the length limit is worth: `bootstrap`, `zero` or `mask`.
        kl: holds the coefficient of the KL penalty in the reward; None without one.
        kl_penalty: estimator of that penalty.
        correction: what is done about samples of another policy than the one the step finds.
        timeouts: seconds per kind of call.
    """

    estimator: EstimatorFunction
    advantages: AdvantageOptions
    truncated: str
    kl: KLController | None
    kl_penalty: str
    correction: RolloutCorrection
    timeouts: TimeoutsConfig

    @classmethod
    def from_config(cls, config: RunConfig) -> StepSettings:
        algorithm, correction = config.algorithm, config.algorithm.rollout_correction
        return cls(
            estimator=chosen_estimator(config),
            advantages=advantage_options(config),
            truncated=algorithm.truncated,
            kl=kl_controller(config),
            kl_penalty=algorithm.kl_penalty,
            correction=RolloutCorrection(
                rollout_is=correction.rollout_is,
                rollout_is_threshold=correction.rollout_is_threshold,
                bypass_mode=correction.bypass_mode,
            ),
            timeouts=config.trainer.timeouts,
        )


def kl_controller(config: RunConfig) -> KLController | None:
    """The controller of the KL penalty in the reward, if there is one."""
    if not config.algorithm.use_kl_in_reward:
        return None
    options = config.algorithm.kl_ctrl
    if options.type == "fixed":
        return FixedKLController(options.kl_coef)
    return AdaptiveKLController(options.kl_coef, options.target_kl, options.horizon)


async def ppo_step(
    workers: Workers, prompts: DataProto, settings: StepSettings, clock: PhaseClock
) -> tuple[DataProto, dict[str, float]]:
    """Generate, judge, estimate, update. Publishing the new weights is the loop's business.

    Args:
        prompts: one training batch of prompts.

    Returns:
        The finished batch (references; the caller releases it) and the metrics.
    """
    rollout = workers.rollout.within(settings.timeouts.generate)
    batch = await clock.wait("gen", rollout.generate_sequences(prompts))
    return await learn(workers, batch, settings, clock)


async def learn(
    workers: Workers, batch: DataProto, settings: StepSettings, clock: PhaseClock
) -> tuple[DataProto, dict[str, float]]:
    """Judge, estimate, update: a step on samples that were generated here or elsewhere.

    Args:
        batch: one training batch of finished samples.

    Returns:
        The finished batch (references; the caller releases it) and the metrics.
    """
    limit = settings.timeouts.update
    batch = await annotate(workers, batch, settings, clock)
    with clock.phase("adv"):
        batch, metrics = estimate(batch, settings)
    async with owned_tasks() as tasks:

        def book(phase: str, call: Call[dict[str, float]]) -> asyncio.Task[dict[str, float]]:
            return tasks.create_task(clock.wait(phase, call))

        updates = [book("update_actor", workers.actor.within(limit).update_actor(batch))]
        if workers.critic is not None:
            updates.append(book("update_critic", workers.critic.within(limit).update_critic(batch)))
    for update in updates:
        metrics |= update.result()
    return batch, metrics


async def annotate(
    workers: Workers, batch: DataProto, settings: StepSettings, clock: PhaseClock
) -> DataProto:
    """Add scores, old log-probs and, where there are such groups, reference log-probs and values, at once.

    With `bypass_mode` the old log-probs are rollout's, under a second name; the policy is not asked.
    """
    limits, actor, reference, critic = settings.timeouts, workers.actor, workers.reference, workers.critic
    async with owned_tasks() as tasks:

        def book(phase: str, call: Call[DataProto]) -> asyncio.Task[DataProto]:
            return tasks.create_task(clock.wait(phase, call))

        calls = [book("reward", workers.reward.within(limits.reward).compute_score(batch))]
        if not settings.correction.bypass_mode:
            calls.append(book("old_log_prob", actor.within(limits.log_prob).compute_log_prob(batch)))
        if reference is not None:
            calls.append(book("ref", reference.within(limits.log_prob).compute_ref_log_prob(batch)))
        if critic is not None:
            calls.append(book("values", critic.within(limits.values).compute_values(batch)))
    for call in calls:
        batch = batch.union(call.result())
    if settings.correction.bypass_mode:
        recorded = batch.select("rollout_log_probs", [])
        batch = batch.union(recorded.rename("rollout_log_probs", "old_log_probs"))
    return batch


def estimate(batch: DataProto, settings: StepSettings) -> tuple[DataProto, dict[str, float]]:
    """Token-level rewards, advantages, returns and importance weights of an annotated batch, and its metrics.

    With `truncated="mask"` the loss mask of cut rows becomes zero: they train nothing and move no baseline.

    Raises:
        NonFiniteLoss: an advantage or a weight is not finite.
        AdvantageError: an estimator of the user's failed.
    """
    names = [
        *READ_COLUMNS,
        *(name for name in OPTIONAL_COLUMNS if name in batch),
    ]
    columns: dict[str, Any] = batch.materialize(names)
    truncated_b: Tensor = columns["truncated"]
    masked = settings.truncated == "mask" and bool(truncated_b.any())
    if masked:
        columns["response_mask"] = columns["response_mask"] * ~truncated_b[:, None]
    columns["token_level_rewards"], metrics = token_level_rewards(columns, settings)
    inputs = AdvantageInputs(
        rewards_bt=columns["token_level_rewards"],
        mask_bt=columns["response_mask"],
        values_bt=columns.get("values"),
        bootstrap_values_b=columns.get("bootstrap_values"),
        truncated_b=truncated_b if settings.truncated == "bootstrap" else torch.zeros_like(truncated_b),
        group_ids_b=group_ids_from_uids(columns["uid"].tolist()),
    )
    # A copy: a loop's own estimator may change it, and metrics, weights and the loss are of these columns.
    advantages_bt, returns_bt = settings.estimator(inputs.copy(), settings.advantages)
    require_finite("advantages", advantages_bt)
    columns |= {"advantages": advantages_bt, "returns": returns_bt}
    weights, distance = rollout_weights(columns, settings.correction)
    added = {"advantages": advantages_bt, "returns": returns_bt} | weights
    if masked:
        # Renamed, not dropped: whoever releases the batch releases the mask that was generated too.
        batch = batch.rename("response_mask", "generated_mask")
        added["response_mask"] = columns["response_mask"]
    return batch.union(DataProto.from_dict(tensors=added)), batch_metrics(columns) | distance | metrics


def rollout_weights(
    columns: Mapping[str, Any], correction: RolloutCorrection
) -> tuple[dict[str, Tensor], dict[str, float]]:
    """`rollout_is_weights` [b,t] where they are wanted, and how far rollout was from the policy.

    With `bypass_mode` there is neither: nothing was recomputed that rollout could be compared with.

    Raises:
        NonFiniteLoss: a weight is not finite.
    """
    if correction.bypass_mode:
        return {}, {}
    old_bt, rollout_bt, mask_bt = (
        columns[name] for name in ("old_log_probs", "rollout_log_probs", "response_mask")
    )
    metrics = logprob_difference(rollout_bt, old_bt, mask_bt)
    if correction.rollout_is is None:
        return {}, metrics
    weights = importance_weights(
        old_bt,
        rollout_bt,
        mask_bt,
        level=correction.rollout_is,
        threshold=correction.rollout_is_threshold,
    )
    require_finite("rollout_is_weights", weights.weights_bt)
    return {"rollout_is_weights": weights.weights_bt}, metrics | importance_metrics(weights)


def token_level_rewards(columns: dict[str, Any], settings: StepSettings) -> tuple[Tensor, dict[str, float]]:
    """Scores minus the KL penalty, [b,t], and the penalty's metrics; updates the KL controller.

    A score on a token that is not in the loss (a tool's, say) counts on the last one before it that is.
    """
    mask_bt: Tensor = columns["response_mask"]
    attended_bt = columns["attention_mask"][:, -mask_bt.shape[1] :]
    scores_bt = onto_masked(columns["token_level_scores"], mask_bt, attended_bt)
    if settings.kl is None:
        return scores_bt, {}
    coefficient = settings.kl.value
    penalised = apply_kl_in_reward(
        scores_bt,
        columns["old_log_probs"],
        columns["ref_log_prob"],
        mask_bt,
        coefficient,
        settings.kl_penalty,
    )
    metrics = {"actor/reward_kl_penalty_coeff": coefficient}
    if penalised.rows:  # else no KL was measured, and 0 is not what it is
        mean_kl = metrics["actor/reward_kl_penalty"] = penalised.mean_kl.item()
        settings.kl.update(mean_kl, n_steps=penalised.rows)
    return penalised.rewards_bt, metrics
