"""All dispatch modes, without processes: every rank is a function of what it is sent."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
import torch

from neoproto.data import DataProto
from neoproto.runtime.dispatch import plan_call
from neoproto.runtime.registration import Dispatch, Execute, MethodSpec, mesh_dispatch, register
from neoproto.runtime.wire import decode

MESHES = {"train": [(0, True), (0, False), (1, True), (1, False)]}
"""Four ranks: two data-parallel ranks of two."""


def batch(rows: int) -> DataProto:
    return DataProto.from_dict(
        {"x": torch.arange(rows)}, {"uid": np.array([f"u{i}" for i in range(rows)], dtype=object)}
    )


def call(
    spec: MethodSpec | Callable[..., Any],
    method: Callable[..., Any],
    *args: Any,
    size: int = 4,
    meshes: Mapping[str, Any] = MESHES,
    **kwargs: Any,
) -> Any:
    """What a group of `size` ranks answers: `method(rank, *args, **kwargs)` runs on each that is sent to."""
    if not isinstance(spec, MethodSpec):
        spec = spec._neoproto_method_spec  # type: ignore[attr-defined]
    plan = plan_call(spec, "the group", args, kwargs, size=size, mesh_ranks=meshes.__getitem__)
    results = []
    for ranks, payload in plan.sends:
        for rank in ranks:
            rank_args, rank_kwargs = decode(payload)
            results.append(method(rank, *rank_args, **rank_kwargs))
    return plan.collect(results)


def spec(mode: Any, **more: Any) -> MethodSpec:
    return MethodSpec(dispatch_mode=mode, **more)


def doubled(rank: int, data: DataProto, **_: Any) -> DataProto:
    return DataProto.from_dict({"y": data["x"] * 2, "rank": torch.full((len(data),), rank)})


def test_one_to_all_never_scatters_a_list() -> None:
    def method(rank: int, values: list[int], key: int = 0) -> tuple[int, list[int], int]:
        return rank, values, key

    assert call(spec(Dispatch.ONE_TO_ALL), method, [1, 2, 3, 4], key=5) == [
        (rank, [1, 2, 3, 4], 5) for rank in range(4)
    ]


@pytest.mark.parametrize("mode", [Dispatch.ALL_TO_ALL, Dispatch.DP_COMPUTE])
def test_lists_with_one_entry_per_rank(mode: Dispatch) -> None:
    def method(rank: int, value: int, key: str) -> tuple[int, int, str]:
        return rank, value, key

    got = call(spec(mode), method, (10, 11), key=["a", "b"], size=2)
    assert got == [(0, 10, "a"), (1, 11, "b")]
    with pytest.raises(ValueError, match=r"argument 0 .* one entry per rank \(2\), got a list of length 3"):
        call(spec(mode), method, [1, 2, 3], key=["a", "b"], size=2)
    with pytest.raises(ValueError, match="argument 'key'"):
        call(spec(mode), method, [1, 2], key="ab", size=2)


@pytest.mark.parametrize(
    "form", [spec(Dispatch.RANK_ZERO), spec(Dispatch.ONE_TO_ALL, execute_mode=Execute.RANK_ZERO)]
)
def test_rank_zero_gives_its_value(form: MethodSpec) -> None:
    assert call(form, lambda rank, *args: (rank, args), 1, 2) == (0, (1, 2))


def test_batches_are_split_and_joined_in_order() -> None:
    whole = batch(8)
    got = call(spec(Dispatch.DP_COMPUTE_PROTO), doubled, whole, other=[1, 2, 3, 4])
    assert got["y"].tolist() == [0, 2, 4, 6, 8, 10, 12, 14]
    assert got["rank"].tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    assert call(spec(Dispatch.DP_COMPUTE_PROTO), doubled, data=whole)["y"].tolist() == got["y"].tolist()


def test_a_batch_that_does_not_divide_is_padded_only_if_asked() -> None:
    whole = batch(6)
    with pytest.raises(ValueError, match="6 rows do not divide over 4"):
        call(spec(Dispatch.DP_COMPUTE_PROTO), doubled, whole)
    got = call(spec(Dispatch.DP_COMPUTE_PROTO, pad=True), doubled, whole)
    assert got["y"].tolist() == [0, 2, 4, 6, 8, 10]
    assert len(whole) == 6, "the caller's batch is left alone"
    assert whole["x"].tolist() == [0, 1, 2, 3, 4, 5]


def samples(rank: int, data: DataProto, kind: str) -> Any:
    """Three rows for each row, row-major: what a rollout returns."""
    rows = data["x"].repeat_interleave(3)
    if kind == "batch":
        return DataProto.from_dict({"y": rows})
    if kind == "tensor":
        return rows
    return rows.numpy() if kind == "array" else rows.tolist()


@pytest.mark.parametrize("kind", ["batch", "tensor", "array", "list"])
def test_padding_leaves_results_of_several_rows_per_row(kind: str) -> None:
    got = call(spec(Dispatch.DP_COMPUTE_PROTO, pad=True), functools.partial(samples, kind=kind), batch(5))
    values = got["y"] if kind == "batch" else got
    assert list(map(int, values)) == [row for row in range(5) for _ in range(3)]


def test_several_batches_of_a_call_belong_together() -> None:
    def method(rank: int, one: DataProto, two: DataProto) -> DataProto:
        return DataProto.from_dict({"sum": one["x"] + two["x"]})

    form = spec(Dispatch.DP_COMPUTE_PROTO, pad=True)
    assert call(form, method, batch(3), two=batch(3))["sum"].tolist() == [0, 2, 4]
    with pytest.raises(ValueError, match=r"same number of rows, got \[3, 4\]"):
        call(form, method, batch(3), two=batch(4))
    with pytest.raises(TypeError, match="none of them is a DataProto"):
        call(form, method, [1, 2, 3, 4])


def test_a_function_goes_to_every_rank() -> None:
    def method(rank: int, function: Callable[[DataProto], DataProto], data: DataProto) -> DataProto:
        return function(data)

    form = spec(Dispatch.DP_COMPUTE_PROTO_WITH_FUNC, pad=True)
    got = call(form, method, lambda data: DataProto.from_dict({"y": data["x"] + 1}), batch(6))
    assert got["y"].tolist() == [1, 2, 3, 4, 5, 6]
    with pytest.raises(TypeError, match="a function as its first argument"):
        call(form, method, batch(4))


def test_metrics_come_back_by_rank() -> None:
    got = call(spec(Dispatch.DP_COMPUTE_METRIC, pad=True), lambda rank, data: {"n": len(data)}, batch(6))
    assert got == [{"n": 2}] * 4


def test_mesh_dispatch_shares_a_chunk_and_collects_from_those_that_say_so() -> None:
    seen: list[tuple[int, list[int]]] = []

    def method(rank: int, data: DataProto) -> DataProto:
        seen.append((rank, data["x"].tolist()))
        return doubled(rank, data)

    form = spec(mesh_dispatch("train"), pad=True)
    got = call(form, method, data=batch(5))
    assert dict(seen) == {0: [0, 1, 2], 1: [0, 1, 2], 2: [3, 4, 0], 3: [3, 4, 0]}
    assert got["y"].tolist() == [0, 2, 4, 6, 8]
    assert got["rank"].tolist() == [0, 0, 0, 2, 2]


def test_mesh_dispatch_to_a_view_uses_the_data_parallel_ranks_it_has() -> None:
    form = spec(mesh_dispatch("train"))
    got = call(form, doubled, batch(3), size=2, meshes={"train": MESHES["train"][2:]})
    assert got["y"].tolist() == [0, 2, 4]
    with pytest.raises(ValueError, match="must collect"):
        call(form, doubled, batch(3), size=1, meshes={"train": MESHES["train"][1:2]})


def test_a_pair_of_ones_own() -> None:
    @register(
        dispatch_mode={
            "dispatch_fn": lambda group, value: (([f"{group} {value}{i}" for i in range(2)],), {}),
            "collect_fn": lambda group, results: "+".join(results),
        }
    )
    def method() -> None: ...

    assert call(method, lambda rank, value: f"{rank}:{value}", "v", size=2) == "0:the group v0+1:the group v1"
