"""Options of an optimizer and its learning-rate schedule, the same for policy and critic."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from neoproto.algorithms.names import LRSchedule
from neoproto.config.base import AsTuple, Fraction, NonNegative, Positive, Section, Size

Beta = Annotated[float, Field(ge=0, lt=1)]


class OptimConfig(Section):
    """AdamW with a linear warm-up, then the chosen schedule. The rate is never 0 on the first step."""

    lr: Positive = 1e-6
    """Peak learning rate."""
    lr_warmup_steps: Size = 0
    """Training steps over which the rate rises linearly to `lr`; step k of w runs at lr * k / w."""
    lr_scheduler_type: LRSchedule = "constant"
    """What happens between the end of the warm-up and the last training step."""
    min_lr_ratio: Fraction = 0.0
    """Where linear and cosine end, as a share of `lr`."""
    weight_decay: NonNegative = 0.01
    """Decoupled weight decay."""
    betas: Annotated[tuple[Beta, Beta], AsTuple] = (0.9, 0.999)
    """Decay rates of the two moments."""
    eps: Positive = 1e-8
    """Added to the denominator."""
