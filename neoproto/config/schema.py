"""The whole configuration of a run, and what follows from it."""

from __future__ import annotations

from neoproto.algorithms.estimators import ESTIMATORS
from neoproto.config.algorithm import AlgorithmConfig, RewardConfig
from neoproto.config.base import Section
from neoproto.config.critic import CriticConfig
from neoproto.config.data import DataConfig
from neoproto.config.modes import SeparateAsyncConfig
from neoproto.config.policy import PolicyConfig
from neoproto.config.runtime import RuntimeConfig
from neoproto.config.topology import TopologyConfig, preset_topology
from neoproto.config.trainer import TrainerConfig, WeightsConfig

OPTIONAL_ROLES = ("reward",)
"""Roles that a topology may place or leave out: rewards are computed beside the controller otherwise."""


class RuntimeRoot(Section):
    """The two sections that the control plane needs; enough for a script without a trainer."""

    runtime: RuntimeConfig = RuntimeConfig()
    """The control plane."""
    topology: TopologyConfig | None = None
    """Where everything runs; null = all roles on trainer.nnodes x trainer.n_gpus_per_node devices."""


class RunConfig(RuntimeRoot):
    """A validated run."""

    data: DataConfig = DataConfig()
    """Prompts."""
    actor_rollout_ref: PolicyConfig = PolicyConfig()
    """The policy: model, training, reference copy, sampling."""
    critic: CriticConfig = CriticConfig()
    """The value model."""
    algorithm: AlgorithmConfig = AlgorithmConfig()
    """Advantages and rewards."""
    reward: RewardConfig = RewardConfig()
    """Scoring."""
    weights: WeightsConfig = WeightsConfig()
    """How weights reach rollout."""
    trainer: TrainerConfig = TrainerConfig()
    """The loop."""
    dry_run: bool = False
    """Check everything, print placement, memory and the work of a step, and start nothing."""

    @property
    def uses_critic(self) -> bool:
        """Whether a value model is trained."""
        estimator = ESTIMATORS.get(self.algorithm.adv_estimator)
        return self.critic.enable is True if estimator is None else estimator.needs_critic

    @property
    def is_async(self) -> bool:
        """Whether rollout runs ahead of training, on devices of its own."""
        return self.trainer.mode != "sync"

    @property
    def async_options(self) -> SeparateAsyncConfig:
        """The options of the asynchronous mode that is on; `decoupled_async`'s are more."""
        trainer = self.trainer
        return trainer.separate_async if trainer.mode == "separate_async" else trainer.decoupled_async

    @property
    def uses_reference(self) -> bool:
        """Whether a KL term is on."""
        return self.algorithm.use_kl_in_reward or self.actor_rollout_ref.actor.use_kl_loss

    @property
    def roles(self) -> tuple[str, ...]:
        """Roles that the topology must place, in the order in which their groups are created."""
        roles = ["actor", "rollout"]
        if self.uses_critic:
            roles.append("critic")
        if self.uses_reference:
            roles.append("reference")
        return tuple(roles)

    @property
    def max_model_len(self) -> int:
        """Context length of the rollout engine, in tokens."""
        limit = self.actor_rollout_ref.rollout.max_model_len
        return limit or self.data.max_prompt_length + self.data.max_response_length

    @property
    def rollout_dtype(self) -> str:
        """Type of the published weights."""
        return self.weights.rollout_dtype or self.actor_rollout_ref.rollout.dtype

    def resolved_topology(self) -> TopologyConfig:
        """The topology as given, or the preset; `trainer.device_type` is that of clusters which have none."""
        trainer = self.trainer
        device_type = None if trainer.device_type == "auto" else trainer.device_type
        if self.topology is not None:
            clusters = tuple(
                one.model_copy(update={"device_type": one.device_type or device_type})
                for one in self.topology.clusters
            )
            return self.topology.model_copy(update={"clusters": clusters})
        return preset_topology(
            self.roles,
            nnodes=trainer.nnodes or 1,
            n_gpus_per_node=trainer.n_gpus_per_node or 1,
            rollout_gpus_per_node=(
                self.actor_rollout_ref.rollout.n_gpus_per_node or 1 if self.is_async else 0
            ),
            device_type=device_type,
        )
