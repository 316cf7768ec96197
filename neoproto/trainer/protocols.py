"""The methods of workers that the trainer calls, each with a deadline.

    workers.actor.within(60).update_actor(batch)  ──handle, run/handles.py──>  PolicyWorker.update_actor

The trainer imports no worker class. A type checker compares each protocol with the worker's methods where a
run makes its `Workers` of handles.
"""

from __future__ import annotations

from collections.abc import Awaitable
from dataclasses import dataclass
from typing import Any, Protocol, Self, TypeVar

from neoproto.data import DataProto
from neoproto.weights.version import WeightVersion

V_co = TypeVar("V_co", covariant=True)


class Call(Awaitable[V_co], Protocol[V_co]):
    """A call under way. Its deadline was fixed when it was made."""

    def cancel(self) -> Any:
        """Ask the worker to stop an async method; the call then ends with `CallCancelled`."""
        ...


class Group(Protocol):
    """A worker group as the trainer sees it; `neoproto.runtime.WorkerGroup` is one."""

    @property
    def name(self) -> str: ...

    @property
    def world_size(self) -> int: ...


class OwnedGroup(Group, Protocol):
    """A group whose processes its holder may release."""

    def close(self, drain_s: float) -> None:
        """Release the processes after `drain_s` seconds for what runs; blocks. Closing twice is a no-op."""
        ...


class RolloutCalls(Protocol):
    """Calls that end within one time."""

    def generate_sequences(self, prompts: DataProto) -> Awaitable[DataProto]:
        """n samples a prompt, the samples of a prompt next to each other."""
        ...

    def update_weights(self, version: WeightVersion) -> Awaitable[Any]:
        """Return when every replica serves `version` or a newer one."""
        ...


class Rollout(Protocol):
    """All replicas as one; `ReplicaSet` is it in a run."""

    def within(self, timeout: float) -> RolloutCalls:
        """Calls that end `timeout` seconds after they are made."""
        ...


class ReplicaProcess(Protocol):
    """The process of one replica."""

    @property
    def group(self) -> OwnedGroup: ...

    def within(self, timeout: float | None) -> Self: ...

    def generate_sequences(self, prompts: DataProto) -> Call[DataProto]: ...

    def attach_registry(self, registry: Any, replica: str | None = None) -> Call[Any]: ...

    def update_weights(self, version: WeightVersion) -> Call[Any]: ...

    def run_agent(self) -> Call[Any]: ...

    def ping(self) -> Call[Any]: ...


class ServingReplica(Protocol):
    """One replica as the dispatcher sees it, whatever process it has."""

    @property
    def name(self) -> str:
        """Its name in the registry of served weights."""
        ...

    @property
    def up(self) -> bool:
        """Whether it can be given prompts."""
        ...

    async def generate(self, prompts: DataProto, timeout: float) -> DataProto:
        """n samples a prompt, the samples of a prompt next to each other; raises after `timeout` seconds.

        Raises:
            ReplicaFailed: the replica is gone; it is not `up` any more.
        """
        ...


class Reward(Protocol):
    """Judges samples."""

    def within(self, timeout: float | None) -> Self: ...

    def compute_score(self, batch: DataProto) -> Call[DataProto]: ...


class Trained(Protocol):
    """A model in training, which checkpoints hold."""

    @property
    def group(self) -> Group: ...

    def within(self, timeout: float | None) -> Self: ...

    def save_checkpoint(self, folder: str) -> Call[None]: ...

    def finish_checkpoint(self) -> Call[list[dict[str, str]]]: ...


class Policy(Trained, Protocol):
    """The model whose weights rollout serves."""

    def compute_log_prob(self, batch: DataProto) -> Call[DataProto]: ...

    def update_actor(self, batch: DataProto) -> Call[dict[str, float]]: ...

    def publish_weights(self, version: WeightVersion) -> Call[Any]: ...

    def save_hf(self, path: str) -> Call[None]: ...


class Critic(Trained, Protocol):
    """The model of values."""

    def compute_values(self, batch: DataProto) -> Call[DataProto]: ...

    def update_critic(self, batch: DataProto) -> Call[dict[str, float]]: ...


class Reference(Protocol):
    """The model that the policy is kept near."""

    def within(self, timeout: float | None) -> Self: ...

    def compute_ref_log_prob(self, batch: DataProto) -> Call[DataProto]: ...


class Samplers(Protocol):
    """Who answers prompts, and who judges the answers."""

    @property
    def rollout(self) -> Rollout: ...

    @property
    def reward(self) -> Reward: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Workers:
    """The workers of one run. `critic` and `reference` exist when the algorithm needs them.

    Attributes:
        num_devices: devices that throughput is divided by: all that the groups run on, rollout's too.
        rollout: all replicas as one, see `ReplicaSet`.
    """

    num_devices: int
    rollout: Rollout
    reward: Reward
    actor: Policy
    critic: Critic | None = None
    reference: Reference | None = None
