"""Rollout processes inside the test's own, for the tests of replicas and of who keeps them alive.

A process answers calls as a worker group of one does, serves what it has loaded under its own name, and can
be made to die, to hang, or to fail in one method. The registry is the real one.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any
from unittest import mock

from neoproto.data import DataProto
from neoproto.errors import DeadlineExceeded, WorkerDied
from neoproto.trainer import supervision
from neoproto.trainer.replicas import ReplicaSet
from neoproto.trainer.supervision import SupervisionOptions, Supervisor
from neoproto.trainer.tasks import beside
from neoproto.weights import Manifest, WeightRegistry, WeightVersion
from tests import virtual_time
from tests.neoproto.trainer.fakes import FakeHandle
from tests.neoproto.trainer.replay import answers, version

SIGKILL = "signal 9 (SIGKILL)"


class FakeCall:
    """Goes on when nobody awaits it any more, as a `RemoteCall` does, unless it is cancelled."""

    def __init__(self, ended: asyncio.Future[Any]) -> None:
        self._ended = ended

    def __await__(self) -> Generator[Any, None, Any]:
        return asyncio.shield(self._ended).__await__()

    def cancel(self) -> None:
        self._ended.cancel()


class Process:
    """A group of one process.

    Attributes:
        methods_called: in order.
        failures: what a method raises when it is called next.
        gates: a method does not go on before its gate is open.
        served: the version it generates on.
    """

    world_size = 1

    def __init__(self, name: str, registry: WeightRegistry, n: int = 1) -> None:
        self.name, self._registry, self._n = name, registry, n
        self.methods_called: list[str] = []
        self.failures: dict[str, Exception] = {}
        self.gates: dict[str, asyncio.Event] = {}
        self.served: WeightVersion | None = None
        self.death: WorkerDied | None = None
        self.closed = False
        self.uids: list[str] = []
        self.running: dict[asyncio.Future[Any], str] = {}
        self._work: dict[asyncio.Future[Any], asyncio.Task[Any]] = {}

    def submit(
        self,
        method: str,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        timeout: float | None = None,
    ) -> FakeCall:
        if self.death is not None:
            raise self.death
        self.methods_called.append(method)
        loop = asyncio.get_running_loop()
        call, work = loop.create_future(), loop.create_task(self._run(method, args, timeout))
        self.running[call], self._work[call] = method, work

        def worked(_: asyncio.Task[Any]) -> None:
            if call.done() or work.cancelled():
                return
            if (error := work.exception()) is not None:
                call.set_exception(error)
            else:
                call.set_result(work.result())

        def ended(_: asyncio.Future[Any]) -> None:
            self.running.pop(call, None)
            self._work.pop(call, None)
            work.cancel()

        work.add_done_callback(worked)
        call.add_done_callback(ended)
        return FakeCall(call)

    def close(self, drain_s: float) -> None:
        self.closed = True

    def die(self) -> None:
        """As by a signal: what runs there ends with the death. The answer of what has ended is on its way."""
        self.death = WorkerDied(self.name, 0, "here", SIGKILL)
        for call in list(self.running):
            if not call.done() and not self._work[call].done():
                call.set_exception(self.death)

    async def _run(self, method: str, args: Sequence[Any], timeout: float | None) -> Any:
        try:
            async with asyncio.timeout(timeout):
                if method in self.gates:
                    await self.gates[method].wait()
                if method in self.failures:
                    raise self.failures.pop(method)
                return await getattr(self, method)(*args)
        except TimeoutError as error:
            raise DeadlineExceeded(method, self.name, [0], timeout or 0.0) from error

    async def ping(self) -> None: ...

    async def attach_registry(self, registry: Any, replica: str) -> None:
        assert (registry, replica) == ("the registry", self.name)

    async def update_weights(self, wanted: WeightVersion) -> None:
        latest = await self._registry.latest()
        assert latest is not None
        assert latest.version >= wanted
        await self.serve(latest.version)

    async def serve(self, served: WeightVersion) -> None:
        self.served = served
        await self._registry.report_serving(self.name, served)

    async def run_agent(self) -> None:
        while True:
            newest = await self._registry.wait_newer(self.served, 1.0)
            if newest is not None:
                await self.serve(newest)

    async def generate_sequences(self, prompts: DataProto) -> DataProto:
        assert self.served is not None
        await asyncio.sleep(0)
        uids = [str(uid) for uid in prompts["uid"]]
        self.uids += uids
        rows = [uid for uid in uids for _ in range(self._n)]
        return answers(rows, [[self.served.n] for _ in rows])


def handle(process: Process) -> Any:
    """What its holder calls it by."""
    return FakeHandle(process)


class Cluster:
    """Replicas and their supervision; a test changes what it is about before `run`.

    Attributes:
        processes: all that were ever started, in order.
        spawn_failures: what the next starts raise.
        spawn_gate: a start does not go on before it is open.
        told: lines for a person.
    """

    def __init__(self, count: int = 2, *, n: int = 1, **options: Any) -> None:
        self.registry, self._n = WeightRegistry(), n
        self.processes: list[Process] = [self.process(f"rollout-{index}") for index in range(count)]
        self.spawn_failures: list[Exception] = []
        self.spawn_gate = threading.Event()
        self.spawn_gate.set()
        self.spawned: list[int] = []
        self.told: list[str] = []
        self.set = ReplicaSet("rollout", [handle(one) for one in self.processes[:count]], self.registry)
        usual: dict[str, Any] = {
            "max_restarts": 3,
            "heartbeat_interval": 0.01,
            "heartbeat_timeout": 0.2,
            "start_limit": 5.0,
            "load_timeout": 5.0,
            "agents": False,
        }
        self.supervisor = Supervisor(
            self.set,
            self.registry,
            "the registry",
            lambda index: self.spawn(index),
            SupervisionOptions(**(usual | options)),
            print_line=self.told.append,
        )

    def process(self, name: str) -> Process:
        return Process(name, self.registry, self._n)

    def spawn(self, index: int) -> Any:
        self.spawned.append(index)
        assert self.spawn_gate.wait(10)
        if self.spawn_failures:
            raise self.spawn_failures.pop(0)
        made = self.process(f"rollout-{index}-{1 + len(self.spawned)}")
        self.processes.append(made)
        return handle(made)

    async def publish(self, n: int) -> WeightVersion:
        await self.registry.publish(Manifest(version=version(n), entries=(), buckets=(), bucket_bytes=()))
        return version(n)

    async def until(self, holds: Callable[[], bool]) -> None:
        async with asyncio.timeout(60):  # only a hang takes so long, on a busy machine too
            while not holds():  # noqa: ASYNC110 -- what is looked at has no event
                await asyncio.sleep(0.001)

    def run(self, play: Callable[[], Any]) -> Any:
        """Supervise while `play` runs; what ends the supervision is the test's."""

        async def main() -> Any:
            async with asyncio.timeout(15):
                return await self._supervised(play)

        return asyncio.run(main())

    def run_on_virtual_time(self, play: Callable[[], Any]) -> Any:
        """`run`, where starting and closing a process take no time and waiting costs none."""

        async def at_once(work: Callable[[], Any], **_: Any) -> Any:
            return work()

        with mock.patch.object(supervision, "on_thread", at_once):
            return virtual_time.run(lambda: self._supervised(play))

    async def _supervised(self, play: Callable[[], Any]) -> Any:
        result = await beside(play(), {"the supervision": self.supervisor.run()})
        await asyncio.sleep(0)
        return result

    async def bring_up(self, n: int = 0) -> None:
        """The first version, served by all."""
        await self.set.within(5).update_weights(await self.publish(n))
