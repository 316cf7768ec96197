"""Typed configuration: composed by Hydra from `configs/`, validated once here, frozen afterwards.

Nothing below imports torch, Monarch, vLLM or transformers.
"""

from neoproto.config.algorithm import (
    AdvantageFunctionConfig,
    AlgorithmConfig,
    KlCtrlConfig,
    RewardConfig,
    RewardFunctionConfig,
)
from neoproto.config.critic import CriticConfig, CriticModelConfig
from neoproto.config.data import DataConfig, TaskConfig
from neoproto.config.load import load_config, load_runtime
from neoproto.config.optim import OptimConfig
from neoproto.config.policy import (
    ActorConfig,
    ModelConfig,
    PolicyConfig,
    PolicyLossConfig,
    RefConfig,
    RolloutConfig,
    TinyModelConfig,
    ValKwargsConfig,
)
from neoproto.config.runtime import MonarchConfig, ObjectStoreConfig, RuntimeConfig
from neoproto.config.schema import RunConfig, RuntimeRoot
from neoproto.config.topology import (
    ClusterConfig,
    DevicePoolConfig,
    TopologyConfig,
    TopologyModelConfig,
    preset_topology,
)
from neoproto.config.trainer import TimeoutsConfig, TrainerConfig, WeightsConfig

CONFIG_NAMES = ("ppo_monarch", "grpo_monarch", "ppo_smollm2", "grpo_smollm2")
"""The shipped configurations, for `--config-name`."""

CONFIG_MODULE = "configs"
"""Where Hydra finds them, from any folder."""

__all__ = [
    "CONFIG_MODULE",
    "CONFIG_NAMES",
    "ActorConfig",
    "AdvantageFunctionConfig",
    "AlgorithmConfig",
    "ClusterConfig",
    "CriticConfig",
    "CriticModelConfig",
    "DataConfig",
    "DevicePoolConfig",
    "KlCtrlConfig",
    "ModelConfig",
    "MonarchConfig",
    "ObjectStoreConfig",
    "OptimConfig",
    "PolicyConfig",
    "PolicyLossConfig",
    "RefConfig",
    "RewardConfig",
    "RewardFunctionConfig",
    "RolloutConfig",
    "RunConfig",
    "RuntimeConfig",
    "RuntimeRoot",
    "TaskConfig",
    "TimeoutsConfig",
    "TinyModelConfig",
    "TopologyConfig",
    "TopologyModelConfig",
    "TrainerConfig",
    "ValKwargsConfig",
    "WeightsConfig",
    "load_config",
    "load_runtime",
    "preset_topology",
]
