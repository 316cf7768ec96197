"""Options of `critic`: the value model of GAE."""

from __future__ import annotations

from neoproto.algorithms.names import LossAggMode
from neoproto.config.base import Count, Plain, Positive, Section
from neoproto.config.optim import OptimConfig


class CriticModelConfig(Section):
    """Where the value model's body starts from; its head starts at zero."""

    path: Plain | None = None
    """A Hugging Face folder; null = the policy's model."""


class CriticConfig(Section):
    """Training of the critic. Units as for the policy."""

    enable: bool | None = None
    """null = exactly when `algorithm.adv_estimator` needs one; a value that contradicts it is refused. With
    an estimator of your own (custom): true trains one, whose values the estimator gets."""
    model: CriticModelConfig = CriticModelConfig()
    """Where it starts from."""
    ppo_mini_batch_size: Count = 16
    """Prompts per optimizer step, over all ranks together."""
    ppo_micro_batch_size_per_gpu: Count = 64
    """Samples per pass on one rank, in training and when values are computed."""
    ppo_epochs: Count = 1
    """Passes over each training batch."""
    shuffle: bool = False
    """Shuffle a batch's samples before it is cut into mini batches; else those of a prompt are in one."""
    cliprange_value: Positive = 0.5
    """How far a new value may move from the old one before the loss stops rewarding it."""
    loss_agg_mode: LossAggMode = "token-mean"
    """How the per-token losses of a mini batch become one number."""
    grad_clip: Positive = 1.0
    """Bound on the global gradient norm."""
    optim: OptimConfig = OptimConfig()
    """Optimizer of the critic."""
    num_threads: Count | None = 1
    """torch threads of a critic process on CPU; null = torch's own choice."""
