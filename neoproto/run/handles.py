"""The methods of workers that a run calls: go to the definition of one, and you are in the worker.

The trainer's protocols (`neoproto/trainer/protocols.py`) are checked against these where `Workers` is made.
"""

from __future__ import annotations

from actors.reward.worker import RewardWorker
from actors.rollout.worker import RolloutWorker
from actors.training.critic import CriticWorker
from actors.training.policy import PolicyWorker
from actors.training.reference import ReferenceWorker
from actors.training.trained_worker import TrainedWorker
from neoproto.runtime import WorkerGroup, WorkerHandle, remote


class RolloutHandle(WorkerHandle):
    """Rollout: the process of one replica, or several that share the prompts of each call."""

    group: WorkerGroup

    def __init__(self, group: WorkerGroup, timeout: float | None = None) -> None:
        super().__init__(group, timeout)

    generate_sequences = remote(RolloutWorker.generate_sequences)
    attach_registry = remote(RolloutWorker.attach_registry)
    update_weights = remote(RolloutWorker.update_weights)
    run_agent = remote(RolloutWorker.run_agent)
    ping = remote(RolloutWorker.ping)


class RewardHandle(WorkerHandle):
    """The reward workers."""

    compute_score = remote(RewardWorker.compute_score)


class TrainedHandle(WorkerHandle):
    """A model in training."""

    save_checkpoint = remote(TrainedWorker.save_checkpoint)
    finish_checkpoint = remote(TrainedWorker.finish_checkpoint)
    load_checkpoint = remote(TrainedWorker.load_checkpoint)


class PolicyHandle(TrainedHandle):
    """The policy."""

    attach_registry = remote(PolicyWorker.attach_registry)
    compute_log_prob = remote(PolicyWorker.compute_log_prob)
    update_actor = remote(PolicyWorker.update_actor)
    publish_weights = remote(PolicyWorker.publish_weights)
    save_hf = remote(PolicyWorker.save_hf)


class CriticHandle(TrainedHandle):
    """The critic."""

    compute_values = remote(CriticWorker.compute_values)
    update_critic = remote(CriticWorker.update_critic)


class ReferenceHandle(WorkerHandle):
    """The reference."""

    compute_ref_log_prob = remote(ReferenceWorker.compute_ref_log_prob)
