"""Options of `algorithm` and `reward`: what a response is worth."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from neoproto.algorithms.estimators import ESTIMATORS
from neoproto.algorithms.names import KLName, RolloutISLevel
from neoproto.config.base import Count, Fraction, NonNegative, Plain, Positive, Seconds, Section, Share
from neoproto.config.verl import kl_name
from neoproto.rewards.builtin import REWARDS

CUSTOM = "custom"
"""The estimator that is a function of the user's."""

if TYPE_CHECKING:
    EstimatorName = str
    RewardName = str
else:
    EstimatorName = Literal[(*ESTIMATORS, CUSTOM)]
    RewardName = Literal[("auto", *REWARDS)]


def _readers(option: str) -> str:
    """The estimators that read this field of `AdvantageOptions`."""
    return ", ".join(name for name, estimator in ESTIMATORS.items() if option in estimator.options)


class KlCtrlConfig(Section):
    """Weight of the KL penalty in the reward."""

    type: Literal["fixed", "adaptive"] = "fixed"
    """adaptive = moved towards `target_kl` after each step (Ziegler et al. 2019, section 2.2)."""
    kl_coef: NonNegative = 0.001
    """The weight, or where the adaptive one starts."""
    target_kl: Positive = 0.1
    """adaptive: the KL to hold, in nats per token: the mean over a response's tokens, then over the responses
    that are in the loss (verl's meaning; the paper's is the sum over a response)."""
    horizon: Count = 10000
    """adaptive: samples over which the weight may grow or fall by a fifth, roughly."""


class RolloutCorrectionConfig(Section):
    """Samples of another policy (older weights, other numerics) than an update starts from.

    Their log-probs are recomputed with the policy as the step finds it, and PPO's ratio is taken against
    those (decoupled PPO), unless `bypass_mode` is on.
    """

    rollout_is: RolloutISLevel | None = None
    """Weigh the policy loss by old / rollout probability: per token, or one product per response; null = no
    weights."""
    rollout_is_threshold: Annotated[float, Field(ge=1)] = 2.0
    """Weights above this are cut down to it."""
    bypass_mode: bool = False
    """Take PPO's ratio against the probabilities recorded at sampling and recompute none; needs
    rollout_is=null, as the ratio is the correction then."""


class AdvantageFunctionConfig(Section):
    """An advantage estimator of the user's, for `adv_estimator=custom`."""

    path: Plain | None = None
    """Python file."""
    name: Annotated[str, Field(min_length=1)] = "compute_advantages"
    """The function in it: of the batch and the estimators' options, as the built-in ones."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Further keyword arguments of the function, handed over as they are."""


class AlgorithmConfig(Section):
    """Advantages and rewards."""

    adv_estimator: EstimatorName = Field(
        default="gae",
        description=f"{ESTIMATORS.help}; {CUSTOM} = a function of yours, `custom_advantage_function`, with a "
        "critic if `critic.enable` is true.",
    )
    custom_advantage_function: AdvantageFunctionConfig = AdvantageFunctionConfig()
    """Used with adv_estimator=custom."""
    gamma: Fraction = Field(default=1.0, description=f"{_readers('gamma')}: discount per token.")
    lam: Fraction = Field(default=1.0, description=f"{_readers('lam')}: GAE's lambda.")
    norm_adv_by_std_in_grpo: bool = Field(
        default=True,
        description=f"{_readers('norm_by_std')}: divide by the group's standard deviation "
        "(false = Dr. GRPO).",
    )
    whiten_advantages: bool = Field(
        default=True,
        description=f"{_readers('whiten')}: shift and scale the batch's advantages to mean 0 and "
        "deviation 1.",
    )
    truncated: Literal["bootstrap", "zero", "mask"] = "zero"
    """A response cut at the length limit: bootstrap = its future is worth the critic's value of the state
    after the last token (with a critic only); zero = it is worth nothing; mask = the row is left out of every
    loss."""
    use_kl_in_reward: bool = False
    """Subtract a KL penalty to the reference model from each token's reward."""
    kl_penalty: Annotated[KLName, BeforeValidator(kl_name)] = "k1"
    """Estimator of that penalty; verl's names kl, mse and low_var_kl stand for k1, k2 and k3."""
    kl_ctrl: KlCtrlConfig = KlCtrlConfig()
    """Weight of that penalty."""
    rollout_correction: RolloutCorrectionConfig = RolloutCorrectionConfig()
    """Samples of another policy than the one an update starts from."""


class RewardFunctionConfig(Section):
    """A reward function of the user's."""

    path: Plain | None = None
    """Python file; null = one of the built-in rewards."""
    name: Annotated[str, Field(min_length=1)] = "compute_score"
    """The function in it, plain or async."""


class RewardConfig(Section):
    """How a response is scored, in processes beside the controller unless the topology has a reward model."""

    name: RewardName = Field(
        default="auto",
        description="auto = by the row's style and data_source; the others are used for every row: "
        f"{REWARDS.help}.",
    )
    custom_reward_function: RewardFunctionConfig = RewardFunctionConfig()
    """Used for every row when it has a path."""
    timeout_s: Seconds = 10.0
    """Seconds one answer may take; one that takes longer scores 0 and is counted."""
    num_processes: Count = 2
    """Processes that judge with plain functions and with tasks' own verifiers; started as they are needed."""
    max_concurrency: Count = 64
    """Calls of an `async` reward function in flight at once."""
    max_failed_share: Share = 0.5
    """Answers that the judge fails on, or takes too long over, score 0; more of them than this share of a
    call end the run."""
