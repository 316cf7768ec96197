"""What policy losses read, their options, what they return, and the properties of each.

The losses are in `neoproto.algorithms.losses`, one a file. The metrics beside a loss are aggregated like a
token-mean with the mini-batch's denominators: those of the micro-batches sum to those of the mini-batch, and
the caller adds them up.

Imports no torch: the configuration reads the entries.

Shapes: b = rows, t = response tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from neoproto.algorithms.names import LOSS_AGG_MODES
from neoproto.choices import Choice

if TYPE_CHECKING:
    import torch

    from neoproto.algorithms.aggregate import LossDenominators


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyLossOptions:
    """How a policy loss is clipped, and made one number.

    Attributes:
        clip_ratio_low, clip_ratio_high: the ratio is kept in [1 - low, 1 + high]; 0 < low < 1, high > 0.
            GSPO wants them far smaller (its paper: 3e-4 and 4e-4).
        clip_ratio_c: dual clip, > 1; `math.inf` turns it off. Read by `vanilla`.
        loss_agg_mode: see `aggregate_loss`.
    """

    clip_ratio_low: float = 0.2
    clip_ratio_high: float = 0.2
    clip_ratio_c: float = 3.0
    loss_agg_mode: str = "token-mean"

    def __post_init__(self) -> None:
        if not 0.0 < self.clip_ratio_low < 1.0:
            raise ValueError(f"clip_ratio_low must be in (0, 1), got {self.clip_ratio_low}")
        if not self.clip_ratio_high > 0.0:
            raise ValueError(f"clip_ratio_high must be > 0, got {self.clip_ratio_high}")
        if not self.clip_ratio_c > 1.0:
            raise ValueError(f"clip_ratio_c must be > 1, got {self.clip_ratio_c}")
        if self.loss_agg_mode not in LOSS_AGG_MODES:
            raise ValueError(
                f"loss_agg_mode must be one of {', '.join(LOSS_AGG_MODES)}, got {self.loss_agg_mode!r}"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyLossInputs:
    """One micro-batch.

    Attributes:
        log_probs_bt: float [B, T], of the policy that is trained, with gradient.
        old_log_probs_bt: float [B, T], of the policy the ratio is taken against.
        advantages_bt: float [B, T].
        mask_bt: int64 or bool [B, T].
        denominators: those of the mini-batch.
        weights_bt: float [B, T], times which each token's loss counts, see
            `neoproto.algorithms.rollout_correction`; no gradient flows into them. None for 1. The metrics are
            not weighted.
    """

    log_probs_bt: torch.Tensor
    old_log_probs_bt: torch.Tensor
    advantages_bt: torch.Tensor
    mask_bt: torch.Tensor
    denominators: LossDenominators
    weights_bt: torch.Tensor | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyLoss:
    """Scalars; only `loss` carries a gradient.

    Attributes:
        loss: to be minimised.
        pg_clipfrac: share of tokens whose ratio was clipped to the interval.
        pg_clipfrac_lower: share of tokens held by the dual clip.
        ppo_kl: mean of old_log_prob - log_prob (k1 estimate of KL(old || new)), nats.
    """

    loss: torch.Tensor
    pg_clipfrac: torch.Tensor
    pg_clipfrac_lower: torch.Tensor
    ppo_kl: torch.Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyLossKind(Choice):
    """A built-in policy loss.

    Attributes:
        compute: (inputs, options) to the loss and its metrics.
    """

    compute: Callable[[PolicyLossInputs, PolicyLossOptions], PolicyLoss]
