"""The core of a container, driven as a backend drives it: no engine, no other process."""

from __future__ import annotations

import asyncio
import contextvars
import os
import queue
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from meshes.common import core as module
from meshes.common.core import ContainerCore, ContainerSpec, ProcessStore
from neoproto.errors import GroupBroken, RuntimeClosed
from neoproto.runtime.executor import InitArguments
from neoproto.runtime.relay import AttachSpec, Origin, Request
from neoproto.runtime.wire import INIT, LAST, CallHeader, RemoteFailure, decode, decode_failure, encode
from neoproto.runtime.worker import Worker, WorkerIdentity
from neoproto.store.base import active_store, set_process_store

SPEC = ContainerSpec(
    group_name="g",
    nnodes=2,
    processes_per_node=2,
    public=False,
    log_dir="/logs",
    attach=AttachSpec(run_id="r", run_dir=Path("/run"), placement=None, key="g-1"),
)


@pytest.fixture(autouse=True)
def own_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What a worker process is for good, this one is not."""
    monkeypatch.setattr(module, "attach_process", lambda runtime: None)
    yield
    set_process_store(None)


class Doubler(Worker):
    def double(self, value: int) -> tuple[int, int]:
        return self.rank, 2 * value


class Backend:
    """Carries messages of one process, as a backend does."""

    def __init__(self, rank: int) -> None:
        self.requests: queue.SimpleQueue[tuple[Origin, Request]] = queue.SimpleQueue()
        self.replies: queue.SimpleQueue[RemoteFailure | bytes] = queue.SimpleQueue()
        self.core = ContainerCore(SPEC, rank, None, lambda *asked: self.requests.put(asked))

    async def call(self, method: str, payload: bytes, sequence: int) -> Any:
        self.core.take(
            CallHeader(call_id=1, role="", method=method, sequence=sequence), payload, self.replies.put
        )
        outcome = await asyncio.to_thread(self.replies.get, timeout=30)
        if isinstance(outcome, RemoteFailure):
            raise decode_failure(outcome)
        return decode(outcome)


def test_a_process_is_built_called_drained_and_closed() -> None:
    async def life() -> None:
        backend = Backend(rank=3)
        core = backend.core
        assert core.identity == WorkerIdentity(
            rank=3,
            world_size=4,
            local_rank=1,
            node_rank=1,
            group_name="g",
            log_path="/logs/rank3.log",
            run_id="r",
        )
        info = core.info()
        assert (info.rank, info.pid, info.rendezvous) == (3, os.getpid(), None)
        init = InitArguments(classes={"": (Doubler, (), {})}, rendezvous=("localhost", 1))
        await backend.call(INIT, encode(init), 0)
        assert await backend.call("double", encode(((21,), {})), 1) == (3, 42)
        assert core.call_status(1).state == "unknown"
        assert core.mesh_places("") == {}
        assert not await core.drain(0.0), "the last call has not come"
        core.take(CallHeader(call_id=0, role="", method=LAST), b"", backend.replies.put)
        assert await core.drain(30.0)
        core.close()
        with pytest.raises(RuntimeClosed):
            core.runtime.create_resource_pool()

    asyncio.run(life())


def test_rank_0_listens_for_its_group_and_a_broken_group_refuses() -> None:
    async def life() -> None:
        backend = Backend(rank=0)
        host, port = backend.core.info().rendezvous or ("", 0)
        assert (host, port > 0) == ("127.0.0.1", True)
        backend.core.break_off("a call overran")
        with pytest.raises(GroupBroken, match="a call overran"):
            await backend.call("double", encode(((1,), {})), 0)
        backend.core.close()

    asyncio.run(life())


def test_what_a_worker_asks_goes_to_the_root_with_who_asks() -> None:
    async def life() -> None:
        backend = Backend(rank=2)
        asked = asyncio.create_task(asyncio.to_thread(backend.core.runtime.create_resource_pool, name="p"))
        origin, _ = await asyncio.to_thread(backend.requests.get, timeout=30)
        assert origin == Origin(key="g-1", rank=2)
        backend.core.close()
        with pytest.raises(RuntimeClosed, match="this worker is shutting down"):
            await asked

    asyncio.run(life())


class Client:
    def __init__(self) -> None:
        self.failed: list[str] = []

    def fail(self, reason: str) -> None:
        self.failed.append(reason)


IDENTITY = WorkerIdentity(
    rank=0, world_size=1, local_rank=0, node_rank=0, group_name="g", log_path="", run_id="r"
)


def test_the_store_is_attached_once_when_it_is_first_used_where_the_process_was_made() -> None:
    where: contextvars.ContextVar[str] = contextvars.ContextVar("where", default="nowhere")
    made: list[tuple[Client, WorkerIdentity, str]] = []

    def attach(identity: WorkerIdentity) -> Any:
        made.append((Client(), identity, where.get()))
        return made[-1][0]

    where.set("in the actor")
    store = ProcessStore(attach, IDENTITY)
    where.set("nowhere")
    assert made == []
    users = [threading.Thread(target=active_store) for _ in range(4)]
    for user in users:
        user.start()
    for user in users:
        user.join(30)
    assert [(identity, found) for _, identity, found in made] == [(IDENTITY, "in the actor")]
    assert active_store() is made[0][0]
    store.fail("a volume died")
    assert made[0][0].failed == ["a volume died"]


def test_a_client_that_is_made_after_the_stores_death_fails_at_once() -> None:
    client: Any = Client()
    store = ProcessStore(lambda identity: client, IDENTITY)
    store.fail("a volume died")
    assert client.failed == []
    assert active_store() is client
    assert client.failed == ["a volume died"]


def test_a_run_without_a_store_has_none() -> None:
    ProcessStore(None, IDENTITY).fail("nobody cares")
    assert active_store() is None
