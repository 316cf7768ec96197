"""Whoever fails first is heard, and nobody is left waiting."""

from __future__ import annotations

import asyncio

import pytest

from neoproto.errors import NeoProtoError
from neoproto.trainer.tasks import must_go_on, owned_tasks


async def never() -> None:
    await asyncio.Event().wait()


async def fail() -> None:
    await asyncio.sleep(0)
    raise ValueError("the cause")


def test_the_first_failure_ends_the_others_and_is_raised_as_itself() -> None:
    async def main() -> None:
        async with owned_tasks() as tasks:
            tasks.create_task(never())
            tasks.create_task(fail())
            await never()

    with pytest.raises(ValueError, match="the cause"):
        asyncio.run(asyncio.wait_for(main(), 5))


def test_a_failure_inside_the_block_ends_the_others_too() -> None:
    ended: list[str] = []

    async def other() -> None:
        try:
            await never()
        finally:
            ended.append("other")

    async def main() -> None:
        async with owned_tasks() as tasks:
            tasks.create_task(other())
            await fail()

    with pytest.raises(ValueError, match="the cause"):
        asyncio.run(asyncio.wait_for(main(), 5))
    assert ended == ["other"]


def test_work_that_should_go_on_and_ends_is_an_error() -> None:
    async def main() -> None:
        async with owned_tasks() as tasks:
            tasks.create_task(must_go_on("the dispatcher", asyncio.sleep(0)))
            await never()

    with pytest.raises(NeoProtoError, match="the dispatcher ended while training continued"):
        asyncio.run(asyncio.wait_for(main(), 5))
