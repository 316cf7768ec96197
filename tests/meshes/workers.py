"""Workers for live tests; importable, so that they travel by name."""

from __future__ import annotations

import asyncio
import os
import time

from neoproto.runtime import Worker, register
from neoproto.runtime.registration import Dispatch


class OddError(Exception):
    """Does not unpickle: its constructor takes two arguments, its pickle carries one."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(first + second)


class Probe(Worker):
    """Small methods to test the runtime with."""

    def __init__(self, start: int = 0, fail_on: int | None = None) -> None:
        print(f"rank {self.rank} of {self.world_size} starts", flush=True)
        self.total = start
        if fail_on is not None:
            if self.rank == fail_on:
                raise LookupError(f"no data on rank {self.rank}")
            time.sleep(60)

    def add(self, value: int) -> int:
        self.total += value
        return self.total

    async def echo(self, value: object) -> object:
        return value

    def whoami(self) -> dict[str, object]:
        return {
            "rank": self.rank,
            "local_rank": self.local_rank,
            "node_rank": self.node_rank,
            "world_size": self.world_size,
            "pid": os.getpid(),
            "log_path": self.log_path,
        }

    def environment(self, name: str) -> str | None:
        return os.environ.get(name)

    def left(self) -> float:
        return self.remaining()

    def sleep(self, seconds: float) -> float:
        time.sleep(seconds)
        return seconds

    async def doze(self, seconds: float) -> float:
        await asyncio.sleep(seconds)
        return seconds

    def fail(self, text: str) -> None:
        raise KeyError(text)

    def fail_oddly(self) -> None:
        raise OddError("a", "b")

    def write(self, text: str) -> None:
        os.write(1, f"native {text}\n".encode())
        os.write(2, f"error {text}\n".encode())
        print(f"python {text}", flush=True)

    def all_reduce(self) -> float:
        import torch
        import torch.distributed as dist

        if not dist.is_initialized():
            dist.init_process_group(
                "gloo", store=self.process_store(), rank=self.rank, world_size=self.world_size
            )
        value = torch.tensor([float(self.rank + 1)])
        dist.all_reduce(value)
        return value.item()

    @register(dispatch_mode=Dispatch.RANK_ZERO)
    def lead(self) -> int:
        return self.rank

    @register(dispatch_mode=Dispatch.ALL_TO_ALL)
    def own(self, value: int) -> tuple[int, int]:
        return self.rank, value
