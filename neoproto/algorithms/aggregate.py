"""From a loss per token to one number, the same however the mini-batch is cut.

A mini-batch is spread over ranks and micro-batches, and each piece only sees its own rows. A mean of the
pieces' means would weigh a short piece's tokens more than a long one's. So every piece divides by the
denominators of the *whole* mini-batch, and the pieces are added.

Data-parallel wrappers that average gradients over ranks (FSDP, DDP) divide once more by the world size:
their caller multiplies the loss by it before `backward`.

Shapes: b = rows, t = response tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from neoproto.algorithms.masking import masked_mean, masked_sum, require_same_shape, sequence_lengths
from neoproto.algorithms.names import LOSS_AGG_MODES


@dataclass(frozen=True, kw_only=True, slots=True)
class LossDenominators:
    """What a loss is divided by: counts over all rows of a mini-batch, on all ranks and micro-batches.

    Attributes:
        tokens: response tokens under the mask.
        sequences: rows with at least one such token; rejected rows (empty mask) are not counted.
        horizon: the longest response allowed, in tokens (`data.max_response_length`), never the width a
            batch happens to be padded to. Only `seq-mean-token-sum-norm` needs it.
    """

    tokens: float
    sequences: float
    horizon: float | None = None

    @classmethod
    def count(cls, mask_bt: torch.Tensor, horizon: float | None = None) -> LossDenominators:
        """The denominators of the rows of one mask [B, T]."""
        lengths = sequence_lengths(mask_bt)
        return cls(tokens=float(lengths.sum()), sequences=float((lengths > 0).sum()), horizon=horizon)

    def __add__(self, other: LossDenominators) -> LossDenominators:
        """The denominators of two pieces together; raises `ValueError` if their horizons differ."""
        if self.horizon != other.horizon:
            raise ValueError(f"horizons differ: {self.horizon} and {other.horizon}")
        tokens, sequences = self.tokens + other.tokens, self.sequences + other.sequences
        return LossDenominators(tokens=tokens, sequences=sequences, horizon=self.horizon)


def aggregate_loss(
    loss_bt: torch.Tensor, mask_bt: torch.Tensor, mode: str, denominators: LossDenominators
) -> torch.Tensor:
    """This piece's share of the mini-batch loss; the shares of all pieces sum to the mini-batch loss.

    Modes (with N_tok, N_seq and H the denominators, l_i the length of row i):
        token-mean: sum over all tokens / N_tok (DAPO, arXiv 2503.14476, eq. 8).
        seq-mean-token-sum: sum over all tokens / N_seq.
        seq-mean-token-mean: sum over rows of (row sum / l_i) / N_seq (GRPO, arXiv 2402.03300, eq. 3).
        seq-mean-token-sum-norm: sum over all tokens / (N_seq H) (Dr. GRPO, arXiv 2503.20783, section 3.2).

    Args:
        loss_bt: float [B, T].
        mask_bt: [B, T]; rows that are all zero count for nothing.
        mode: one of `LOSS_AGG_MODES`.
        denominators: of the whole mini-batch.

    Returns:
        Scalar, differentiable; 0 if nothing is under the mask.

    Raises:
        ValueError: unknown mode, shapes that differ, or a horizon that is missing or not positive.
    """
    require_same_shape(loss_bt=loss_bt, mask_bt=mask_bt)
    # A mini-batch whose rows were all rejected has numerator 0 as well: 0 / 1 and not 0 / 0.
    tokens, sequences = max(denominators.tokens, 1.0), max(denominators.sequences, 1.0)
    match mode:
        case "token-mean":
            return masked_sum(loss_bt, mask_bt) / tokens
        case "seq-mean-token-sum":
            return masked_sum(loss_bt, mask_bt) / sequences
        case "seq-mean-token-mean":
            return masked_mean(loss_bt, mask_bt, dim=-1).sum() / sequences
        case "seq-mean-token-sum-norm":
            if denominators.horizon is None or denominators.horizon <= 0:
                raise ValueError(f"{mode} needs denominators.horizon > 0, got {denominators.horizon}")
            return masked_sum(loss_bt, mask_bt) / (sequences * denominators.horizon)
        case _:
            raise ValueError(f"loss_agg_mode must be one of {', '.join(LOSS_AGG_MODES)}, got {mode!r}")
