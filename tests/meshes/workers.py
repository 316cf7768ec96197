"""Workers for live tests; importable, so that they travel by name."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import tempfile
import time
from collections.abc import Callable
from typing import Any

from neoproto.data import DataProto
from neoproto.errors import CallCancelled
from neoproto.runtime import (
    ClassWithInitArgs,
    Dispatch,
    Execute,
    RemoteWorkerGroup,
    ResourcePool,
    Runtime,
    Worker,
    WorkerGroup,
    current_runtime,
    get,
    mesh_dispatch,
    put,
    register,
)


class OddError(Exception):
    """Does not unpickle: its constructor takes two arguments, its pickle carries one."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(first + second)


class Probe(Worker):
    """Small methods to test the runtime with."""

    def __init__(self, start: int = 0, fail_on: int | None = None) -> None:
        print(f"rank {self.rank} of {self.world_size} starts", flush=True)
        self.total = start
        self.reductions = self.cancelled = 0
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

    def threads(self) -> tuple[int, int]:
        """Those that torch computes with, and those that OpenMP has on this thread after that."""
        import ctypes

        import torch

        torch.ones(1000, 1000).sum()
        with open("/proc/self/maps") as file:
            (path,) = {line.split()[5] for line in file if "libgomp" in line}
        return torch.get_num_threads(), int(ctypes.CDLL(path).omp_get_max_threads())

    def leave_a_file(self) -> str:
        return tempfile.mkstemp(prefix="left-")[1]

    def left(self) -> float:
        return self.remaining()

    async def where(self) -> int:
        return os.getpid()

    def reductions_done(self) -> int:
        return self.reductions

    def sleep(self, seconds: float) -> float:
        time.sleep(seconds)
        return seconds

    def hold_the_interpreter(self, seconds: int) -> None:
        import ctypes

        ctypes.PyDLL(None).sleep(seconds)  # a call that keeps the interpreter's lock

    def through_the_store(self, value: int) -> int:
        return int(get(put(value)))

    async def doze(self, seconds: float) -> float:
        try:
            await asyncio.sleep(seconds)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        return seconds

    async def cancellations(self) -> int:
        return self.cancelled

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
        self.reductions += 1
        return value.item()

    def die_in_a_collective(self, rank: int) -> float:
        self.all_reduce()
        if self.rank == rank:
            os.kill(os.getpid(), signal.SIGKILL)
        return self.all_reduce()

    @register(dispatch_mode=Dispatch.RANK_ZERO)
    def lead(self) -> int:
        return self.rank

    @register(dispatch_mode=Dispatch.ALL_TO_ALL)
    def own(self, value: int) -> tuple[int, int]:
        return self.rank, value


