"""The rollout seam: what a generator is asked for, and what it answers.

    prompts ──> GenerateRequest ──> engine ──> Generation ──> batch columns

Per-token fields (`log_probs`, `loss_mask`, `weight_versions`) travel beside the tokens, so an answer that was
produced in several turns, with tool output in between, or on several weight versions, needs no other type.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from typing import Literal

_SEED_BITS = 63


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """How tokens are drawn.

    Attributes:
        temperature: divisor of the logits, > 0. Ignored when `greedy`.
        top_p: nucleus mass in (0, 1]; 1 keeps every token.
        top_k: number of candidates, -1 keeps every token.
        max_tokens: upper bound on generated tokens, >= 1.
        greedy: take the most likely token.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    max_tokens: int
    greedy: bool = False

    def __post_init__(self) -> None:
        if not (self.temperature > 0 and math.isfinite(self.temperature)):
            raise ValueError(f"temperature must be > 0 (use greedy=True for argmax), got {self.temperature}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be in (0, 1], got {self.top_p}")
        if self.top_k != -1 and self.top_k < 1:
            raise ValueError(f"top_k must be -1 or >= 1, got {self.top_k}")
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens must be >= 1, got {self.max_tokens}")


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerateRequest:
    """One sample to generate.

    Attributes:
        uid: names the prompt; the samples of one prompt share it.
        sample_index: which of the prompt's samples this is, from 0.
        prompt_ids: token ids, without padding.
        sampling: how to draw.
        seed: of this request alone (see `request_seed`), so that the answer does not depend on scheduling.
    """

    uid: str
    sample_index: int
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    seed: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Generation:
    """One answer. The four per-token tuples have one length.

    Attributes:
        uid, sample_index, prompt_ids: those of the request.
        token_ids: what follows the prompt: generated tokens, the end-of-sequence token included, and, where
            several turns are involved, the tokens the environment inserted.
        log_probs: natural log of each token's probability at the sampling temperature; 0.0 where the token
            was not generated.
        loss_mask: 1 where the policy generated the token, 0 where the environment inserted it.
        weight_versions: the version `n` each token was sampled on.
        finish_reason: "stop" (end of sequence) or "length" (cut at `max_tokens`).
    """

    uid: str
    sample_index: int
    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    log_probs: tuple[float, ...]
    loss_mask: tuple[int, ...]
    weight_versions: tuple[int, ...]
    finish_reason: Literal["stop", "length"]

    def __post_init__(self) -> None:
        count = len(self.token_ids)
        for name in ("log_probs", "loss_mask", "weight_versions"):
            found = len(getattr(self, name))
            if found != count:
                raise ValueError(
                    f"generation {self.uid}/{self.sample_index}: {name} has {found} entries, tokens {count}"
                )


def request_seed(run_seed: int, uid: str, sample_index: int, weight_version: int) -> int:
    """Derive a request's sampling seed.

    Args:
        run_seed: the run's seed.
        uid, sample_index: which sample.
        weight_version: the version `n` the request starts on.

    Returns:
        A seed in [0, 2**63), the same on every machine and in every process.
    """
    text = f"{run_seed}/{sample_index}/{weight_version}/{uid}"
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") & ((1 << _SEED_BITS) - 1)
