"""What worker processes begin with: their environment, and the modules that a warm parent has for them.

Importable without torch: hosts are started with it, before any worker is described.
"""

from __future__ import annotations

from actors.preload import WORKER_MODULES, rollout_modules
from actors.rollout.options import EngineOptions, rollout_env
from neoproto.config import RunConfig
from neoproto.runtime.backend import Preload
from neoproto.runtime.placement import DeviceType, Placement


def torch_env(num_threads: int | None) -> dict[str, str]:
    """Environment of a worker that computes with torch: its threads, and no look at the network."""
    # Threads that spin while they wait take the cores of whoever works: policy and critic train at once.
    env = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "OMP_WAIT_POLICY": "passive"}
    return env if num_threads is None else env | {"OMP_NUM_THREADS": str(num_threads)}


def worker_modules(device: DeviceType, engine: str | None = None) -> tuple[str, ...]:
    """What a worker is forked with, a rollout worker if it has an engine; nothing on a GPU."""
    if device == "gpu":
        return ()
    return WORKER_MODULES if engine is None else rollout_modules(engine)


def expected_workers(config: RunConfig, placement: Placement) -> list[Preload]:
    """What a warm parent may prepare for, before the workers are described."""
    device = next(model.device_type for model in placement.models if model.worker == "rollout")
    if device == "gpu":
        return []
    rollout = config.actor_rollout_ref.rollout
    # The rest of the options is not known yet, and the environment does not depend on it.
    engine = EngineOptions(rollout=rollout, device=device, model="", max_model_len=1, eos_token_ids=(0,))
    return [
        Preload(modules=worker_modules(device), env=torch_env(1)),  # of rewards, and maybe of others
        Preload(modules=worker_modules(device, rollout.name), env=rollout_env(engine) | rollout.env),
    ]
