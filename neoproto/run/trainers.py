"""Which trainer a run has, and the update agents that run beside the replicas of `decoupled_async`."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from actors.weight_registry import GroupRegistry
from neoproto.runtime import WorkerGroup
from neoproto.trainer.asynchronous import AsyncTrainer, GroupReplica
from neoproto.trainer.protocols import Call
from neoproto.trainer.record import TrainingParts, TrainingResult
from neoproto.trainer.sync import SyncTrainer


def train(parts: TrainingParts, registry: WorkerGroup) -> TrainingResult:
    """Run the loop of the configured mode to its end.

    Args:
        registry: the group of the weight registry; policy and rollout are attached to it.
    """
    mode = parts.config.trainer.mode
    if mode == "sync":
        return asyncio.run(SyncTrainer(parts).run())
    rollout = parts.workers.rollout
    replicas = [GroupReplica(rollout, rank) for rank in range(rollout.world_size)]
    with update_agents(parts) if mode == "decoupled_async" else no_agents() as agents:
        return asyncio.run(AsyncTrainer(parts, GroupRegistry(registry), replicas, agents).run())


@contextmanager
def update_agents(parts: TrainingParts) -> Iterator[Mapping[str, Call]]:
    """Start an update agent beside each replica; each runs until it fails, or until the block is left."""
    rollout = parts.workers.rollout
    # No deadline: an agent has no end of its own. Its process's death, or its own failure, ends the call.
    agents = {
        f"the update agent of {rollout.name}/{rank}": rollout.rank(rank).submit("run_agent", timeout=None)
        for rank in range(rollout.world_size)
    }
    try:
        yield agents
    finally:
        for agent in agents.values():
            agent.cancel()


@contextmanager
def no_agents() -> Iterator[Mapping[str, Call]]:
    yield {}
