"""Calls past endpoints, on real ports of this process: both ends run on one event loop, no actors."""

import asyncio

import pytest

from neoproto.errors import StoreError, StoreFull
from neoproto.private_api import monarch as private
from neoproto.private_api.monarch_ports import Inbox
from neoproto.store.torchstore.rpc import RpcClient, RpcServer

pytestmark = pytest.mark.live


async def never():
    await asyncio.Event().wait()


class Methods:
    """What is served: `hold` answers when the test sets `release`, and sets `held` before."""

    def __init__(self):
        self.held, self.release = asyncio.Event(), asyncio.Event()

    def add(self, a, b):
        return a + b

    async def hold(self):
        self.held.set()
        await self.release.wait()
        return "released"

    def full(self):
        raise StoreFull("no room")

    async def odd(self):
        raise ZeroDivisionError("odd")


@pytest.fixture
def talk():
    """Runs a coroutine function with a function that calls, and the methods that are called."""
    private.pin_context(client=True)

    def run(body):
        async def main():
            methods = Methods()
            names = ("add", "hold", "full", "odd")
            server = RpcServer("server", {name: getattr(methods, name) for name in names})
            client = RpcClient("client", patience_s=0.05)

            def call(method, *arguments, alive=never, address=server.address):
                return client.call(address, alive, method, arguments)

            try:
                async with asyncio.timeout(60):
                    await body(call, methods)
            finally:
                assert len(client) == 0, "every call that has ended is forgotten"
                client.close()

        asyncio.run(main())

    return run


def test_methods_answer_and_async_ones_overlap(talk):
    async def body(call, methods):
        held = asyncio.ensure_future(call("hold"))
        await methods.held.wait()
        assert await call("add", 1, 2) == 3
        assert not held.done()
        methods.release.set()
        assert await held == "released"

    talk(body)


def test_errors_are_the_methods_own_or_named(talk):
    async def body(call, methods):
        with pytest.raises(StoreFull, match="no room"):
            await call("full")
        with pytest.raises(StoreError, match="ZeroDivisionError: odd"):
            await call("odd")
        with pytest.raises(StoreError, match="KeyError: 'unheard of'"):
            await call("unheard of")

    talk(body)


def test_a_caller_waits_while_the_other_side_lives(talk):
    async def body(call, methods):
        asked = []

        async def lives():
            asked.append(1)
            if len(asked) == 3:
                methods.release.set()

        assert await call("hold", alive=lives) == "released"
        assert len(asked) >= 3

    talk(body)


def test_an_answer_is_taken_while_the_question_is_out(talk):
    async def body(call, methods):
        async def answers_never():
            methods.release.set()
            await never()

        assert await call("hold", alive=answers_never) == "released"

    talk(body)


def test_a_caller_of_the_dead_is_told(talk):
    async def body(call, methods):
        gone = Inbox("gone")
        gone.close()

        async def is_dead():
            raise StoreError("it died")

        with pytest.raises(StoreError, match="it died"):
            await call("add", 1, 2, alive=is_dead, address=gone.address)

    talk(body)


def test_a_caller_may_stop_waiting(talk):
    async def body(call, methods):
        held = asyncio.ensure_future(call("hold"))
        await methods.held.wait()
        held.cancel()
        with pytest.raises(asyncio.CancelledError):
            await held
        methods.release.set()  # its answer comes, and nobody waits for it
        assert await call("add", 2, 2) == 4

    talk(body)
