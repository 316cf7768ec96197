"""Advantage estimators: GAE, GRPO, RLOO, REINFORCE++.

All of them read a reward per token and return (advantages, returns), float [B, T], 0 outside the mask. A
row whose mask is all zero (a rejected sample) gets zeros and moves nobody else's numbers. Tokens that the
policy did not generate inside a response (mask 0 between two turns) are stepped over: the next generated
token follows the last one directly, and a reward on a skipped token is not seen.

Shapes: b = rows, t = response tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

import torch

from neoproto.algorithms.masking import (
    fill_masked,
    masked_sum,
    masked_whiten,
    require_same_shape,
    sequence_lengths,
)

AdvantageKind = Literal["gae", "grpo", "rloo", "reinforce_plus_plus"]
ADVANTAGE_KINDS: tuple[str, ...] = get_args(AdvantageKind)

Estimate = tuple[torch.Tensor, torch.Tensor]
"""(advantages_bt, returns_bt)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AdvantageOptions:
    """What the estimators can be told; each reads its own.

    Attributes:
        gamma: discount per token (gae, reinforce_plus_plus).
        lam: GAE's lambda (gae).
        norm_by_std: divide by the group's standard deviation (grpo); False is Dr. GRPO.
        epsilon: added to that standard deviation (grpo).
        whiten: mean 0, variance 1 over all tokens of the batch (gae, reinforce_plus_plus).
    """

    gamma: float = 1.0
    lam: float = 1.0
    norm_by_std: bool = True
    epsilon: float = 1e-6
    whiten: bool = True

    def __post_init__(self) -> None:
        for name in ("gamma", "lam"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise ValueError(f"{name} must be in [0, 1], got {getattr(self, name)}")
        if not self.epsilon > 0.0:
            raise ValueError(f"epsilon must be > 0, got {self.epsilon}")


@dataclass(frozen=True, kw_only=True, slots=True)
class AdvantageInputs:
    """What the estimators read of a whole batch (never of a micro-batch: groups and whitening span it).

    Attributes:
        rewards_bt: float [B, T], token-level rewards.
        mask_bt: int64 or bool [B, T].
        values_bt: float [B, T], the critic's values (gae).
        bootstrap_values_b: float [B], the critic's value after the last response token (gae).
        truncated_b: bool [B], the response hit the length limit (gae).
        group_ids_b: int64 [B], equal for the samples of one prompt (grpo, rloo).
    """

    rewards_bt: torch.Tensor
    mask_bt: torch.Tensor
    values_bt: torch.Tensor | None = None
    bootstrap_values_b: torch.Tensor | None = None
    truncated_b: torch.Tensor | None = None
    group_ids_b: torch.Tensor | None = None

    def copy(self) -> AdvantageInputs:
        """The same numbers in memory of their own, for an estimator that may change what it gets."""
        own: dict[str, Any] = {field.name: getattr(self, field.name) for field in fields(self)}
        own |= {name: tensor.clone() for name, tensor in own.items() if tensor is not None}
        return AdvantageInputs(**own)

    def required(self, kind: str, name: str) -> torch.Tensor:
        """The named tensor; raises `ValueError` naming the estimator if it was not given."""
        tensor: torch.Tensor | None = getattr(self, name)
        if tensor is None:
            raise ValueError(f"advantage estimator {kind!r} needs {name}")
        return tensor


def compute_advantages(kind: str, inputs: AdvantageInputs, options: AdvantageOptions) -> Estimate:
    """(advantages_bt, returns_bt) by the estimator called `kind`, one of `ADVANTAGE_KINDS`.

    Raises:
        ValueError: unknown kind, a tensor the estimator needs is missing, shapes that differ.
    """
    try:
        estimator = _ESTIMATORS[kind]
    except KeyError:
        raise ValueError(f"adv_estimator must be one of {', '.join(ADVANTAGE_KINDS)}, got {kind!r}") from None
    return estimator(inputs, options)


@torch.no_grad()
def gae(
    rewards_bt: torch.Tensor,
    values_bt: torch.Tensor,
    mask_bt: torch.Tensor,
    gamma: float,
    lam: float,
    bootstrap_values_b: torch.Tensor,
    truncated_b: torch.Tensor,
) -> Estimate:
    """Generalised advantage estimation (Schulman et al., arXiv 1506.02438, eq. 11-16).

        delta_t = r_t + gamma V_{t+1} - V_t;   A_t = delta_t + gamma lam A_{t+1};   R_t = A_t + V_t

    A finished response ends in a terminal state: V after its last token is 0. A truncated one was cut off
    in the middle: V after its last token is what the critic says about the state reached,
    `bootstrap_values_b`, and A there is 0. Nothing is whitened here.

    Args:
        rewards_bt, values_bt: float [B, T].
        mask_bt: [B, T].
        bootstrap_values_b: float [B]; read for truncated rows only.
        truncated_b: bool [B].
    """
    require_same_shape(rewards_bt=rewards_bt, values_bt=values_bt, mask_bt=mask_bt)
    require_same_shape(
        bootstrap_values_b=bootstrap_values_b, truncated_b=truncated_b, rows_b=mask_bt.any(dim=1)
    )
    generated_bt = mask_bt != 0
    next_value_b = torch.where(truncated_b, bootstrap_values_b.to(values_bt.dtype), 0.0)
    advantage_b = torch.zeros_like(next_value_b)
    advantages_bt = torch.zeros_like(values_bt)
    for t in reversed(range(values_bt.shape[1])):
        here_b, value_b = generated_bt[:, t], values_bt[:, t]
        delta_b = rewards_bt[:, t] + gamma * next_value_b - value_b
        advantage_b = torch.where(here_b, delta_b + gamma * lam * advantage_b, advantage_b)
        next_value_b = torch.where(here_b, value_b, next_value_b)
        advantages_bt[:, t] = advantage_b
    return fill_masked(advantages_bt, mask_bt), fill_masked(advantages_bt + values_bt, mask_bt)


@torch.no_grad()
def grpo(
    rewards_bt: torch.Tensor,
    mask_bt: torch.Tensor,
    group_ids_b: torch.Tensor,
    norm_by_std: bool = True,
    epsilon: float = 1e-6,
) -> Estimate:
    """Group-relative advantages (GRPO, arXiv 2402.03300, section 4.1.2), the same for all tokens of a row.

        A_i = (s_i - mean_group s) / (std_group s + epsilon),   s_i = sum_t r_{i,t}

    std is the unbiased one. `norm_by_std=False` leaves the division out (Dr. GRPO, arXiv 2503.20783). Rows
    with an empty mask are in no group; a row alone in its group has nothing to be compared with: A = 0.
    Statistics are taken in float64, or the rounding of the mean of equal scores, divided by epsilon, would
    pass for an advantage.

    Args:
        rewards_bt: float [B, T].
        mask_bt: [B, T].
        group_ids_b: int64 [B], any values, equal within a group.
    """
    groups = _GroupScores.of(rewards_bt, mask_bt, group_ids_b)
    centred_b = groups.scores_b - groups.mean_b()
    if norm_by_std:
        variance_b = groups.sum(centred_b.square()) / (groups.size_b - 1).clamp(min=1)
        centred_b = centred_b / (variance_b.sqrt() + epsilon)
    return _spread(torch.where(groups.size_b > 1, centred_b, 0.0), rewards_bt, mask_bt)


@torch.no_grad()
def rloo(rewards_bt: torch.Tensor, mask_bt: torch.Tensor, group_ids_b: torch.Tensor) -> Estimate:
    """REINFORCE leave-one-out (Ahmadian et al., arXiv 2402.14740), the same for all tokens of a row.

        A_i = s_i - mean_{j != i in group} s_j,   s_i = sum_t r_{i,t}

    Rows with an empty mask are in no group; a row alone in its group has no baseline: A = 0.

    Args:
        rewards_bt: float [B, T].
        mask_bt: [B, T].
        group_ids_b: int64 [B], any values, equal within a group.
    """
    groups = _GroupScores.of(rewards_bt, mask_bt, group_ids_b)
    # s_i - (n mean - s_i) / (n - 1) = (s_i - mean) n / (n - 1)
    scale_b = groups.size_b / (groups.size_b - 1).clamp(min=1)
    advantages_b = (groups.scores_b - groups.mean_b()) * scale_b
    return _spread(torch.where(groups.size_b > 1, advantages_b, 0.0), rewards_bt, mask_bt)


@torch.no_grad()
def reinforce_plus_plus(
    rewards_bt: torch.Tensor, mask_bt: torch.Tensor, gamma: float = 1.0, whiten: bool = True
) -> Estimate:
    """REINFORCE++ (arXiv 2501.03262): discounted returns, normalised over all tokens of the batch.

        R_t = r_t + gamma R_{t+1};   A_t = (R_t - mean R) / std R

    There is no critic, hence no bootstrap: what a truncated response would still have earned counts as 0.

    Args:
        rewards_bt: float [B, T].
        mask_bt: [B, T].
        whiten: False returns A = R.
    """
    require_same_shape(rewards_bt=rewards_bt, mask_bt=mask_bt)
    generated_bt = mask_bt != 0
    return_b = torch.zeros_like(rewards_bt[:, :1]).sum(dim=1)
    returns_bt = torch.zeros_like(rewards_bt)
    for t in reversed(range(rewards_bt.shape[1])):
        return_b = torch.where(generated_bt[:, t], rewards_bt[:, t] + gamma * return_b, return_b)
        returns_bt[:, t] = return_b
    returns_bt = fill_masked(returns_bt, mask_bt)
    return (masked_whiten(returns_bt, mask_bt) if whiten else returns_bt.clone()), returns_bt


def group_ids_from_uids(uids: Sequence[Hashable]) -> torch.Tensor:
    """int64 [B]: the same number for the same uid, numbered in order of first appearance."""
    numbers: dict[Hashable, int] = {}
    return torch.tensor([numbers.setdefault(uid, len(numbers)) for uid in uids], dtype=torch.int64)


@dataclass(frozen=True, kw_only=True, slots=True)
class _GroupScores:
    """Row scores in float64 and, per row, its group; rows with an empty mask weigh nothing.

    Attributes:
        scores_b: float64 [B], 0 on rejected rows.
        counted_b: bool [B], the row has tokens.
        index_b: int64 [B], groups numbered from 0.
        size_b: float64 [B], counted rows in the row's group.
    """

    scores_b: torch.Tensor
    counted_b: torch.Tensor
    index_b: torch.Tensor
    size_b: torch.Tensor

    @classmethod
    def of(cls, rewards_bt: torch.Tensor, mask_bt: torch.Tensor, group_ids_b: torch.Tensor) -> _GroupScores:
        if group_ids_b.shape != mask_bt.shape[:1] or group_ids_b.dtype != torch.int64:
            raise ValueError(
                f"group_ids_b must be int64 [{mask_bt.shape[0]}], "
                f"got {group_ids_b.dtype} {list(group_ids_b.shape)}"
            )
        counted_b = sequence_lengths(mask_bt) > 0
        scores_b = masked_sum(rewards_bt.double(), mask_bt, dim=-1)
        _, index_b = torch.unique(group_ids_b, return_inverse=True)
        size_b = _group_sum(counted_b.double(), index_b)
        return cls(scores_b=scores_b, counted_b=counted_b, index_b=index_b, size_b=size_b)

    def sum(self, values_b: torch.Tensor) -> torch.Tensor:
        """[B]: for each row, the sum of `values_b` over the counted rows of its group."""
        return _group_sum(torch.where(self.counted_b, values_b, 0.0), self.index_b)

    def mean_b(self) -> torch.Tensor:
        """[B]: the mean score of the counted rows of each row's group."""
        return self.sum(self.scores_b) / self.size_b.clamp(min=1)


def _group_sum(values_b: torch.Tensor, index_b: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(values_b).index_add_(0, index_b, values_b)[index_b]


def _spread(advantages_b: torch.Tensor, rewards_bt: torch.Tensor, mask_bt: torch.Tensor) -> Estimate:
    """One number per row onto its tokens; without a value function the returns are the advantages."""
    advantages_bt = advantages_b.to(rewards_bt.dtype).unsqueeze(-1).expand_as(rewards_bt)
    advantages_bt = fill_masked(advantages_bt, mask_bt)
    return advantages_bt, advantages_bt.clone()


def _gae(inputs: AdvantageInputs, options: AdvantageOptions) -> Estimate:
    advantages_bt, returns_bt = gae(
        inputs.rewards_bt,
        inputs.required("gae", "values_bt"),
        inputs.mask_bt,
        options.gamma,
        options.lam,
        inputs.required("gae", "bootstrap_values_b"),
        inputs.required("gae", "truncated_b"),
    )
    if options.whiten:
        advantages_bt = masked_whiten(advantages_bt, inputs.mask_bt)
    return advantages_bt, returns_bt


def _grpo(inputs: AdvantageInputs, options: AdvantageOptions) -> Estimate:
    group_ids_b = inputs.required("grpo", "group_ids_b")
    return grpo(inputs.rewards_bt, inputs.mask_bt, group_ids_b, options.norm_by_std, options.epsilon)


def _rloo(inputs: AdvantageInputs, options: AdvantageOptions) -> Estimate:
    return rloo(inputs.rewards_bt, inputs.mask_bt, inputs.required("rloo", "group_ids_b"))


def _reinforce_plus_plus(inputs: AdvantageInputs, options: AdvantageOptions) -> Estimate:
    return reinforce_plus_plus(inputs.rewards_bt, inputs.mask_bt, options.gamma, options.whiten)


_ESTIMATORS: dict[str, Callable[[AdvantageInputs, AdvantageOptions], Estimate]] = {
    "gae": _gae,
    "grpo": _grpo,
    "rloo": _rloo,
    "reinforce_plus_plus": _reinforce_plus_plus,
}
