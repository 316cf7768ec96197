"""Tasks of a trainer: who owns them, and what comes out when one fails."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Coroutine, Mapping
from contextlib import asynccontextmanager
from typing import Any, NoReturn, TypeVar

from neoproto.errors import NeoProtoError

T = TypeVar("T")


@asynccontextmanager
async def owned_tasks() -> AsyncIterator[asyncio.TaskGroup]:
    """A task group whose first failure is raised as itself, not as a group; the rest is cancelled first."""
    try:
        async with asyncio.TaskGroup() as group:
            yield group
    except BaseExceptionGroup as failures:
        cause = first_cause(failures)
        raise cause from cause.__cause__  # `from None` would take its own cause away


async def together(*calls: Coroutine[Any, Any, Any]) -> list[Any]:
    """Results in order; the first failure stops the other waits and is raised as itself, not as a group."""
    async with owned_tasks() as group:
        tasks = [group.create_task(call) for call in calls]
    return [task.result() for task in tasks]


async def must_go_on(what: str, work: Awaitable[Any]) -> NoReturn:
    """Wait for work that only ends when it is cancelled.

    Raises:
        NeoProtoError: it ended by itself.
        Whatever the work raises.
    """
    await work
    raise NeoProtoError(f"{what} ended while training continued")


async def beside(work: Awaitable[T], others: Mapping[str, Awaitable[Any]]) -> T:
    """The result of `work`, with other work beside it that ends with it.

    Args:
        others: by name; work that only ends when it is cancelled. One that fails, or ends, ends `work`.
    """
    async with owned_tasks() as group:
        tasks = [group.create_task(must_go_on(what, other)) for what, other in others.items()]
        result = await work
        for task in tasks:
            task.cancel()
    return result


def first_cause(failure: BaseException) -> BaseException:
    """The first leaf of nested exception groups."""
    while isinstance(failure, BaseExceptionGroup):
        failure = failure.exceptions[0]
    return failure
