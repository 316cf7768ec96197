"""How a worker method declares what it takes and returns: `Dispatch`, `Execute`, `register`.

Names follow verl's `single_controller` decorator.

`register` also tells a type checker what a call of the method on a whole group gives back, since that differs
from what the method returns on one rank: see `RegisteredMethod`.
"""

from __future__ import annotations

import enum
import inspect
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any, Concatenate, Generic, Literal, ParamSpec, Protocol, Self, TypeVar, overload

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")
V = TypeVar("V")

_ATTRIBUTE = "_neoproto_method_spec"


class Dispatch(enum.Enum):
    """How arguments reach the ranks and how results come back (DP = data parallel)."""

    ONE_TO_ALL = "one_to_all"
    """Every argument to every rank; a list of results by rank."""
    RANK_ZERO = "rank_zero"
    """Rank 0 only; its value."""
    DP_COMPUTE_PROTO = "dp_compute_proto"
    """Batches are split by rank; the results are concatenated and padding is removed."""
    DP_COMPUTE_METRIC = "dp_compute_metric"
    """Batches are split by rank; a list of results."""
    # The workers of `actors` use none of the rest: workers that were written for verl do.
    ALL_TO_ALL = "all_to_all"
    """Every argument is a list with one entry per rank; a list of results."""
    DP_COMPUTE = "dp_compute"
    """As ALL_TO_ALL, for methods that compute on their share."""
    DP_COMPUTE_PROTO_WITH_FUNC = "dp_compute_proto_with_func"
    """The first argument is a function and goes to every rank; the rest as DP_COMPUTE_PROTO."""


class Execute(enum.Enum):
    """Which ranks run the method."""

    ALL = "all"
    RANK_ZERO = "rank_zero"


@dataclass(frozen=True, kw_only=True, slots=True)
class MeshDispatch:
    """Dispatch by each rank's place in a named device mesh: ranks of one data-parallel rank share a chunk.

    Attributes:
        mesh_name: the name the worker used in `Worker.register_mesh`.
    """

    mesh_name: str


@dataclass(frozen=True, kw_only=True, slots=True)
class CustomDispatch:
    """A user's own pair.

    Attributes:
        dispatch_fn: `(group, *args, **kwargs) -> (args, kwargs)`, each value a list with one entry per rank.
        collect_fn: `(group, results by rank) -> result`.
    """

    dispatch_fn: Callable[..., tuple[tuple[Any, ...], dict[str, Any]]]
    collect_fn: Callable[..., Any]


DispatchMode = Dispatch | MeshDispatch | CustomDispatch


def mesh_dispatch(mesh_name: str) -> MeshDispatch:
    """Dispatch mode for methods that run on the device mesh `mesh_name` ("actor", "ref", "train", …)."""
    return MeshDispatch(mesh_name=mesh_name)


def custom_dispatch(
    dispatch_fn: Callable[..., tuple[tuple[Any, ...], dict[str, Any]]], collect_fn: Callable[..., Any]
) -> CustomDispatch:
    """Dispatch mode for a pair whose `collect_fn` makes one value, of the method's own type, of all results.

    A mapping `{"dispatch_fn": …, "collect_fn": …}` is the same to the runtime; a type checker
    learns nothing of the result from it.

    Args:
        dispatch_fn: `(group, *args, **kwargs) -> (args, kwargs)`, each value a list with one entry per rank.
        collect_fn: `(group, results by rank) -> result`.
    """
    return CustomDispatch(dispatch_fn=dispatch_fn, collect_fn=collect_fn)


@dataclass(frozen=True, kw_only=True, slots=True)
class MethodSpec:
    """What `register` said of a method, and whether it is a coroutine function."""

    dispatch_mode: DispatchMode = Dispatch.ONE_TO_ALL
    execute_mode: Execute = Execute.ALL
    blocking: bool = True
    pad: bool = False
    is_async: bool = False


class RegisteredMethod(Generic[P, R, V]):
    """What a registered method is to a type checker. At run time it stays the function that it was.

    P are its arguments, R is what it returns on one rank, V what a call on a group gives its caller. On a
    worker it is a method like any other; of the class it is what `WorkerHandle.call` and `remote` take.
    """

    __name__: str

    @overload
    def __get__(self, worker: None, owner: Any) -> Self: ...
    @overload
    def __get__(self, worker: object, owner: Any) -> Callable[P, R]: ...
    def __get__(self, worker: object, owner: Any) -> Any:
        raise NotImplementedError("a registered method is a function, not one of these")


class _ToOwn(Protocol):
    """The caller gets one value of the type that the method returns. So for `async` methods too."""

    @overload
    def __call__(
        self, method: Callable[Concatenate[Any, P], Coroutine[Any, Any, T]], /
    ) -> RegisteredMethod[P, Coroutine[Any, Any, T], T]: ...
    @overload
    def __call__(self, method: Callable[Concatenate[Any, P], T], /) -> RegisteredMethod[P, T, T]: ...


class _ToList(Protocol):
    """The caller gets a list by rank."""

    @overload
    def __call__(
        self, method: Callable[Concatenate[Any, P], Coroutine[Any, Any, T]], /
    ) -> RegisteredMethod[P, Coroutine[Any, Any, T], list[T]]: ...
    @overload
    def __call__(self, method: Callable[Concatenate[Any, P], T], /) -> RegisteredMethod[P, T, list[T]]: ...


