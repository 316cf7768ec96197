"""What a type checker makes of typed calls: test_handles.py has mypy read this file, nothing runs it.

A line that must be an error carries the ignore of that error; mypy fails on an ignore that is not needed.
"""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Any, Protocol, Self, TypeVar, assert_type

from neoproto.runtime import (
    Dispatch,
    Execute,
    RemoteCall,
    Worker,
    WorkerHandle,
    custom_dispatch,
    mesh_dispatch,
    register,
    remote,
)

V_co = TypeVar("V_co", covariant=True)


def replicate(group: Any, value: int) -> tuple[tuple[list[int]], dict[str, Any]]:
    return ([value],), {}


def first(group: Any, results: list[Any]) -> Any:
    return results[0]


class Model(Worker):
    @register(dispatch_mode=Dispatch.RANK_ZERO)
    def lead(self, step: int, scale: float = 1.0) -> dict[str, float]:
        return {}

    @register(Dispatch.DP_COMPUTE_PROTO, pad=True)
    async def split(self, batch: bytes) -> bytes:
        return batch

    @register(mesh_dispatch("actor"))
    def in_mesh(self, batch: bytes) -> bytes:
        return batch

    @register(dispatch_mode=custom_dispatch(replicate, first))
    def custom(self, value: int) -> str:
        return str(self.lead(value))

    @register()
    async def each(self, name: str) -> str:
        return name

    @register(execute_mode=Execute.RANK_ZERO)
    def one(self, name: str) -> str:
        return name

    @register(Dispatch.DP_COMPUTE_METRIC)
    def metric(self, batch: bytes) -> float:
        return 0.0

    @register(Dispatch.ALL_TO_ALL, blocking=False)
    def own(self, value: int) -> int:
        return value

    @register({"dispatch_fn": replicate, "collect_fn": first})
    def mapped(self, value: int) -> int:
        return value

    def plain(self, value: int) -> str:
        return str(value)

    async def plain_async(self) -> int:
        return 0


class Successor(Model):
    @register(dispatch_mode=Dispatch.RANK_ZERO)
    def lead(self, step: int, scale: float = 1.0) -> dict[str, float]:
        return super().lead(step) | {"scale": scale}


def the_results(handle: WorkerHandle) -> None:
    assert_type(handle.call(Model.lead, 3, scale=0.5), RemoteCall[dict[str, float]])
    assert_type(handle.within(60).call(Model.split, b""), RemoteCall[bytes])
    assert_type(handle.call(Model.in_mesh, b""), RemoteCall[bytes])
    assert_type(handle.call(Model.custom, 3), RemoteCall[str])
    assert_type(handle.call(Model.each, "a"), RemoteCall[list[str]])
    assert_type(handle.call(Model.one, "a"), RemoteCall[str])
    assert_type(handle.call(Model.metric, b""), RemoteCall[list[float]])
    assert_type(handle.call(Model.own, [1, 2]), RemoteCall[list[int]])
    assert_type(handle.call(Model.mapped, 3), RemoteCall[Any])
    assert_type(handle.call(Model.plain, 3), RemoteCall[list[str]])
    assert_type(handle.call(Model.plain_async), RemoteCall[list[int]])
    assert_type(handle.call(Successor.lead, 3), RemoteCall[dict[str, float]])


def the_arguments(handle: WorkerHandle) -> None:
    handle.call(Model.lead, "three")  # type: ignore[call-overload]
    handle.call(Model.lead, 3, size=0.5)  # type: ignore[call-arg]
    handle.call(Model.plain)  # type: ignore[call-overload]
    handle.call(Model.lost, 3)  # type: ignore[attr-defined, call-overload]


class ModelHandle(WorkerHandle):
    lead = remote(Model.lead)
    each = remote(Model.each)
    plain = remote(Model.plain)


class Call(Awaitable[V_co], Protocol[V_co]):
    def cancel(self) -> bool: ...


class ModelCalls(Protocol):
    """Of code that may not import the worker class."""

    def within(self, timeout: float | None) -> Self: ...
    def lead(self, step: int, scale: float = 1.0) -> Call[dict[str, float]]: ...
    def each(self, name: str) -> Call[list[str]]: ...


class WrongArgument(Protocol):
    def lead(self, step: str) -> Call[dict[str, float]]: ...


class WrongResult(Protocol):
    def lead(self, step: int) -> Call[str]: ...


def wants_another_argument(handle: WrongArgument) -> None: ...


def wants_another_result(handle: WrongResult) -> None: ...


async def a_handle(handle: ModelHandle) -> None:
    assert_type(handle.within(60).lead(3), RemoteCall[dict[str, float]])
    assert_type(await handle.plain(3), list[str])
    handle.lead("three")  # type: ignore[arg-type]
    calls: ModelCalls = handle
    assert_type(await calls.within(60).each("a"), list[str])
    wants_another_argument(handle)  # type: ignore[arg-type]
    wants_another_result(handle)  # type: ignore[arg-type]


def on_the_worker(worker: Model) -> None:
    assert_type(worker.lead(3), dict[str, float])
    worker.lead("three")  # type: ignore[arg-type]
