"""What one rank of `test_two_ranks` runs: python -m tests.actors.rank_program RANK WORLD_SIZE FOLDER.

FOLDER holds the model (`model/`), receives the ranks' rendezvous file, the saved model of the policy
(`saved/`), and `out{WORLD_SIZE}_{RANK}.pt` with everything that the test compares.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from actors.training.critic import Critic, CriticOptions
from actors.training.policy import Policy, PolicyOptions
from actors.training.ranks import Ranks, join_ranks
from actors.training.torch_model import ModelOptions, gathered_state, named_weights
from actors.training.updates import TrainOptions
from neoproto.config import ActorConfig, CriticConfig, OptimConfig
from neoproto.errors import NonFiniteLoss
from neoproto.store import MemoryStore
from neoproto.weights import Publisher, WeightOptions, WeightVersion
from tests.actors.tiny_llama import make_batch


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
    whole = make_batch(24, empty=(0, 7))
    share = 24 // world_size
    columns = {name: column[rank * share : (rank + 1) * share] for name, column in whole.items()}
    found = train(ranks, folder, columns) | fail(ranks, folder, columns)
    torch.save(found, folder / f"out{world_size}_{rank}.pt")
    if world_size > 1:
        dist.destroy_process_group()


TRAINING: dict[str, Any] = {
    "ppo_mini_batch_size": 12,
    "ppo_micro_batch_size_per_gpu": 4,
    "ppo_epochs": 2,
    "shuffle": True,
    "optim": OptimConfig(lr=1e-3, eps=1e-3),
}
TRAIN = TrainOptions(total_steps=10)


def make_policy(ranks: Ranks, folder: Path) -> Policy:
    model = ModelOptions(path=str(folder / "model"))
    actor = ActorConfig(**TRAINING, entropy_coeff=0.1, use_kl_loss=True)
    return Policy(PolicyOptions(model=model, actor=actor, train=TRAIN), ranks)


def train(ranks: Ranks, folder: Path, columns: dict[str, torch.Tensor]) -> dict[str, Any]:
    policy = make_policy(ranks, folder)
    model = ModelOptions(path=str(folder / "model"))
    critic = Critic(CriticOptions(model=model, critic=CriticConfig(**TRAINING), train=TRAIN), ranks)
    policy_figures = policy.update(columns)
    critic_figures = critic.update(columns)
    if ranks.world_size > 1:
        policy.save(str(folder / "saved"))
    store = MemoryStore()
    publisher = Publisher(store, options=WeightOptions(bucket_bytes=4096), peers=ranks)
    manifest = publisher.publish(WeightVersion(epoch=0, n=1), named_weights(policy.model))
    return {
        "policy_figures": policy_figures,
        "critic_figures": critic_figures,
        "log_probs": policy.log_probs(columns),
        "values": critic.values(columns),
        "policy": gathered_state(policy.model, ranks),
        "critic": gathered_state(critic.model, ranks),
        "published": manifest,
        "buckets": dict(zip(store.keys(), store.get_batch(store.keys()), strict=True)),
    }


def fail(ranks: Ranks, folder: Path, columns: dict[str, torch.Tensor]) -> dict[str, Any]:
    """NaNs on rank 0 alone: every rank must raise, and none may step."""
    policy = make_policy(ranks, folder)
    advantages = columns["advantages"].clone()
    if ranks.rank == 0:
        advantages[:] = math.nan
    before = gathered_state(policy.model, ranks)
    try:
        policy.update(columns | {"advantages": advantages})
    except NonFiniteLoss as error:
        message = str(error)
    after = gathered_state(policy.model, ranks)
    return {"message": message, "unchanged": all(torch.equal(before[name], after[name]) for name in before)}


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
