"""What ends a training that nobody else would end."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

import pytest

from neoproto.errors import StoreError
from neoproto.run.trainers import no_loss
from neoproto.runtime.losses import Loss
from neoproto.trainer.tasks import beside

T = TypeVar("T")


async def forever() -> None:
    await asyncio.Event().wait()


async def with_watch(work: Coroutine[Any, Any, T], loss: Loss) -> T:
    return await asyncio.wait_for(beside(work, {"the watch": no_loss(loss)}), 5)


def test_a_lost_process_ends_training_that_waits_for_another() -> None:
    loss = Loss()
    threading.Timer(0.05, loss.set_exception, [StoreError("died")]).start()
    with pytest.raises(StoreError, match="died"):
        asyncio.run(with_watch(forever(), loss))


def test_training_that_ends_leaves_the_watch_for_those_who_come_after() -> None:
    loss = Loss()
    assert asyncio.run(with_watch(asyncio.sleep(0.05, "trained"), loss)) == "trained"
    assert not loss.cancelled()
    loss.set_exception(StoreError("died"))
