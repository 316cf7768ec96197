"""One PPO step on fake groups: who is called when, with what, and what comes of it."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import pytest
import torch

from neoproto.algorithms.kl import AdaptiveKLController, FixedKLController
from neoproto.config import RunConfig, load_config
from neoproto.data import DataProto
from neoproto.data.schema import COLUMNS, STAGES, columns_after
from neoproto.errors import NonFiniteLoss, RewardError
from neoproto.store import MemoryStore
from neoproto.trainer.metrics.phases import PhaseClock
from neoproto.trainer.protocols import Workers
from neoproto.trainer.step import StepSettings, annotate, estimate, kl_controller, learn, ppo_step
from neoproto.trainer.tasks import together
from tests.neoproto.trainer.fakes import GENERATED, FakeHandle, World, prompt_batch

pytestmark = pytest.mark.usefixtures("store")

TIMEOUTS = {"generate": 1.0, "reward": 2.0, "log_prob": 3.0, "values": 4.0, "update": 5.0}
SCORED, SCORES = {"token_level_scores", "acc", "reward_failed"}, {"old_log_probs", "entropys"}


def configured(**algorithm: Any) -> RunConfig:
    return load_config(
        {
            "algorithm": {"whiten_advantages": False} | algorithm,
            "actor_rollout_ref": {"rollout": {"n": 2}},
            "trainer": {"timeouts": TIMEOUTS},
        }
    )


def settings(**algorithm: Any) -> StepSettings:
    return StepSettings.from_config(configured(**algorithm))


def step(world: World, chosen: StepSettings, **groups: bool) -> tuple[DataProto, dict[str, float]]:
    return asyncio.run(ppo_step(world.workers(**groups), prompt_batch(), chosen, PhaseClock()))


def annotated(world: World, **groups: bool) -> DataProto:
    async def run() -> DataProto:
        return await annotate(
            world.workers(**groups), world.generate(prompt_batch()), settings(), PhaseClock()
        )

    return asyncio.run(run())


# -- who is called, when, with what ------------------------------------------------------------------------


def test_generate_then_everything_that_annotates_then_both_updates() -> None:
    world = World()
    step(world, settings(use_kl_in_reward=True), reference=True)
    assert world.order()[0] == "generate_sequences"
    assert set(world.order()[1:5]) == {
        "compute_score", "compute_log_prob", "compute_ref_log_prob", "compute_values",
    }  # fmt: skip
    assert set(world.order()[5:]) == {"update_actor", "update_critic"}


def test_learning_from_samples_made_elsewhere_asks_rollout_for_nothing() -> None:
    world = World()
    elsewhere = world.generate(prompt_batch())
    workers, clock = world.workers(), PhaseClock()
    batch, metrics = asyncio.run(learn(workers, elsewhere, settings(), clock))
    whole, whole_metrics = step(World(), settings())
    assert set(world.order()) == {
        "compute_score", "compute_log_prob", "compute_values", "update_actor", "update_critic",
    }  # fmt: skip
    assert metrics == whole_metrics
    assert set(batch.columns) == set(whole.columns)
    assert "timing_s/gen" not in clock.metrics()


def test_each_call_carries_the_deadline_of_its_kind() -> None:
    world = World()
    step(world, settings(use_kl_in_reward=True), reference=True)
    assert {call.method: call.timeout for call in world.calls} == {
        "generate_sequences": 1.0,
        "compute_score": 2.0,
        "compute_log_prob": 3.0,
        "compute_ref_log_prob": 3.0,
        "compute_values": 4.0,
        "update_actor": 5.0,
        "update_critic": 5.0,
    }


def test_each_call_sees_the_columns_that_are_there_by_then() -> None:
    world = World()
    step(world, settings(use_kl_in_reward=True), reference=True)
    seen = {call.method: call.columns for call in world.calls}
    for name in ("compute_score", "compute_log_prob", "compute_ref_log_prob", "compute_values"):
        assert seen[name] == GENERATED
    everything = GENERATED | SCORED | SCORES | {"ref_log_prob", "values", "bootstrap_values"}
    assert seen["update_actor"] == seen["update_critic"] == everything | {"advantages", "returns"}


def test_the_columns_of_a_default_step_are_those_of_the_table() -> None:
    with_setting = {
        one.name for one in COLUMNS if one.when and one.name != "entropys" and one.writer != "critic"
    }
    batch, _ = step(World(), settings())
    assert set(batch.columns) == columns_after("estimate").keys() - with_setting
    assert set(prompt_batch().columns) == {one.name for one in COLUMNS if STAGES[one.writer] == "prompts"}


def test_without_critic_and_reference_nobody_asks_for_them() -> None:
    world = World()
    step(world, settings(adv_estimator="reinforce_plus_plus"), critic=False)
    assert set(world.order()) == {"generate_sequences", "compute_score", "compute_log_prob", "update_actor"}
    assert world.called("update_actor")[0].columns == GENERATED | SCORED | SCORES | {"advantages", "returns"}


def meeting(workers: Workers, methods: set[str]) -> None:
    """Let the methods answer only once all of them are running."""
    barrier = asyncio.Barrier(len(methods))
    for handle in (workers.reward, workers.actor, workers.critic, workers.reference):
        assert isinstance(handle, FakeHandle)
        group = handle.group
        for name in methods & group.methods.keys():

            async def met(batch: DataProto, answer: Any = group.methods[name]) -> Any:
                await asyncio.wait_for(barrier.wait(), 2.0)
                return answer(batch)

            group.methods[name] = met


@pytest.mark.parametrize(
    "methods",
    [
        {"compute_score", "compute_log_prob", "compute_ref_log_prob", "compute_values"},
        {"update_actor", "update_critic"},
    ],
)
def test_calls_that_need_not_wait_for_each_other_do_not(methods: set[str]) -> None:
    async def run() -> None:
        workers = World().workers(reference=True)
        meeting(workers, methods)
        await ppo_step(workers, prompt_batch(), settings(use_kl_in_reward=True), PhaseClock())

    asyncio.run(run())


def test_metrics_are_the_batchs_and_both_updates() -> None:
    _, metrics = step(World(scores=(1.0, 0.0)), settings())
    assert metrics["actor/pg_loss"] == 0.25
    assert metrics["critic/vf_loss"] == 0.75
    assert metrics["critic/score/mean"] == 0.5
    assert metrics["training/rollout_log_probs_diff_max"] == 0.0


def test_the_phases_of_a_step_are_timed_by_name() -> None:
    clock = PhaseClock()
    workers = World().workers(reference=True)
    asyncio.run(ppo_step(workers, prompt_batch(), settings(use_kl_in_reward=True), clock))
    phases = (
        "gen",
        "reward",
        "old_log_prob",
        "ref",
        "values",
        "adv",
        "update_actor",
        "update_critic",
        "step",
    )
    assert {f"timing_s/{name}" for name in phases} <= clock.metrics().keys()


# -- what a cut response is worth --------------------------------------------------------------------------

CUT = {"lengths": (2, 2), "truncated": (True, False), "scores": (0.0, 1.0), "bootstrap": (5.0, 7.0)}


@pytest.mark.parametrize(
    ("truncated", "first", "second"), [("bootstrap", 5.0, 1.0), ("zero", 0.0, 1.0), ("mask", 0.0, 1.0)]
)
def test_a_cut_response_is_worth_what_the_option_says(truncated: str, first: float, second: float) -> None:
    """No reward, value 0, no discount: its advantage is what comes after the cut. The other row ended."""
    batch, _ = step(World(**CUT), settings(truncated=truncated))
    expected = torch.tensor([[first] * 2, [second] * 2])
    torch.testing.assert_close(batch.batch["advantages"], expected)
    torch.testing.assert_close(batch.batch["returns"], expected)


def test_a_bootstrapped_response_still_trains_and_keeps_its_mask() -> None:
    batch, _ = step(World(**CUT), settings(truncated="bootstrap"))
    assert batch.batch["response_mask"].tolist() == [[1, 1], [1, 1]]
    assert "generated_mask" not in batch


def test_a_masked_response_trains_nothing_and_what_was_generated_stays_on_record() -> None:
    world = World(**CUT)
    batch, metrics = step(world, settings(truncated="mask"))
    assert batch.batch["response_mask"].tolist() == [[0, 0], [1, 1]]
    assert batch.batch["generated_mask"].tolist() == [[1, 1], [1, 1]]
    for call in world.called("update_actor", "update_critic"):
        assert call.read("response_mask").tolist() == [[0, 0], [1, 1]]
    assert metrics["response_length/mean"] == 2.0
    assert metrics["response_length/clip_ratio"] == 0.5


def test_with_mask_and_nothing_cut_the_mask_is_the_generated_one() -> None:
    batch, _ = step(World(lengths=(2, 1)), settings(truncated="mask"))
    assert batch.batch["response_mask"].tolist() == [[1, 1], [1, 0]]
    assert "generated_mask" not in batch


def test_a_masked_response_moves_no_baseline() -> None:
    """Prompt 0 has scores 0, 1 and a cut 100; the two that count are compared with each other alone."""
    world = World(
        n=3, lengths=[1] * 6, truncated=[False, False, True] + [False] * 3, scores=(0, 1, 100, 1, 1, 1)
    )
    chosen = settings(adv_estimator="rloo", truncated="mask")
    batch, _ = step(world, chosen, critic=False)
    assert batch.batch["advantages"][:, 0].tolist() == [-1.0, 1.0, 0.0, 0.0, 0.0, 0.0]


def test_samples_of_one_prompt_are_compared_with_each_other() -> None:
    world = World(n=2, lengths=[1] * 4, truncated=[False] * 4, scores=(0, 1, 10, 30))
    batch, _ = step(world, settings(adv_estimator="rloo"), critic=False)
    assert batch.batch["advantages"][:, 0].tolist() == [-1.0, 1.0, -20.0, 20.0]


# -- scores and the loss mask ------------------------------------------------------------------------------


def scored(scores: list[list[float]], mask: list[list[int]]) -> DataProto:
    """An annotated batch of two tokens a row with these scores, and loss masks."""
    world = World(lengths=(2, 2))
    batch = annotated(world, critic=False)
    batch.batch["response_mask"] = torch.tensor(mask)
    batch.batch["token_level_scores"] = torch.tensor(scores)
    return batch.union(world.ref_log_prob(batch))


def test_a_score_on_a_token_that_is_not_in_the_loss_counts_on_the_last_one_that_is() -> None:
    batch = scored([[0.0, 1.0], [0.5, 0.0]], [[1, 0], [0, 1]])
    found, metrics = estimate(batch, settings(adv_estimator="reinforce_plus_plus"))
    assert found.batch["advantages"].tolist() == [[1.0, 0.0], [0.0, 0.5]]
    assert metrics["critic/rewards/mean"] == metrics["critic/score/mean"] == 0.75


@pytest.mark.parametrize("kl", [False, True])
@pytest.mark.parametrize("score", [math.nan, math.inf])
def test_a_score_that_is_not_finite_on_a_row_out_of_the_loss_is_in_no_metric(score: float, kl: bool) -> None:
    batch = scored([[0.0, score], [0.0, 1.0]], [[0, 0], [1, 1]])
    found, metrics = estimate(batch, settings(adv_estimator="reinforce_plus_plus", use_kl_in_reward=kl))
    assert found.batch["advantages"].tolist() == [[0.0, 0.0], [1.0, 1.0]]
    assert metrics["critic/score/mean"] == metrics["critic/score/max"] == 1.0
    assert all(math.isfinite(value) for value in metrics.values())


def test_a_score_that_is_not_finite_on_a_row_in_the_loss_ends_the_step() -> None:
    batch = scored([[0.0, math.nan], [0.0, 1.0]], [[1, 0], [1, 1]])
    with pytest.raises(NonFiniteLoss, match="advantages has 1 non-finite of 4"):
        estimate(batch, settings(adv_estimator="reinforce_plus_plus"))


# -- the KL penalty in the reward --------------------------------------------------------------------------


def test_the_kl_penalty_comes_off_each_tokens_reward() -> None:
    world = World(lengths=(2, 1), scores=(1.0, 0.0), old=-1.0, ref=-1.5)
    chosen = settings(use_kl_in_reward=True, kl_ctrl={"type": "fixed", "kl_coef": 0.1})
    batch, metrics = step(world, chosen, reference=True)
    # KL per token 0.5, so 0.05 off each: row 0 earns -0.05 then 0.95, row 1 only -0.05.
    torch.testing.assert_close(batch.batch["advantages"], torch.tensor([[0.90, 0.95], [-0.05, 0.0]]))
    assert metrics["critic/rewards/mean"] == pytest.approx((0.90 - 0.05) / 2)
    assert metrics["critic/score/mean"] == 0.5
    assert metrics["actor/reward_kl_penalty"] == pytest.approx(0.5)
    assert metrics["actor/reward_kl_penalty_coeff"] == 0.1
    assert chosen.kl is not None
    assert chosen.kl.value == 0.1


def test_the_adaptive_coefficient_moves_after_the_step_that_used_it() -> None:
    world = World(old=-1.0, ref=-1.5)
    adaptive = {"type": "adaptive", "kl_coef": 0.1, "target_kl": 0.25, "horizon": 100}
    chosen = settings(use_kl_in_reward=True, kl_ctrl=adaptive)
    used = [step(world, chosen, reference=True)[1]["actor/reward_kl_penalty_coeff"] for _ in range(2)]
    # KL 0.5 is twice the target: the error is clipped to 0.2, on 2 samples of a horizon of 100.
    assert used == [0.1, pytest.approx(0.1 * (1 + 0.2 * 2 / 100))]


def adapting(**algorithm: Any) -> StepSettings:
    adaptive = {"type": "adaptive", "kl_coef": 0.1, "target_kl": 0.25, "horizon": 100}
    return settings(use_kl_in_reward=True, kl_ctrl=adaptive, truncated="mask", **algorithm)


@pytest.mark.parametrize(("ref", "error"), [(-1.25, 0.0), (-1.3, 0.2), (-1.275, 0.1), (-1.0, -0.2)])
@pytest.mark.parametrize("lengths", [(2, 2), (2, 1), (1, 1)])
def test_the_target_is_in_nats_per_token_however_long_responses_are(
    lengths: tuple[int, int], ref: float, error: float
) -> None:
    chosen = adapting()
    step(World(lengths=lengths, old=-1.0, ref=ref), chosen, reference=True)
    assert chosen.kl is not None
    assert chosen.kl.value == pytest.approx(0.1 * (1 + error * 2 / 100), rel=1e-6)


def test_rows_that_are_left_out_of_the_loss_do_not_move_the_coefficient() -> None:
    """Six samples, of which two are trained on: the coefficient moves as if there were two."""
    chosen, cut = adapting(adv_estimator="grpo"), [True, True, False, False, True, True]
    world = World(n=3, lengths=[2] * 6, truncated=cut, scores=[1.0] * 6, ref=-1.5)
    _, metrics = step(world, chosen, critic=False, reference=True)
    assert metrics["actor/reward_kl_penalty"] == pytest.approx(0.5)
    assert chosen.kl is not None
    assert chosen.kl.value == pytest.approx(0.1 * (1 + 0.2 * 2 / 100), rel=1e-6)


def test_where_no_kl_was_measured_the_coefficient_stays_and_none_is_reported() -> None:
    chosen = adapting()
    world = World(lengths=(2, 2), truncated=(True, True), ref=-1.5)
    _, metrics = step(world, chosen, reference=True)
    assert chosen.kl is not None
    assert chosen.kl.value == metrics["actor/reward_kl_penalty_coeff"] == 0.1
    assert "actor/reward_kl_penalty" not in metrics


@pytest.mark.parametrize(
    ("algorithm", "kind"),
    [
        ({}, type(None)),
        ({"use_kl_in_reward": True}, FixedKLController),
        ({"use_kl_in_reward": True, "kl_ctrl": {"type": "adaptive"}}, AdaptiveKLController),
    ],
)
def test_the_controller_is_the_configured_one(algorithm: dict[str, Any], kind: type) -> None:
    controller = kl_controller(configured(**algorithm))
    assert type(controller) is kind


def test_settings_carry_every_option_of_the_estimators() -> None:
    chosen = settings(
        adv_estimator="grpo",
        gamma=0.5,
        lam=0.25,
        norm_adv_by_std_in_grpo=False,
        truncated="zero",
        kl_penalty="k3",
    )
    assert (chosen.truncated, chosen.kl_penalty) == ("zero", "k3")
    options = chosen.advantages
    assert (options.gamma, options.lam, options.norm_by_std, options.whiten) == (0.5, 0.25, False, False)


# -- samples of another policy -----------------------------------------------------------------------------

BYPASS = {"rollout_correction": {"bypass_mode": True}}
DISTANCE = {
    "training/rollout_probs_diff_mean", "training/rollout_probs_diff_max", "training/rollout_probs_diff_std",
    "training/rollout_log_probs_diff_mean", "training/rollout_log_probs_diff_max",
    "rollout_corr/kl", "rollout_corr/k3_kl",
}  # fmt: skip
WEIGHTS = {f"training/rollout_is/{name}" for name in ("mean", "max", "min", "clipfrac", "ess")}


def weighing(level: str, threshold: float = 2.0) -> StepSettings:
    return settings(rollout_correction={"rollout_is": level, "rollout_is_threshold": threshold})


def test_without_correction_the_distance_is_reported_and_nothing_is_weighed() -> None:
    world = World(old=-1.0, rollout=-1.5)
    batch, metrics = step(world, settings())
    assert "rollout_is_weights" not in batch
    assert metrics.keys() >= DISTANCE
    assert not metrics.keys() & WEIGHTS
    assert metrics["rollout_corr/kl"] == pytest.approx(-0.5)


@pytest.mark.parametrize(("level", "weights"), [("token", [0.5, 0.5]), ("sequence", [0.25, 0.5])])
def test_weights_are_old_over_rollout_of_a_token_or_of_the_whole_response(
    level: str, weights: list[float]
) -> None:
    """Each token is half as likely as it was at sampling; the rows have 2 and 1 of them."""
    world = World(lengths=(2, 1), old=-1.0 - math.log(2), rollout=-1.0)
    batch, metrics = step(world, weighing(level))
    expected = torch.tensor([[weights[0]] * 2, [weights[1], 0.0]])
    torch.testing.assert_close(batch.batch["rollout_is_weights"], expected)
    for call in world.called("update_actor"):
        torch.testing.assert_close(call.read("rollout_is_weights"), expected)
    assert metrics.keys() >= DISTANCE | WEIGHTS
    assert metrics["training/rollout_is/max"] == pytest.approx(0.5)
    assert metrics["training/rollout_is/min"] == pytest.approx(min(weights))
    assert metrics["training/rollout_is/clipfrac"] == 0.0


def test_weights_are_cut_down_to_the_threshold() -> None:
    world = World(old=-1.0, rollout=-1.0 - math.log(3))
    batch, metrics = step(world, weighing("token", threshold=1.5))
    torch.testing.assert_close(batch.batch["rollout_is_weights"], torch.tensor([[1.5, 1.5], [1.5, 0.0]]))
    assert metrics["training/rollout_is/clipfrac"] == 1.0
    assert metrics["training/rollout_is/ess"] == pytest.approx(1.0)


def test_a_masked_response_has_no_weight_and_is_in_no_figure() -> None:
    world = World(**CUT, old=-1.0, rollout=-1.5)
    chosen = settings(truncated="mask", rollout_correction={"rollout_is": "sequence"})
    batch, metrics = step(world, chosen)
    torch.testing.assert_close(batch.batch["rollout_is_weights"], torch.tensor([[0.0, 0.0], [2.0, 2.0]]))
    assert metrics["training/rollout_is/min"] == 2.0


def test_with_bypass_mode_the_policy_is_not_asked_and_rollouts_log_probs_are_the_old_ones() -> None:
    world = World(old=-1.0, rollout=-1.5)
    batch, metrics = step(world, settings(**BYPASS))
    assert not world.called("compute_log_prob")
    expected = torch.tensor([[-1.5, -1.5], [-1.5, 0.0]])
    assert torch.equal(world.called("update_actor")[0].read("old_log_probs"), expected)
    assert torch.equal(batch.batch["rollout_log_probs"], expected)
    assert not metrics.keys() & (DISTANCE | WEIGHTS)
    assert "rollout_is_weights" not in batch


def test_with_bypass_mode_the_kl_penalty_is_that_of_the_policy_that_sampled() -> None:
    world = World(old=-1.0, rollout=-1.25, ref=-1.5)
    _, metrics = step(world, settings(use_kl_in_reward=True, **BYPASS), reference=True)
    assert metrics["actor/reward_kl_penalty"] == pytest.approx(0.25)


def test_the_second_name_of_rollouts_log_probs_costs_no_bytes(store: MemoryStore) -> None:
    async def run() -> DataProto:
        world = World()
        return await annotate(
            world.workers(), world.generate(prompt_batch()), settings(**BYPASS), PhaseClock()
        )

    columns = asyncio.run(run()).columns
    assert columns["old_log_probs"].refs == columns["rollout_log_probs"].refs


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_a_weight_that_is_not_finite_stops_before_any_update(level: str) -> None:
    world = World(rollout=math.nan)
    with pytest.raises(NonFiniteLoss, match="rollout_is_weights"):
        step(world, weighing(level))
    assert not world.called("update_actor", "update_critic")


def test_settings_carry_every_option_of_the_correction() -> None:
    chosen = weighing("sequence", threshold=3.0).correction
    assert (chosen.rollout_is, chosen.rollout_is_threshold, chosen.bypass_mode) == ("sequence", 3.0, False)
    assert settings(**BYPASS).correction.bypass_mode


# -- what goes wrong ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_an_advantage_that_is_not_finite_stops_before_any_update(bad: float) -> None:
    world = World(scores=(bad, 0.0))
    with pytest.raises(NonFiniteLoss, match="advantages"):
        step(world, settings())
    assert not world.called("update_actor", "update_critic")


def test_a_kl_that_is_not_finite_stops_before_any_update() -> None:
    world = World(ref=math.nan)
    with pytest.raises(NonFiniteLoss):
        step(world, settings(use_kl_in_reward=True), reference=True)
    assert not world.called("update_actor", "update_critic")


def test_the_first_failure_is_raised_as_itself_and_the_other_waits_end() -> None:
    ended: list[str] = []

    async def run() -> None:
        workers = World().workers()
        assert isinstance(workers.actor, FakeHandle)
        assert isinstance(workers.reward, FakeHandle)

        async def never(_: DataProto) -> None:
            try:
                await asyncio.sleep(60)
            finally:
                ended.append("old_log_prob")

        async def fail(_: DataProto) -> None:
            await asyncio.sleep(0.01)
            raise RewardError("sample u1: no score")

        workers.actor.group.methods["compute_log_prob"] = never
        workers.reward.group.methods["compute_score"] = fail
        await asyncio.wait_for(ppo_step(workers, prompt_batch(), settings(), PhaseClock()), 5.0)

    with pytest.raises(RewardError, match="sample u1: no score"):
        asyncio.run(run())
    assert ended == ["old_log_prob"]


def test_together_keeps_the_order_of_what_it_was_given() -> None:
    async def after(seconds: float) -> float:
        await asyncio.sleep(seconds)
        return seconds

    async def run() -> list[float]:
        return await together(after(0.02), after(0.0), after(0.01))

    assert asyncio.run(run()) == [0.02, 0.0, 0.01]


def test_of_two_failures_the_earlier_one_is_raised() -> None:
    async def fail(seconds: float, text: str) -> None:
        await asyncio.sleep(seconds)
        raise ValueError(text)

    async def run() -> None:
        await together(fail(0.05, "later"), fail(0.0, "earlier"))

    with pytest.raises(ValueError, match="earlier"):
        asyncio.run(run())


# -- references --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {"truncated": "bootstrap"},
        {"truncated": "mask", "rollout_correction": {"rollout_is": "token"}},
        BYPASS,
    ],
)
def test_releasing_batch_and_prompts_leaves_nothing_in_the_store(
    store: MemoryStore, options: dict[str, Any]
) -> None:
    world = World(**CUT)
    prompts = prompt_batch()
    batch, _ = asyncio.run(ppo_step(world.workers(), prompts, settings(**options), PhaseClock()))
    assert store.keys()
    batch.release()
    prompts.release()
    assert store.keys() == []


def test_the_controller_reads_numbers_and_no_token_ids(store: MemoryStore) -> None:
    """Token ids stay in the store: `estimate` reads the masks, scores and log-probs it computes with."""
    batch = annotated(World())
    before = store.bytes_out
    estimate(batch, settings())
    columns = batch.columns
    read = [
        "response_mask", "attention_mask", "truncated", "token_level_scores", "rollout_log_probs",
        "old_log_probs", "uid", "values", "bootstrap_values", "reward_failed",
    ]  # fmt: skip
    assert store.bytes_out - before == sum(ref.info.nbytes for name in read for ref in columns[name].refs)
