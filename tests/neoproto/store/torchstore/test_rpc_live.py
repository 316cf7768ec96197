"""Calls past endpoints, on inboxes of one process: a thread each, and everything pickled, but no actors."""

import asyncio
import pickle
import queue
import threading
from typing import ClassVar

import pytest

from neoproto.errors import StoreError, StoreFull
from neoproto.store.torchstore import rpc as line
from neoproto.store.torchstore.rpc import RpcClient, RpcServer


class Inbox:
    known: ClassVar[dict[bytes, "Inbox"]] = {}

    def __init__(self, name, sink):
        self.address, self.sink, self.messages = name.encode(), sink, queue.SimpleQueue()
        Inbox.known[self.address] = self
        threading.Thread(target=self.run, daemon=True).start()

    def run(self):
        while message := pickle.loads(self.messages.get()):
            self.sink(*message)

    def send(self, message, address):
        if address in Inbox.known:
            Inbox.known[address].messages.put(pickle.dumps(message))

    def close(self):
        self.send((), self.address)


async def endless():
    await asyncio.sleep(60)


class Methods:
    def add(self, a, b):
        return a + b

    async def slow(self, seconds):
        await asyncio.sleep(seconds)
        return seconds

    def full(self):
        raise StoreFull("no room")

    async def odd(self):
        raise ZeroDivisionError("odd")


@pytest.fixture
def talk(monkeypatch):
    """Runs a coroutine function with a caller and a switchboard."""
    monkeypatch.setattr(line, "Inbox", Inbox)
    monkeypatch.setattr(line, "_PATIENCE_S", 0.05)

    def run(body):
        async def main():
            methods = Methods()
            names = ("add", "slow", "full", "odd")
            board = RpcServer("board", {name: getattr(methods, name) for name in names})
            caller = RpcClient("caller")

            def call(method, *arguments, alive=endless, address=board.address):
                return caller.call(address, alive, method, arguments)

            try:
                return await body(call)
            finally:
                assert caller._waiting == {}
                caller.close()
                board._inbox.close()

        return asyncio.run(main())

    return run


def test_methods_answer_and_async_ones_overlap(talk):
    async def body(call):
        return await asyncio.gather(call("slow", 0.02), call("slow", 0.0), call("add", 1, 2))

    assert talk(body) == [0.02, 0.0, 3]


def test_errors_are_the_methods_own_or_named(talk):
    async def body(call):
        with pytest.raises(StoreFull, match="no room"):
            await call("full")
        with pytest.raises(StoreError, match="ZeroDivisionError: odd"):
            await call("odd")
        with pytest.raises(StoreError, match="KeyError: 'unheard of'"):
            await call("unheard of")

    talk(body)


def test_a_caller_waits_while_the_other_side_lives(talk):
    asked = []

    async def lives():
        asked.append(1)

    async def body(call):
        assert await call("slow", 0.4, alive=lives) == 0.4
        assert await call("slow", 0.2) == 0.2, "an answer is heard while the question is out"

    talk(body)
    assert len(asked) >= 2


def test_a_caller_of_the_dead_is_told(talk):
    async def is_dead():
        raise StoreError("it died")

    async def body(call):
        with pytest.raises(StoreError, match="it died"):
            await call("add", 1, 2, alive=is_dead, address=b"nobody")

    talk(body)


def test_a_caller_may_stop_waiting(talk):
    async def body(call):
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await call("slow", 0.3)
        assert await call("add", 2, 2) == 4

    talk(body)
