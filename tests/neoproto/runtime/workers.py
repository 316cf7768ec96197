"""Worker classes of the tests with an in-process runtime."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

from neoproto.runtime import Dispatch, RemoteWorkerGroup, Worker, mesh_dispatch, register

WAIT_S = 10.0
GATES: dict[str, threading.Event] = {}
"""What sync methods wait for, by name; the workers are threads of the test's process."""
ORDER: dict[int, list[Any]] = {}
"""What `Adder.note` was called with, by rank, in the order of its calls."""


class Adder(Worker):
    def __init__(self, start: int = 0) -> None:
        self.total = start
        self.running = asyncio.Event()

    def add(self, value: int) -> int:
        self.total += value
        return self.total

    @register(dispatch_mode=Dispatch.RANK_ZERO, blocking=False)
    def lead(self) -> int:
        return self.rank

    @register(dispatch_mode=Dispatch.ALL_TO_ALL)
    def own(self, value: int) -> tuple[int, int]:
        return self.rank, value

    def note(self, what: Any) -> None:
        ORDER.setdefault(self.rank, []).append(what)

    def fail(self, rank: int) -> None:
        if self.rank == rank:
            raise LookupError(f"no such thing on {rank}")

    def block(self, gate: str) -> str:
        GATES[f"{gate} is reached"].set()
        GATES[gate].wait(WAIT_S)
        return gate

    def time_left(self) -> float:
        return self.remaining()

    async def forever(self) -> None:
        await asyncio.Event().wait()

    def use(self, group: RemoteWorkerGroup, value: int) -> Any:
        return group.submit("add", (value,), blocking=True)

    def join_mesh(self) -> None:
        self.register_mesh("half", dp_rank=self.rank // 2, is_collect=self.rank % 2 == 0)

    @register(dispatch_mode=mesh_dispatch("half"))
    def in_mesh(self, batch: Any) -> Any:
        return batch


class BadStart(Worker):
    def __init__(self, rank: int) -> None:
        if self.rank == rank:
            raise OSError("no weights")