class _ListsToList(Protocol):
    """The caller gives a list by rank for each argument, which nothing checks, and gets a list by rank."""

    @overload
    def __call__(
        self, method: Callable[..., Coroutine[Any, Any, T]], /
    ) -> RegisteredMethod[..., Coroutine[Any, Any, T], list[T]]: ...
    @overload
    def __call__(self, method: Callable[..., T], /) -> RegisteredMethod[..., T, list[T]]: ...


class _ToAny(Protocol):
    """What the caller gives and gets is known to the mode alone."""

    def __call__(self, method: Callable[..., R], /) -> RegisteredMethod[..., R, Any]: ...


@overload
def register(
    dispatch_mode: DispatchMode | Mapping[str, Callable[..., Any]],
    execute_mode: Literal[Execute.RANK_ZERO],
    blocking: bool = ...,
    pad: bool = ...,
) -> _ToOwn: ...
@overload
def register(
    *, execute_mode: Literal[Execute.RANK_ZERO], blocking: bool = ..., pad: bool = ...
) -> _ToOwn: ...
@overload
def register(
    dispatch_mode: Literal[Dispatch.RANK_ZERO, Dispatch.DP_COMPUTE_PROTO, Dispatch.DP_COMPUTE_PROTO_WITH_FUNC]
    | MeshDispatch
    | CustomDispatch,
    execute_mode: Literal[Execute.ALL] = ...,
    blocking: bool = ...,
    pad: bool = ...,
) -> _ToOwn: ...
@overload
def register(
    dispatch_mode: Literal[Dispatch.ONE_TO_ALL, Dispatch.DP_COMPUTE_METRIC] = ...,
    execute_mode: Literal[Execute.ALL] = ...,
    blocking: bool = ...,
    pad: bool = ...,
) -> _ToList: ...
@overload
def register(
    dispatch_mode: Literal[Dispatch.ALL_TO_ALL, Dispatch.DP_COMPUTE],
    execute_mode: Literal[Execute.ALL] = ...,
    blocking: bool = ...,
    pad: bool = ...,
) -> _ListsToList: ...
@overload
def register(
    dispatch_mode: DispatchMode | Mapping[str, Callable[..., Any]] = ...,
    execute_mode: Execute = ...,
    blocking: bool = ...,
    pad: bool = ...,
) -> _ToAny: ...
def register(
    dispatch_mode: DispatchMode | Mapping[str, Callable[..., Any]] = Dispatch.ONE_TO_ALL,
    execute_mode: Execute = Execute.ALL,
    blocking: bool = True,
    pad: bool = False,
) -> Any:
    """Mark a `Worker` method with how it is called on a group.

    Args:
        dispatch_mode: a `Dispatch`, `mesh_dispatch(name)`, `custom_dispatch(…)`, or
            `{"dispatch_fn": …, "collect_fn": …}`.
        execute_mode: all ranks, or rank 0 only.
        blocking: what `group.method(…)` does; `submit` takes its own `blocking`.
        pad: batches that do not divide by the number of chunks are padded, and the padding is removed from
            the result; otherwise they are refused.

    Raises:
        ValueError: a mapping without exactly the two functions, or something else altogether.
    """
    mode = _checked_mode(dispatch_mode)
    if not isinstance(execute_mode, Execute):
        raise ValueError(f"execute_mode must be an Execute, got {execute_mode!r}")

    def mark(method: Callable[..., Any]) -> Callable[..., Any]:
        spec = MethodSpec(
            dispatch_mode=mode,
            execute_mode=execute_mode,
            blocking=blocking,
            pad=pad,
            is_async=inspect.iscoroutinefunction(method),
        )
        setattr(method, _ATTRIBUTE, spec)
        return method

    return mark


def _checked_mode(mode: object) -> DispatchMode:
    if isinstance(mode, Dispatch | MeshDispatch | CustomDispatch):
        return mode
    if isinstance(mode, Mapping):
        if set(mode) != {"dispatch_fn", "collect_fn"}:
            raise ValueError(
                f"a custom dispatch has 'dispatch_fn' and 'collect_fn', got {sorted(map(str, mode))}"
            )
        return CustomDispatch(dispatch_fn=mode["dispatch_fn"], collect_fn=mode["collect_fn"])
    raise ValueError(f"dispatch_mode must be a Dispatch, a mesh_dispatch or a mapping, got {mode!r}")


def method_table(cls: type) -> dict[str, MethodSpec]:
    """Every public method of a worker class with its `MethodSpec`; unregistered ones get the defaults."""
    table: dict[str, MethodSpec] = {}
    for name in dir(cls):
        if name.startswith("_"):
            continue
        attribute = inspect.getattr_static(cls, name)
        if isinstance(attribute, staticmethod | classmethod):
            attribute = attribute.__func__
        if not inspect.isfunction(attribute):
            continue
        marked = getattr(attribute, _ATTRIBUTE, None)
        table[name] = marked or MethodSpec(is_async=inspect.iscoroutinefunction(attribute))
    return table
