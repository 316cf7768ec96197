"""Training on a batch, optimizer and learning rate: the same options for policy and critic."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from neoproto.algorithms.names import LossAggMode, LRSchedule
from neoproto.config.base import AsTuple, Count, Fraction, NonNegative, Positive, Section, Size

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


class UpdateConfig(Section):
    """Training on a batch. Mini batches count prompts, micro batches samples (`rollout.n` a prompt)."""

    ppo_mini_batch_size: Count = 16
    """Prompts per optimizer step, over all ranks together."""
    ppo_micro_batch_size_per_gpu: Count = 64
    """Samples per forward and backward pass on one rank; changes memory, not the result."""
    ppo_epochs: Count = 1
    """Passes over each training batch."""
    shuffle: bool = False
    """Shuffle a batch's samples before it is cut into mini batches; else those of a prompt are in one."""
    loss_agg_mode: LossAggMode = "token-mean"
    """How the per-token losses of a mini batch become one number."""
    grad_clip: Positive = 1.0
    """Bound on the global gradient norm."""
    optim: OptimConfig = OptimConfig()
    """Optimizer and learning rate."""
    num_threads: Count | None = 1
    """torch threads of a process on CPU; null = torch's own choice."""
