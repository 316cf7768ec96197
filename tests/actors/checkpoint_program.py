"""Policies and critics for the tests of checkpoints, and what one of several ranks runs of them.

    python -m tests.actors.checkpoint_program RANK WORLD_SIZE FOLDER

FOLDER holds the model (`model/`) and a checkpoint by one rank (`alone-{policy,critic}/`); it receives the
ranks' rendezvous file, their checkpoints (`pair-…/`), and `found_{RANK}.pt` with what the test compares.
"""

from __future__ import annotations

import asyncio
import random
import resource
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from actors.checkpoint.model import ModelCheckpointer
from actors.training.critic import Critic, CriticOptions
from actors.training.policy import Policy, PolicyOptions
from actors.training.ranks import Ranks, join_ranks
from actors.training.torch_model import ModelOptions
from actors.training.updates import TrainOptions
from neoproto.config import ActorConfig, CriticConfig, OptimConfig
from neoproto.weights.sharding import whole_tensor
from tests.actors.tiny_llama import make_batch

KINDS = ("policy", "critic")
ROWS = 16


class Trained:
    """A model in training with its checkpointer."""

    def __init__(self, kind: str, model: Path, ranks: Ranks | None = None, *, lr: float = 1e-3) -> None:
        ranks = ranks or Ranks()
        self.ranks = ranks
        options = ModelOptions(path=str(model))
        training: dict[str, Any] = {
            "ppo_mini_batch_size": 8,
            "ppo_micro_batch_size_per_gpu": 4,
            "ppo_epochs": 2,
            "shuffle": True,
            "optim": OptimConfig(lr=lr, lr_scheduler_type="cosine"),
        }
        train = TrainOptions(total_steps=10)
        self.trained: Policy | Critic
        if kind == "policy":
            actor = ActorConfig(**training)
            self.trained = Policy(PolicyOptions(model=options, actor=actor, train=train), ranks)
        else:
            critic = CriticConfig(**training)
            self.trained = Critic(CriticOptions(model=options, critic=critic, train=train), ranks)
        self.loop = self.trained.loop
        self.checkpoints = ModelCheckpointer(self.trained.model, self.loop, ranks, seed=3, timeout_s=60)

    def update(self, seed: int) -> dict[str, float]:
        """One update on the batch of that seed, of which every rank has its rows."""
        share = ROWS // self.ranks.world_size
        rows = slice(self.ranks.rank * share, (self.ranks.rank + 1) * share)
        whole = make_batch(ROWS, seed=seed)
        return self.trained.update({name: column[rows] for name, column in whole.items()})

    def finish(self) -> dict[str, str]:
        return asyncio.run(self.checkpoints.finish())

    def state(self) -> dict[str, Tensor]:
        """Whole weights and optimizer state by name, copied, and the count of updates; collective."""
        found = {"updates": torch.tensor(self.loop.updates)}
        for name, parameter in self.trained.model.named_parameters():
            found[name] = whole_tensor(parameter).detach().clone()
            for key, value in self.loop.optimizer.state.get(parameter, {}).items():
                found[f"{name}.{key}"] = whole_tensor(value).clone()
        return found


def differing(found: dict[str, Tensor], expected: dict[str, Tensor]) -> list[str]:
    """Names that are not in both with the same bits."""
    names = found.keys() | expected.keys()
    return sorted(
        name
        for name in names
        if name not in found or name not in expected or not torch.equal(found[name], expected[name])
    )


def draws() -> list[float]:
    """What the generators of this process give next."""
    return [float(torch.rand(())), random.random(), float(np.random.rand())]


def go_on(kind: str, ranks: Ranks, folder: Path) -> dict[str, Any]:
    """Train, save, train on; then load into a new one and train on the same: what differs."""
    first = Trained(kind, folder / "model", ranks)
    first.update(0)
    random.seed(ranks.rank)
    np.random.seed(ranks.rank)
    torch.manual_seed(ranks.rank)
    first.checkpoints.save(folder / f"pair-{kind}")
    drawn = draws()
    saved = first.state()
    figures = [first.update(seed) for seed in (1, 2)]  # while it is being written
    files = first.finish()
    again = Trained(kind, folder / "model", ranks)
    again.checkpoints.load(folder / f"pair-{kind}")
    return {
        "files": files,
        "saved": saved,
        "loaded": differing(again.state(), saved),
        "drawn": (draws(), drawn),
        "figures": ([again.update(seed) for seed in (1, 2)], figures),
        "end": differing(again.state(), first.state()),
    }


def load_of_another_world_size(kind: str, ranks: Ranks, folder: Path) -> dict[str, Tensor]:
    reader = Trained(kind, folder / "model", ranks)
    reader.checkpoints.load(folder / f"alone-{kind}")
    return reader.state()


def fail_on_one(ranks: Ranks, folder: Path) -> dict[str, Any]:
    """Rank 1 has no room for its file."""
    policy = Trained("policy", folder / "model", ranks)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    if ranks.rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    policy.checkpoints.save(folder / "failed")
    try:
        policy.finish()
    except OSError as error:
        failure = str(error)
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    policy.checkpoints.save(folder / "retried")
    return {"failure": failure, "retried": policy.finish()}


def refuse(ranks: Ranks, folder: Path) -> dict[str, Any]:
    """What only rank 1 finds wrong is raised on both, and neither changes anything."""
    policy = Trained("policy", folder / "model", ranks)
    policy.update(0)
    before = policy.state()
    path = folder / ("pair-policy" if ranks.rank == 0 else "nothing-here")
    try:
        policy.checkpoints.load(path)
    except ValueError as error:
        refusal = str(error)
    return {"refusal": refusal, "changed": differing(policy.state(), before)}


def main(rank: int, world_size: int, folder: Path) -> None:
    torch.set_num_threads(1)
    ranks = join_ranks(
        rank,
        world_size,
        rank,
        lambda: dist.FileStore(str(folder / "rendezvous"), world_size),
        device_type="cpu",
        timeout_s=60,
    )
    found = {
        "going_on": {kind: go_on(kind, ranks, folder) for kind in KINDS},
        "resharded": {kind: load_of_another_world_size(kind, ranks, folder) for kind in KINDS},
        "failing": fail_on_one(ranks, folder),
        "refusing": refuse(ranks, folder),
    }
    torch.save(found, folder / f"found_{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
