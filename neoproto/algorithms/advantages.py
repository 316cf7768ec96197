"""What advantage estimators read, their options, and the properties of each.

The estimators are in `neoproto.algorithms.estimators`, one a file. All of them read a reward per token and
return (advantages, returns), float [B, T], 0 outside the mask. A row whose mask is all zero (a rejected
sample) gets zeros and changes no other row's numbers. Tokens that the policy did not generate inside a
response (mask 0 between two turns) are stepped over: the next generated token follows the last one directly,
and a reward on a skipped token is not seen.

Imports no torch: the configuration reads the entries.

Shapes: b = rows, t = response tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, TypeAlias

from neoproto.choices import Choice

if TYPE_CHECKING:
    import torch

Estimate: TypeAlias = "tuple[torch.Tensor, torch.Tensor]"
"""(advantages_bt, returns_bt)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AdvantageOptions:
    """The options of all estimators. Each reads some of these: `Estimator.options`.

    Attributes:
        gamma: discount per token.
        lam: GAE's lambda.
        norm_by_std: divide by the group's standard deviation; False is Dr. GRPO.
        epsilon: added to that standard deviation; a run leaves it as it is.
        whiten: mean 0, variance 1 over all tokens of the batch.
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
        values_bt: float [B, T], the critic's values; None without a critic, as the next one.
        bootstrap_values_b: float [B], the critic's value after the last response token.
        truncated_b: bool [B], the response hit the length limit and its future counts.
        group_ids_b: int64 [B], equal for the samples of one prompt.
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


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimator(Choice):
    """A built-in estimator.

    Attributes:
        compute: (inputs, options) to (advantages_bt, returns_bt); called without gradients.
        needs_critic: it reads `values_bt`, `bootstrap_values_b` and `truncated_b`.
        compares_samples: it reads `group_ids_b`, and a sample alone in its group has no advantage.
        options: the fields of `AdvantageOptions` that it reads.
    """

    compute: Callable[[AdvantageInputs, AdvantageOptions], Estimate]
    needs_critic: bool = False
    compares_samples: bool = False
    options: tuple[str, ...] = ()

    @property
    def help(self) -> str:
        """What it is, and what it needs."""
        needs = (
            *(("needs a critic",) if self.needs_critic else ()),
            *(("compares the `rollout.n` samples of a prompt",) if self.compares_samples else ()),
        )
        return f"{self.about} ({', '.join(needs)})" if needs else self.about
