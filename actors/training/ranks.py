"""The ranks of one torch worker group: their numbers, the device of tensors, how sums are formed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store


@dataclass(frozen=True, kw_only=True, slots=True)
class Ranks:
    """This process's place in its group.

    Attributes:
        rank, world_size: as in torch.distributed; the ranks are data parallel.
        device: where this rank computes.
    """

    rank: int = 0
    world_size: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    def sum(self, values: Tensor) -> Tensor:
        """Elementwise sum over all ranks, the same bits on each; collective. Any shape; in place."""
        if self.world_size > 1:
            dist.all_reduce(values)
        return values

    def exchange(self, value: Any) -> list[Any]:
        """Every rank's value, by rank, on each; collective. For small values: they are pickled."""
        if self.world_size == 1:
            return [value]
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value)
        return values

    def barrier(self) -> None:
        """Wait for the other ranks."""
        if self.world_size > 1:
            dist.barrier()


def join_ranks(
    rank: int,
    world_size: int,
    local_rank: int,
    rendezvous: Callable[[], Store],
    *,
    device_type: str | None = None,
    timeout_s: float = 1800.0,
) -> Ranks:
    """Make this process a member of its group: NCCL among GPUs, gloo otherwise; alone, no group at all.

    Args:
        rendezvous: gives the store through which the ranks find each other; called only if there are several.
        device_type: "cpu" or "cuda"; None takes a GPU if the machine has one.
        timeout_s: bound on every collective.
    """
    device_type = device_type or ("cuda" if torch.cuda.is_available() else "cpu")
    device = torch.device(device_type, local_rank) if device_type == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if world_size > 1:
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
            store=rendezvous(),
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=timeout_s),
        )
    return Ranks(rank=rank, world_size=world_size, device=device)
