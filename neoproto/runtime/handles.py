"""Typed calls: an editor and a type checker follow them from the caller into the worker's method.

    handle.within(60).update(batch) ──> group.submit("update", (batch,), timeout=60) ──> RemoteCall[result]

What may be passed, and what comes back, is what `register` declares of the method (`RegisteredMethod`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Coroutine
from typing import Any, Concatenate, ParamSpec, Self, TypeVar, overload

from neoproto.runtime.call import RemoteCall
from neoproto.runtime.group import RemoteWorkerGroup
from neoproto.runtime.registration import RegisteredMethod

P = ParamSpec("P")
T = TypeVar("T")
V = TypeVar("V")


class WorkerHandle:
    """A worker group, or a view of one, whose methods are called as methods of the worker class.

    A subclass names methods of one worker class, each once; it can be handed to code that does not import the
    worker class, and satisfies a Protocol with methods of the same arguments:

        class CounterHandle(WorkerHandle):
            add = remote(Counter.add)

        CounterHandle(group).within(60).add(1).result()

    It owns nothing, and travels as its group does.

    Args:
        group: of the worker class whose methods are called.
        timeout: seconds for each call; None is that of the running call, if any.
    """

    def __init__(self, group: RemoteWorkerGroup, timeout: float | None = None) -> None:
        self.group = group
        self._timeout = timeout

    def within(self, timeout: float | None) -> Self:
        """The same handle with `timeout` seconds for each call; its deadline is fixed when it is made."""
        return type(self)(self.group, timeout)

    @overload
    def call(
        self, method: RegisteredMethod[P, Any, V], /, *args: P.args, **kwargs: P.kwargs
    ) -> RemoteCall[V]: ...
    @overload
    def call(
        self,
        method: Callable[Concatenate[Any, P], Coroutine[Any, Any, T]],
        /,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> RemoteCall[list[T]]: ...
    @overload
    def call(
        self, method: Callable[Concatenate[Any, P], T], /, *args: P.args, **kwargs: P.kwargs
    ) -> RemoteCall[list[T]]: ...
    def call(self, method: Any, /, *args: Any, **kwargs: Any) -> RemoteCall[Any]:
        """Start a method of the worker class, as in `handle.call(Counter.add, 1)`, with its arguments.

        Raises:
            As `RemoteWorkerGroup.submit`.
        """
        return self.group.submit(method.__name__, args, kwargs, timeout=self._timeout)


@overload
def remote(
    method: RegisteredMethod[P, Any, V], /
) -> Callable[Concatenate[WorkerHandle, P], RemoteCall[V]]: ...
@overload
def remote(
    method: Callable[Concatenate[Any, P], Coroutine[Any, Any, T]], /
) -> Callable[Concatenate[WorkerHandle, P], RemoteCall[list[T]]]: ...
@overload
def remote(
    method: Callable[Concatenate[Any, P], T], /
) -> Callable[Concatenate[WorkerHandle, P], RemoteCall[list[T]]]: ...
def remote(method: Any, /) -> Callable[..., RemoteCall[Any]]:
    """A method of a `WorkerHandle` that calls this method of the worker class, with the same arguments."""

    @functools.wraps(method)
    def start(handle: WorkerHandle, /, *args: Any, **kwargs: Any) -> RemoteCall[Any]:
        return handle.call(method, *args, **kwargs)

    return start
