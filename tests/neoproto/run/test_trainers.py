"""What ends a training that nobody else would end."""

from __future__ import annotations

import asyncio
import functools
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar, cast

import pytest

from neoproto.errors import NeoProtoError, StoreError
from neoproto.run.trainers import loop_code, no_process_failure, train
from neoproto.runtime.failures import ProcessFailure
from neoproto.trainer.metrics.record import TrainingParts, TrainingResult
from neoproto.trainer.replicas import ReplicaSet
from neoproto.trainer.supervision import Supervisor
from neoproto.trainer.tasks import beside
from neoproto.user_code import noted_interrupts

T = TypeVar("T")


async def forever() -> None:
    await asyncio.Event().wait()


async def with_watch(work: Coroutine[Any, Any, T], failure: ProcessFailure) -> T:
    return await asyncio.wait_for(beside(work, {"the watch": no_process_failure(failure)}), 5)


def test_a_lost_process_ends_training_that_waits_for_another() -> None:
    failure = ProcessFailure()
    threading.Timer(0.05, failure.set_exception, [StoreError("died")]).start()
    with pytest.raises(StoreError, match="died"):
        asyncio.run(with_watch(forever(), failure))


def test_training_that_ends_leaves_the_watch_for_those_who_come_after() -> None:
    failure = ProcessFailure()
    assert asyncio.run(with_watch(asyncio.sleep(0.05, "trained"), failure)) == "trained"
    assert not failure.cancelled()
    failure.set_exception(StoreError("died"))


class Watch:
    """The supervision of replicas, which only ends when it is cancelled."""

    ended = False

    async def run(self) -> None:
        try:
            await forever()
        finally:
            self.ended = True


def test_a_loop_of_the_users_gets_the_parts_and_takes_the_place_of_ours() -> None:
    parts, watch = cast(TrainingParts, object()), Watch()

    async def mine(given: TrainingParts) -> TrainingResult:
        assert given is parts
        await asyncio.sleep(0.01)
        return cast(TrainingResult, "trained")

    replicas, supervisor = cast(ReplicaSet, None), cast(Supervisor, watch)
    assert train(parts, replicas, supervisor, ProcessFailure(), mine) == "trained"
    assert watch.ended


def test_a_loss_ends_a_loop_of_the_users_too() -> None:
    failure = ProcessFailure()

    async def mine(_: TrainingParts) -> TrainingResult:
        failure.set_exception(StoreError("died"))
        await forever()
        raise AssertionError

    parts, supervisor = cast(TrainingParts, None), cast(Supervisor, Watch())
    with pytest.raises(StoreError, match="died"):
        train(parts, cast(ReplicaSet, None), supervisor, failure, mine)


def test_a_loop_is_known_by_its_name_and_the_content_of_its_file() -> None:
    async def loop(parts: TrainingParts, option: int = 0) -> TrainingResult:
        raise NotImplementedError

    named = loop_code(loop)
    assert named.startswith("test_a_loop_is_known")
    assert " in a file of SHA-256 " in named
    assert loop_code(functools.partial(loop, option=1)) == named
    assert loop_code(None) == "the one of trainer.mode"


@pytest.mark.parametrize("error", [SystemExit(0), KeyboardInterrupt(), GeneratorExit()])
def test_an_exit_that_a_loop_of_the_users_raises_is_its_failure(error: BaseException) -> None:
    parts, watch = cast(TrainingParts, object()), Watch()

    async def mine(_: TrainingParts) -> TrainingResult:
        await asyncio.sleep(0)
        raise error

    said = rf"^the trainer loop raised {type(error).__name__}.* \({__file__}, line "
    with noted_interrupts(), pytest.raises(NeoProtoError, match=said):
        train(parts, cast(ReplicaSet, None), cast(Supervisor, watch), ProcessFailure(), mine)
    assert watch.ended
