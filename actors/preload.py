"""What a warm parent imports for our workers, in order. No module of a user's is among it."""

from __future__ import annotations

from neoproto.rollout.engines import ENGINES

WORKER_MODULES = (
    "torch",
    "torch.distributed.fsdp",
    "transformers.models.auto.modeling_auto",
    "actors.training.policy",
    "actors.training.critic",
    "actors.training.reference",
    "actors.reward.worker",
    "actors.rollout.worker",
)
"""What all of them begin with."""


def rollout_modules(engine: str) -> tuple[str, ...]:
    """Of a rollout worker. An engine is kept from all others: vLLM patches torch when it is imported."""
    kind = ENGINES[engine]
    return (*WORKER_MODULES, kind.engine.partition(":")[0], *kind.modules)
