"""From a method's `MethodSpec` and a call's arguments to one payload per rank, and from results to a value.

Evaluated in the caller, once, for every backend. The caller's batches are left alone: padding makes new ones.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from neoproto.runtime.registration import CustomDispatch, Dispatch, Execute, MeshDispatch, MethodSpec
from neoproto.runtime.wire import encode

if TYPE_CHECKING:
    from neoproto.data.dispatch import RankSplit

Share = tuple[tuple[Any, ...], dict[str, Any]]
"""One rank's positional and keyword arguments."""
MeshRanks = Sequence[tuple[int, bool]]
"""For each rank: its data-parallel rank, and whether results are taken from it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CallPlan:
    """What a call sends and how its results become a value.

    Attributes:
        sends: (positions within the group or view, pickled arguments).
        collect: takes the results in the order of the positions.
    """

    sends: Sequence[tuple[Sequence[int], bytes]]
    collect: Callable[[list[Any]], Any]


def plan_call(
    spec: MethodSpec,
    group: Any,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    size: int,
    mesh_ranks: Callable[[str], MeshRanks],
) -> CallPlan:
    """Plan a call to a group or view of `size` ranks.

    Args:
        group: what a user's own dispatch functions are given.
        mesh_ranks: looks a device mesh up by name; asked only for mesh dispatch.

    Raises:
        ValueError: lists of the wrong length, or batches that do not divide and are not padded.
        TypeError: what the mode needs was not given.
    """
    everyone = range(size)
    mode = spec.dispatch_mode
    if spec.execute_mode is Execute.RANK_ZERO or mode is Dispatch.RANK_ZERO:
        return CallPlan(sends=[((0,), encode((args, dict(kwargs))))], collect=_only)
    if mode is Dispatch.ONE_TO_ALL:
        return CallPlan(sends=[(everyone, encode((args, dict(kwargs))))], collect=list)
    if isinstance(mode, CustomDispatch):
        shares = _shares_of_lists(*mode.dispatch_fn(group, *args, **kwargs), size=size)
        return _plan_shares(shares, lambda results: mode.collect_fn(group, results))
    if mode in (Dispatch.ALL_TO_ALL, Dispatch.DP_COMPUTE):
        return _plan_shares(_shares_of_lists(args, dict(kwargs), size=size), list)
    if isinstance(mode, MeshDispatch):
        return _plan_mesh(spec, args, kwargs, mesh_ranks(mode.mesh_name))
    if mode is Dispatch.DP_COMPUTE_PROTO_WITH_FUNC and not (args and callable(args[0])):
        raise TypeError(f"{mode.name} needs a function as its first argument, got {args[:1]!r}")
    shares, split = _split_batches(args, kwargs, size, pad=spec.pad)
    if mode is Dispatch.DP_COMPUTE_METRIC:
        return _plan_shares(shares, list)
    return _plan_shares(shares, split.collect)


def _plan_shares(shares: Sequence[Share], collect: Callable[[list[Any]], Any]) -> CallPlan:
    return CallPlan(sends=[((rank,), encode(share)) for rank, share in enumerate(shares)], collect=collect)


def _plan_mesh(
    spec: MethodSpec, args: tuple[Any, ...], kwargs: Mapping[str, Any], ranks_in_mesh: MeshRanks
) -> CallPlan:
    dp_ranks = sorted({dp_rank for dp_rank, _ in ranks_in_mesh})  # a view may hold some of them only
    shares, split = _split_batches(args, kwargs, len(dp_ranks), pad=spec.pad)
    sends = []
    order = []
    for dp_rank, share in zip(dp_ranks, shares, strict=True):
        ranks = [rank for rank, (own, _) in enumerate(ranks_in_mesh) if own == dp_rank]
        sends.append((ranks, encode(share)))
        order += ranks
    sources = [position for position, rank in enumerate(order) if ranks_in_mesh[rank][1]]
    if [ranks_in_mesh[order[position]][0] for position in sources] != dp_ranks:
        raise ValueError(
            f"one rank of each data-parallel rank must collect results, got {list(ranks_in_mesh)}"
        )

    def collect(results: list[Any]) -> Any:
        return split.collect([results[position] for position in sources])

    return CallPlan(sends=sends, collect=collect)


def _shares_of_lists(args: tuple[Any, ...], kwargs: Mapping[str, Any], *, size: int) -> list[Share]:
    for name, value in [*enumerate(args), *kwargs.items()]:
        if not isinstance(value, list | tuple) or len(value) != size:
            got = (
                f"{type(value).__name__} of length {len(value)}" if hasattr(value, "__len__") else repr(value)
            )
            raise ValueError(
                f"argument {name!r} must be a list with one entry per rank ({size}), got a {got}"
            )
    return [
        (tuple(value[rank] for value in args), {key: value[rank] for key, value in kwargs.items()})
        for rank in range(size)
    ]


def _split_batches(
    args: tuple[Any, ...], kwargs: Mapping[str, Any], chunks: int, *, pad: bool
) -> tuple[list[Share], RankSplit]:
    """Split every batch among the arguments, give the rest to all; also how results are put together."""
    # Imported late: a caller without batches needs no tensor library.
    from neoproto.data.dispatch import split_for_ranks
    from neoproto.data.proto import DataProto

    lengths = {len(value) for value in [*args, *kwargs.values()] if isinstance(value, DataProto)}
    if len(lengths) > 1:
        raise ValueError(f"batches of one call must have the same number of rows, got {sorted(lengths)}")
    if not lengths:
        raise TypeError("this method's arguments are split by rank, but none of them is a DataProto")
    split: RankSplit | None = None

    def split_or_repeat(value: Any) -> Sequence[Any]:
        nonlocal split
        if not isinstance(value, DataProto):
            return (value,) * chunks
        split = split_for_ranks(value, chunks, pad=pad)
        return split.chunks

    split_args = [split_or_repeat(value) for value in args]
    split_kwargs = {key: split_or_repeat(value) for key, value in kwargs.items()}
    shares = [
        (tuple(parts[i] for parts in split_args), {key: parts[i] for key, parts in split_kwargs.items()})
        for i in range(chunks)
    ]
    assert split is not None, "there is a batch"
    return shares, split


def _only(results: list[Any]) -> Any:
    return results[0]