class Caller(Worker):
    """Calls other groups from where it runs."""

    def __init__(self) -> None:
        self.group: WorkerGroup | None = None
        self.other: RemoteWorkerGroup | None = None

    async def pid(self) -> int:
        return os.getpid()

    def keep(self, other: RemoteWorkerGroup) -> None:
        self.other = other

    def call_often(self, other: RemoteWorkerGroup, times: int) -> list[list[float]]:
        calls = [other.submit("all_reduce", timeout=120) for _ in range(times)]
        return [call.result() for call in calls]

    async def call_on_the_loop(self, method: str, args: tuple[Any, ...], timeout: float) -> Any:
        assert self.other is not None
        return await self.other.submit(method, args, timeout=timeout)

    async def cancel_a_call(self) -> list[object]:
        """Cancel a call that runs, from here; then what there is to see of it."""
        assert self.other is not None
        call = self.other.submit("doze", (60.0,), timeout=90)
        await self.other.submit("cancellations")  # sent after it, so it runs by now
        cancelled = call.cancel()
        try:
            await call
        except CallCancelled as error:
            return [cancelled, str(error), call.cancel(), await self.other.submit("cancellations")]
        raise AssertionError("a cancelled call ended otherwise")

    def call(self, method: str, *args: Any) -> Any:
        assert self.other is not None
        return self.other.submit(method, args).result()

    def make(self, pool: ResourcePool, name: str) -> list[int]:
        self.group = current_runtime().create_worker_group(ClassWithInitArgs(Probe, 5), on=pool, name=name)
        self.other = self.group
        return [one["pid"] for one in self.group.whoami()]

    def make_on(self, name: str, **size: Any) -> list[int]:
        return self.make(current_runtime().create_resource_pool(**size), name)

    def make_broken(self, pool: ResourcePool) -> None:
        current_runtime().create_worker_group(ClassWithInitArgs(Probe, fail_on=0), on=pool, name="broken")

    def drop(self) -> None:
        self.group = self.other = None
        gc.collect()

    def close_group(self) -> None:
        assert self.group is not None
        self.group.close()

    def attempt(self, what: str) -> str:
        """What a worker may not do; the error's name and text."""
        try:
            if what == "root":
                Runtime.from_config({})
            elif what == "actor_mesh":
                assert self.group is not None
                self.group.actor_mesh  # noqa: B018 - it raises
            else:
                current_runtime().close()
        except RuntimeError as error:
            return f"{type(error).__name__}: {error}"
        return "done"

    def store_round(self) -> int:
        return int(get(put(41)) + 1)

    def root_clients(self) -> bool:
        """Whether this process has a root client of Monarch's."""
        from monarch._src.actor.actor_mesh import _client_context

        return _client_context.try_get() is not None


def deal(group: RemoteWorkerGroup, word: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return ([f"{word}{rank}" for rank in range(group.world_size)],), {}


class Modes(Worker):
    """A method for each way of dispatch. Ranks 0 and 1 share a data-parallel rank."""

    def __init__(self) -> None:
        self.register_mesh("train", dp_rank=self.rank // 2, is_collect=self.rank != 1)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def one_to_all(self, values: list[int], key: str) -> tuple[int, list[int], str]:
        return self.rank, values, key

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, execute_mode=Execute.RANK_ZERO)
    def executed_on_rank_zero(self) -> int:
        return self.rank

    @register(dispatch_mode=Dispatch.ALL_TO_ALL)
    async def all_to_all(self, value: int) -> tuple[int, int]:
        return self.rank, value

    @register(dispatch_mode=Dispatch.DP_COMPUTE, blocking=False)
    def dp_compute(self, value: int, key: str) -> tuple[int, int, str]:
        return self.rank, value, key

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, pad=True)
    def proto(self, batch: DataProto, by: int) -> DataProto:
        return DataProto.from_dict({"y": by * batch["x"]})

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def proto_unpadded(self, batch: DataProto) -> DataProto:
        return batch

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO_WITH_FUNC, pad=True)
    async def with_func(self, function: Callable[[DataProto], DataProto], batch: DataProto) -> DataProto:
        return function(batch)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_METRIC, pad=True)
    def metric(self, batch: DataProto) -> int:
        return len(batch)

    @register(dispatch_mode=Dispatch.RANK_ZERO)
    def rank_zero(self, *, key: str) -> tuple[int, str]:
        return self.rank, key

    @register(dispatch_mode=mesh_dispatch("train"), pad=True)
    def by_mesh(self, batch: DataProto) -> list[tuple[int, int]]:
        return [(self.rank, value) for value in batch["x"].tolist()]

    @register(dispatch_mode=mesh_dispatch("nowhere"))
    def by_no_mesh(self, batch: DataProto) -> None: ...

    @register(dispatch_mode={"dispatch_fn": deal, "collect_fn": lambda group, results: "+".join(results)})
    def custom(self, word: str) -> str:
        return f"{self.rank}:{word}"


class Greeter(Worker):
    """Another class, for fused roles."""

    def __init__(self, word: str) -> None:
        self.word = word

    def greet(self, name: str) -> str:
        return f"{self.word} {name} from {self.rank} in {os.getpid()}"
