"""A worker of your own: a reward model on two ranks, placed by a topology, trained and asked by calls.

python docs/examples/reward_model.py
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from neoproto.data import DataProto
from neoproto.runtime import ClassWithInitArgs, Dispatch, Runtime, Worker, register

TOPOLOGY = {
    "clusters": [{"name": "here", "nnodes": 1, "n_gpus_per_node": 2, "device_type": "cpu"}],
    "device_pools": [{"name": "judges", "cluster": "here", "nnodes": 1, "n_gpus_per_node": 2}],
    "models": [{"name": "reward_model", "worker": "reward_model", "resource_pool": "judges"}],
}


class RewardModel(Worker):
    """Says how good a sequence of tokens is; learns it from pairs of a better and a worse one."""

    def __init__(self, vocabulary: int, lr: float) -> None:
        torch.manual_seed(0)  # the same start on every rank
        dist.init_process_group(
            "gloo", store=self.process_store(), rank=self.rank, world_size=self.world_size
        )
        self.model = nn.Sequential(nn.EmbeddingBag(vocabulary, 16), nn.Tanh(), nn.Linear(16, 1))
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=lr)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_METRIC)
    def fit(self, pairs: DataProto) -> float:
        """One step on this rank's share of the pairs (Bradley-Terry); the loss of the share."""
        gap: Tensor = self.model(pairs["better"]) - self.model(pairs["worse"])
        loss = -nn.functional.logsigmoid(gap).mean()
        self.optimizer.zero_grad()
        loss.backward()
        for parameter in self.model.parameters():
            assert parameter.grad is not None
            dist.all_reduce(parameter.grad)
            parameter.grad /= self.world_size
        self.optimizer.step()
        return loss.item()

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, pad=True)
    def score(self, batch: DataProto) -> DataProto:
        """`rewards`, float32 [B], of `tokens`, int64 [B, T]; rows are shared out and put together again."""
        with torch.no_grad():
            return DataProto.from_dict({"rewards": self.model(batch["tokens"]).squeeze(1)})


def pairs_of_tokens(count: int, seed: int) -> DataProto:
    """Better sequences use small tokens, worse ones large ones, mostly."""
    random = torch.Generator().manual_seed(seed)
    better = torch.randint(0, 24, (count, 12), generator=random)
    worse = torch.randint(8, 32, (count, 12), generator=random)
    return DataProto.from_dict({"better": better, "worse": worse})


def main() -> None:
    with Runtime.from_config({"topology": TOPOLOGY}) as runtime:
        group = runtime.create_worker_group(
            ClassWithInitArgs(RewardModel, 32, lr=0.02),
            on=runtime.model_resource_pool("reward_model"),
            name="reward_model",
        )
        for step in range(60):
            losses = group.submit("fit", (pairs_of_tokens(64, seed=step),), timeout=60).result()
        print(f"loss {sum(losses) / len(losses):.3f} on {len(losses)} ranks")
        held_out = pairs_of_tokens(
            101, seed=1000
        )  # an odd number: padded to the ranks, and the padding removed
        calls = [
            group.submit("score", (DataProto.from_dict({"tokens": held_out[name]}),), timeout=60)
            for name in ("better", "worse")
        ]
        better, worse = (call.result()["rewards"] for call in calls)
        print(f"{(better > worse).double().mean():.2f} of {len(better)} held-out pairs in the right order")


if __name__ == "__main__":
    main()
