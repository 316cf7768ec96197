"""The learning rate's course, as a pure function of the training step."""

from __future__ import annotations

import math

from neoproto.algorithms.names import LR_SCHEDULES


def lr_multiplier(
    step: int, warmup_steps: int, total_steps: int, kind: str = "constant", min_ratio: float = 0.0
) -> float:
    """What the base learning rate is multiplied by for training step `step`.

    A training step is one update on a batch: its optimizer steps (epochs x mini-batches) share one rate, as
    in verl.

    Warm-up: (step + 1) / warmup_steps, so that step 0 already learns and the last warm-up step has the full
    rate. Then, with x = (step - warmup_steps) / (total_steps - warmup_steps):

        constant: 1
        linear: 1 - (1 - min_ratio) x
        cosine: min_ratio + (1 - min_ratio) (1 + cos(pi x)) / 2      (SGDR, arXiv 1608.03983, eq. 5)

    x reaches 1 only *after* the last step, total_steps - 1, so that every planned step has a positive rate.
    Later steps get `min_ratio` (constant: 1).

    Args:
        step: training steps already made, from 0.
        warmup_steps: 0 for none.
        total_steps: planned training steps, > 0.
        kind: one of `LR_SCHEDULES`.
        min_ratio: floor of the decay in [0, 1].

    Raises:
        ValueError: an argument out of its range.
    """
    if step < 0 or warmup_steps < 0 or total_steps <= 0:
        raise ValueError(
            "step and warmup_steps must be >= 0 and total_steps > 0, "
            f"got step={step}, warmup_steps={warmup_steps}, total_steps={total_steps}"
        )
    if not 0.0 <= min_ratio <= 1.0:
        raise ValueError(f"min_ratio must be in [0, 1], got {min_ratio}")
    if kind not in LR_SCHEDULES:
        raise ValueError(f"lr schedule must be one of {', '.join(LR_SCHEDULES)}, got {kind!r}")
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    if kind == "constant":
        return 1.0
    if step >= total_steps:
        return min_ratio
    progress = (step - warmup_steps) / (total_steps - warmup_steps)
    if kind == "linear":
        return 1.0 - (1.0 - min_ratio) * progress
    return min_ratio + (1.0 - min_ratio) * 0.5 * (1.0 + math.cos(math.pi * progress))
