"""Options of `critic`: the value model of GAE."""

from __future__ import annotations

from neoproto.config.base import Count, Plain, Positive, Section
from neoproto.config.optim import UpdateConfig


class CriticModelConfig(Section):
    """Where the value model's body starts from; its head starts at zero."""

    path: Plain | None = None
    """A Hugging Face folder; null = the policy's model."""


class CriticConfig(UpdateConfig):
    """Training of the critic. Units as for the policy."""

    enable: bool | None = None
    """null = exactly when `algorithm.adv_estimator` needs one; a value that contradicts it is refused. With
    an estimator of your own (custom): true trains one, whose values the estimator gets."""
    model: CriticModelConfig = CriticModelConfig()
    """Where it starts from."""
    ppo_micro_batch_size_per_gpu: Count = 64
    """Samples per pass on one rank, in training and when values are computed."""
    cliprange_value: Positive = 0.5
    """How far a new value may move from the old one before the loss stops rewarding it."""
