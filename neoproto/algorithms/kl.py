"""KL penalties: estimators per token, the penalty in the reward, and its coefficient.

Estimators: J. Schulman, "Approximating KL divergence" (2020), of KL(policy || reference) from samples of
the policy. Coefficient: Ziegler et al., arXiv 1909.08593, section 2.2.

Shapes: b = rows, t = response tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

from neoproto.algorithms.checks import require_finite
from neoproto.algorithms.masking import fill_masked, masked_mean, require_same_shape, sequence_lengths
from neoproto.algorithms.names import KL_NAMES

K3_LOG_RATIO_LIMIT = 20.0
K3_LIMIT = 10.0
"""k3 clamps its log-ratio to +-20 and its result to +-10, as verl does: one token must not own the batch."""


def kl_estimate(
    log_probs_bt: torch.Tensor, ref_log_probs_bt: torch.Tensor, mask_bt: torch.Tensor, kind: str
) -> torch.Tensor:
    """A KL(policy || reference) estimate per token; with d = logp - ref:

        k1: d                    unbiased, can be negative; as a loss its expected gradient is 0
        abs: |d|
        k2: d^2 / 2              biased, never negative
        k3: exp(-d) - 1 + d      unbiased, never negative; clamped, see `K3_LIMIT`

    Args:
        log_probs_bt, ref_log_probs_bt: float [B, T]; differentiable in both.
        mask_bt: int64 or bool [B, T].
        kind: one of `KL_NAMES`.

    Returns:
        float [B, T], nats, 0 outside the mask.

    Raises:
        ValueError: unknown kind, or shapes that differ.
    """
    require_same_shape(log_probs_bt=log_probs_bt, ref_log_probs_bt=ref_log_probs_bt)
    difference_bt = fill_masked(log_probs_bt - ref_log_probs_bt, mask_bt)
    match kind:
        case "k1":
            return difference_bt
        case "abs":
            return difference_bt.abs()
        case "k2":
            return 0.5 * difference_bt.square()
        case "k3":
            log_ratio_bt = (-difference_bt).clamp(-K3_LOG_RATIO_LIMIT, K3_LOG_RATIO_LIMIT)
            # expm1: exp(x) - 1 - x would lose all digits for the small x of a fresh policy.
            return (torch.expm1(log_ratio_bt) - log_ratio_bt).clamp(-K3_LIMIT, K3_LIMIT)
        case _:
            raise ValueError(f"kl type must be one of {', '.join(KL_NAMES)}, got {kind!r}")


@dataclass(frozen=True, kw_only=True, slots=True)
class KLReward:
    """Attributes:
    rewards_bt: float [B, T], scores minus the penalty, 0 outside the mask.
    mean_kl: float scalar, nats per token: mean over rows of the row's mean over its tokens (what the
        controller is given). Rows with an empty mask are left out; 0 if all are.
    rows: the rows that it is the mean of.
    """

    rewards_bt: torch.Tensor
    mean_kl: torch.Tensor
    rows: int


@torch.no_grad()
def apply_kl_in_reward(
    scores_bt: torch.Tensor,
    log_probs_bt: torch.Tensor,
    ref_log_probs_bt: torch.Tensor,
    mask_bt: torch.Tensor,
    coefficient: float,
    kind: str,
) -> KLReward:
    """r_t = score_t - coefficient * KL_t (Ziegler et al., arXiv 1909.08593, eq. 2).

    Args:
        scores_bt, log_probs_bt, ref_log_probs_bt: float [B, T]. The log-probs are those of the policy that
            generated the tokens (old_log_probs).
        mask_bt: int64 or bool [B, T].
        coefficient: beta >= 0, see the controllers.
        kind: one of `KL_NAMES`.
    """
    require_same_shape(scores_bt=scores_bt, log_probs_bt=log_probs_bt, mask_bt=mask_bt)
    kl_bt = kl_estimate(log_probs_bt, ref_log_probs_bt, mask_bt, kind)
    rows = int((sequence_lengths(mask_bt) > 0).sum())
    return KLReward(
        rewards_bt=fill_masked(scores_bt - coefficient * kl_bt, mask_bt),
        mean_kl=masked_mean(kl_bt, mask_bt, dim=-1).sum() / max(rows, 1),
        rows=rows,
    )


class KLController(Protocol):
    """Holds the coefficient of the KL penalty; `update` is called once a step, after it was used."""

    @property
    def value(self) -> float: ...

    def update(self, current_kl: float, n_steps: int) -> None: ...

    def state_dict(self) -> dict[str, float]: ...

    def load_state_dict(self, state: Mapping[str, float]) -> None: ...


class FixedKLController:
    """A coefficient that stays as configured; a checkpoint does not change it."""

    def __init__(self, kl_coef: float) -> None:
        self._value = _coefficient(kl_coef)

    @property
    def value(self) -> float:
        return self._value

    def update(self, current_kl: float, n_steps: int) -> None:
        """Nothing to adapt; a KL that is not finite is refused here as well (`NonFiniteLoss`)."""
        require_finite("kl", current_kl)

    def state_dict(self) -> dict[str, float]:
        return {}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Accepts what `state_dict` gave; raises `ValueError` on anything else."""
        if state:
            raise ValueError(f"a fixed KL coefficient has no state, got {sorted(state)}")


class AdaptiveKLController:
    """A coefficient that moves until the KL is `target_kl` (Ziegler et al., arXiv 1909.08593, section 2.2).

        e = clip(KL / target - 1, -0.2, 0.2);   beta <- beta (1 + e n / horizon)

    The KL is a mean per token, as verl's controller has it; the paper's is the sum over a response, which is
    longer by the number of tokens. n counts the samples that the KL was measured on; verl's counts those
    left out of the loss too, with a KL of 0.

    Args:
        init_kl_coef: beta at the start, >= 0.
        target_kl: nats per token, > 0.
        horizon: in samples, > 0.
    """

    def __init__(self, init_kl_coef: float, target_kl: float, horizon: int) -> None:
        if not target_kl > 0.0:
            raise ValueError(f"target_kl must be > 0, got {target_kl}")
        if not horizon > 0:
            raise ValueError(f"horizon must be > 0, got {horizon}")
        self._value, self._target, self._horizon = _coefficient(init_kl_coef), target_kl, horizon

    @property
    def value(self) -> float:
        return self._value

    def update(self, current_kl: float, n_steps: int) -> None:
        """Move the coefficient.

        Args:
            current_kl: mean KL of the step, nats per token.
            n_steps: samples it was measured on, 0 moves nothing; under 5 horizons, or beta could turn
                negative.

        Raises:
            NonFiniteLoss: current_kl is NaN or infinite; the coefficient is unchanged.
            ValueError: n_steps is not in [0, 5 horizon).
        """
        require_finite("kl", current_kl)
        if not 0 <= n_steps < 5 * self._horizon:
            raise ValueError(f"n_steps must be in [0, 5 * horizon = {5 * self._horizon}), got {n_steps}")
        error = min(max(current_kl / self._target - 1.0, -0.2), 0.2)
        self._value *= 1.0 + error * n_steps / self._horizon

    def state_dict(self) -> dict[str, float]:
        return {"value": self._value}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Continue with a saved coefficient; target and horizon are the config's."""
        if set(state) != {"value"}:
            raise ValueError(f"an adaptive KL coefficient's state is 'value', got {sorted(state)}")
        self._value = _coefficient(state["value"])


def _coefficient(value: float) -> float:
    require_finite("kl_coef", value)
    if value < 0.0:
        raise ValueError(f"kl_coef must be >= 0, got {value}")
    return float(value)
