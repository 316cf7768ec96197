"""What policy, critic and reference workers share as processes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from actors.training.ranks import join_ranks
from neoproto.data import DataProto
from neoproto.runtime import Worker


@dataclass(frozen=True, kw_only=True, slots=True)
class TorchOptions:
    """How torch runs in a worker process.

    Attributes:
        seed: of torch's global generator.
        num_threads: threads of one operation on the CPU; None leaves torch's choice.
        device_type: "cpu" or "cuda"; None takes a GPU if the machine has one.
        collective_timeout_s: bound on every collective between the ranks.
    """

    seed: int = 0
    num_threads: int | None = 1
    device_type: str | None = None
    collective_timeout_s: float = 1800.0


class TorchWorker(Worker):
    """A worker whose ranks are data parallel in one torch.distributed group.

    Attributes:
        ranks: this process's place in it.
    """

    def __init__(self, options: TorchOptions) -> None:
        if options.num_threads is not None:
            torch.set_num_threads(options.num_threads)
        torch.manual_seed(options.seed)
        self.ranks = join_ranks(
            self.rank,
            self.world_size,
            self.local_rank,
            self.process_store,
            device_type=options.device_type,
            timeout_s=options.collective_timeout_s,
        )

    def read(self, batch: DataProto, columns: Sequence[str]) -> dict[str, Tensor]:
        """The named columns of this rank's rows, and no other bytes."""
        found = batch.materialize(keys=list(columns), device=self.ranks.device)
        return {name: torch.as_tensor(column) for name, column in found.items()}
