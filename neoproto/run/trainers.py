"""Which trainer a run has, and who keeps its replicas alive meanwhile."""

from __future__ import annotations

import asyncio

from neoproto.trainer.asynchronous import AsyncTrainer
from neoproto.trainer.record import TrainingParts, TrainingResult
from neoproto.trainer.replicas import ReplicaSet
from neoproto.trainer.supervision import Supervisor
from neoproto.trainer.sync import SyncTrainer
from neoproto.trainer.tasks import beside


def train(parts: TrainingParts, replicas: ReplicaSet, supervisor: Supervisor) -> TrainingResult:
    """Run the loop of the configured mode to its end.

    Args:
        replicas: those of `parts.workers.rollout`.
        supervisor: of these replicas.
    """
    if parts.config.trainer.mode == "sync":
        training = SyncTrainer(parts).run()
    else:
        training = AsyncTrainer(parts, replicas, replicas.replicas).run()
    return asyncio.run(beside(training, {"the supervision of the replicas": supervisor.run()}))
