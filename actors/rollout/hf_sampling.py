"""Drawing next tokens for many sequences at once, each with random numbers of its own.

A token is the inverse of the distribution's cumulative sum at one uniform number, which is a function of the
request's seed and of how many tokens it has: no generator has a state, so neither the order of requests nor
what else is drawn matters.

Shapes: b = sequences, v = vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from neoproto.data.generation import SamplingParams

Words = NDArray[np.uint64]

_GOLDEN, _ONE, _TWO = (
    np.uint64(constant) for constant in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
)


def uniforms(seeds: Words, counts: Words) -> NDArray[np.float64]:
    """Numbers in [0, 1) with 53 random bits, float64 [b].

    Args:
        seeds: uint64 [b].
        counts: uint64 [b], which number of the seed's sequence.
    """
    return (_mixed(seeds ^ _mixed(counts)) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mixed(values: Words) -> Words:
    """SplitMix64: a bit of the input changes each bit of the output with probability a half."""
    values = values + _GOLDEN
    values = (values ^ (values >> np.uint64(30))) * _ONE
    values = (values ^ (values >> np.uint64(27))) * _TWO
    return values ^ (values >> np.uint64(31))


@dataclass(frozen=True, kw_only=True, slots=True)
class Drawing:
    """How the tokens of some sequences are drawn, in whole tensors.

    Attributes:
        temperatures: float32 [b, 1]; None where all are 1.
        greedy: bool [b]; None where none is.
        cuts: by row, what cuts its distribution off.
    """

    temperatures: Tensor | None
    greedy: Tensor | None
    cuts: dict[int, SamplingParams]

    @classmethod
    def of(cls, samplings: Sequence[SamplingParams]) -> Drawing:
        """Of greedy sequences, temperature and cuts do not count."""
        temperatures = [1.0 if one.greedy else one.temperature for one in samplings]
        greedy = [one.greedy for one in samplings]
        return cls(
            temperatures=torch.tensor(temperatures)[:, None] if set(temperatures) - {1.0} else None,
            greedy=torch.tensor(greedy) if any(greedy) else None,
            cuts={
                row: one
                for row, one in enumerate(samplings)
                if not one.greedy and (one.top_k != -1 or one.top_p < 1)
            },
        )

    def draw(self, logits_bv: Tensor, uniforms_b: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens, int64 [b], and their log-probs, float32 [b], after temperature and cuts.

        Args:
            logits_bv: floating point.
            uniforms_b: float64 in [0, 1).
        """
        scaled = logits_bv.float()
        if self.temperatures is not None:
            scaled = scaled / self.temperatures
        if self.cuts:
            scaled = scaled.clone()
            for row, sampling in self.cuts.items():
                scaled[row] = _cut(scaled[row], sampling)
        log_probs_bv = scaled.log_softmax(dim=-1)
        tokens = _inverse(log_probs_bv, uniforms_b)
        if self.greedy is not None:
            tokens = torch.where(self.greedy, log_probs_bv.argmax(dim=-1), tokens)
        return tokens, log_probs_bv.gather(1, tokens[:, None])[:, 0]


def _inverse(log_probs_bv: Tensor, uniforms_b: Tensor) -> Tensor:
    """The first token whose cumulative probability exceeds the uniform number; never one of probability 0."""
    cumulated = log_probs_bv.double().exp().cumsum(dim=-1)
    total = cumulated[:, -1:]
    # Below the total, to the last bit: then some sum exceeds it, and its token has a share.
    targets = torch.minimum(uniforms_b[:, None] * total, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(cumulated, targets, right=True)[:, 0]


def _cut(logits_v: Tensor, sampling: SamplingParams) -> Tensor:
    """-inf outside the `top_k` likeliest tokens, and of these the fewest that have `top_p` of their mass."""
    ordered, index = logits_v.sort(descending=True, stable=True)
    if sampling.top_k != -1:
        ordered[sampling.top_k :] = -torch.inf
    if sampling.top_p < 1:
        shares = ordered.softmax(dim=-1)
        ordered[shares.cumsum(dim=-1) - shares >= sampling.top_p] = -torch.inf
    return torch.empty_like(logits_v).scatter_(0, index, ordered)
