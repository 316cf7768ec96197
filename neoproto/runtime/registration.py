"""How a worker method says what it takes and returns: `Dispatch`, `Execute`, `register`.

Names follow verl's `single_controller` decorator.
"""

from __future__ import annotations

import enum
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])

_ATTRIBUTE = "_neoproto_method_spec"


class Dispatch(enum.Enum):
    """How arguments reach the ranks and how results come back (DP = data parallel)."""

    ONE_TO_ALL = "one_to_all"
    """Every argument to every rank; a list of results by rank."""
    ALL_TO_ALL = "all_to_all"
    """Every argument is a list with one entry per rank; a list of results."""
    DP_COMPUTE = "dp_compute"
    """As ALL_TO_ALL, for methods that compute on their share."""
    DP_COMPUTE_PROTO = "dp_compute_proto"
    """Batches are split by rank; the results are concatenated and padding is removed."""
    DP_COMPUTE_PROTO_WITH_FUNC = "dp_compute_proto_with_func"
    """The first argument is a function and goes to every rank; the rest as DP_COMPUTE_PROTO."""
    DP_COMPUTE_METRIC = "dp_compute_metric"
    """Batches are split by rank; a list of results."""
    RANK_ZERO = "rank_zero"
    """Rank 0 only; its value."""


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


@dataclass(frozen=True, kw_only=True, slots=True)
class MethodSpec:
    """What `register` said of a method, and whether it is a coroutine function."""

    dispatch_mode: DispatchMode = Dispatch.ONE_TO_ALL
    execute_mode: Execute = Execute.ALL
    blocking: bool = True
    pad: bool = False
    is_async: bool = False


def register(
    dispatch_mode: DispatchMode | Mapping[str, Callable[..., Any]] = Dispatch.ONE_TO_ALL,
    execute_mode: Execute = Execute.ALL,
    blocking: bool = True,
    pad: bool = False,
) -> Callable[[F], F]:
    """Mark a `Worker` method with how it is called on a group.

    Args:
        dispatch_mode: a `Dispatch`, `mesh_dispatch(name)`, or `{"dispatch_fn": …, "collect_fn": …}`.
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

    def mark(method: F) -> F:
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
