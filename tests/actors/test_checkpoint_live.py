"""Checkpoints of real worker groups: two ranks each, saved while they train, restored in new processes."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest

from actors.training.critic import CriticOptions, CriticWorker
from actors.training.policy import PolicyOptions, PolicyWorker
from actors.training.torch_model import ModelOptions
from actors.training.torch_worker import TorchOptions
from actors.training.updates import TrainOptions
from neoproto.config import ActorConfig, CriticConfig, OptimConfig
from neoproto.data import DataProto
from neoproto.errors import ConfigError
from neoproto.runtime import ClassWithInitArgs, Runtime, WorkerGroup
from tests.actors.tiny_llama import make_batch
from tests.meshes.leftovers import wait_until_clean

pytestmark = pytest.mark.live

TORCH = TorchOptions(device_type="cpu", num_threads=1, collective_timeout_s=60)
TRAIN = TrainOptions(total_steps=10)
TRAINING: dict[str, Any] = {
    "ppo_mini_batch_size": 8,
    "ppo_micro_batch_size_per_gpu": 4,
    "shuffle": True,
    "optim": OptimConfig(lr=1e-3, lr_warmup_steps=4),
}


class Pair:
    """A policy and a critic of two ranks each."""

    def __init__(self, runtime: Runtime, model: str, name: str) -> None:
        options = ModelOptions(path=model)
        recipes = {
            "policy": ClassWithInitArgs(
                PolicyWorker,
                PolicyOptions(model=options, actor=ActorConfig(**TRAINING), train=TRAIN, torch=TORCH),
            ),
            "critic": ClassWithInitArgs(
                CriticWorker,
                CriticOptions(model=options, critic=CriticConfig(**TRAINING), train=TRAIN, torch=TORCH),
            ),
        }
        self.groups: dict[str, WorkerGroup] = {
            kind: runtime.create_worker_group(
                recipe, on=runtime.create_resource_pool(1, 2), name=f"{kind}-{name}"
            )
            for kind, recipe in recipes.items()
        }

    def call(self, method: str, *args: Any) -> dict[str, Any]:
        """On both at once; "KIND" in text arguments is replaced."""
        calls = {
            kind: group.submit(
                method.replace("KIND", {"policy": "actor"}.get(kind, kind)),
                tuple(arg.replace("KIND", kind) if isinstance(arg, str) else arg for arg in args),
                timeout=60,
                blocking=False,
            )
            for kind, group in self.groups.items()
        }
        return {kind: call.result() for kind, call in calls.items()}

    def update(self, seed: int) -> dict[str, dict[str, float]]:
        return self.call("update_KIND", DataProto.from_dict(make_batch(16, seed=seed)))


@pytest.mark.core
def test_new_processes_go_on_where_a_checkpoint_was_taken(tmp_path: Path, tied_llama_folder: str) -> None:
    with Runtime.from_config({"runtime": {"run_dir": str(tmp_path / "run")}}) as runtime:
        first = Pair(runtime, tied_llama_folder, "first")
        first.update(0)
        folder = str(tmp_path / "saved" / "KIND")
        first.call("save_checkpoint", folder)
        writing = {
            kind: group.submit("finish_checkpoint", timeout=60) for kind, group in first.groups.items()
        }
        expected = [first.update(seed) for seed in (1, 2, 3)]
        for kind, call in writing.items():
            parts = call.result()
            files = list((tmp_path / "saved" / kind).iterdir())
            digests = {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files}
            assert [len(part) for part in parts] == [2, 2]
            assert parts[0] | parts[1] == digests
        first.call("save_checkpoint", folder + "-next")
        first.call("finish_checkpoint")
        for group in first.groups.values():
            group.close()

        again = Pair(runtime, tied_llama_folder, "again")
        with pytest.raises(ConfigError, match="nowhere/policy cannot be read as a checkpoint"):
            again.call("load_checkpoint", str(tmp_path / "nowhere" / "KIND"))
        again.call("load_checkpoint", folder)
        assert [again.update(seed) for seed in (1, 2, 3)] == expected
    assert wait_until_clean(runtime.run_id, None, 2.0) == []


def test_closing_does_not_wait_for_a_write(tmp_path: Path, llama_folder: str) -> None:
    with Runtime.from_config({"runtime": {"run_dir": str(tmp_path / "run")}}) as runtime:
        pair = Pair(runtime, llama_folder, "closed")
        pair.call("save_checkpoint", str(tmp_path / "saved" / "KIND"))
    assert wait_until_clean(runtime.run_id, None, 2.0) == []
