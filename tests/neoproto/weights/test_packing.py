import itertools
import math

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from neoproto.errors import WeightMismatch
from neoproto.weights.manifest import Box
from neoproto.weights.packing import ALIGNMENT, PackingPlan, describe, plan_packing
from tests.neoproto.weights.host_store import FakeDTensor, Mesh, Replicate, Shard, Strided


def plan_alone(tensors, bucket_bytes=1 << 20, rollout_dtype=None) -> PackingPlan:
    return plan_packing(
        [describe(tensors, rollout_dtype=rollout_dtype, domain="p")], bucket_bytes=bucket_bytes
    )


def test_parameters_of_a_module_that_are_tied_are_laid_out_once():
    head = torch.nn.Linear(4, 6, bias=False)
    embed = torch.nn.Embedding(6, 4)
    head.weight = embed.weight
    plan = plan_alone({"embed": embed.weight, "head": head.weight})
    assert plan.names == ("embed",)
    assert plan.entries[0].pieces == plan.entries[1].pieces
    assert [bucket.nbytes for bucket in plan.buckets] == [96]


def test_buckets_hold_no_more_than_their_size_except_for_one_larger_tensor():
    tensors = {f"w{index}": torch.zeros(size) for index, size in enumerate([10, 10, 100, 10, 5, 40, 1])}
    plan = plan_alone(tensors, bucket_bytes=256)
    assert [bucket.nbytes for bucket in plan.buckets] == [104, 400, 84, 196]
    assert all(entry.pieces[0].offset % ALIGNMENT == 0 for entry in plan.entries)


def test_float32_is_cast_and_other_dtypes_are_kept():
    tensors = {"a": torch.zeros(2), "b": torch.zeros(2, dtype=torch.int64), "c": torch.zeros(2).half()}
    plan = plan_alone(tensors, rollout_dtype=torch.bfloat16)
    assert [entry.dtype for entry in plan.entries] == ["bfloat16", "int64", "float16"]


def ranks_of(mesh: tuple[int, ...], tensors: dict, domains: list[str]):
    """Layouts of all ranks of a mesh; tensors: name -> (whole tensor, placements)."""
    layouts = []
    for rank, coordinate in enumerate(itertools.product(*map(range, mesh))):
        own = {
            name: FakeDTensor(whole, how, Mesh(mesh, coordinate)) for name, (whole, how) in tensors.items()
        }
        layouts.append(describe(own, rollout_dtype=None, domain=domains[rank]))
    return layouts


def test_shards_of_one_host_become_one_piece_and_each_rank_writes_its_own():
    layouts = ranks_of((3,), {"w": (torch.zeros(7, 2), (Shard(0),))}, ["p"] * 3)
    plan = plan_packing(layouts, bucket_bytes=1 << 20)
    (piece,) = plan.entries[0].pieces
    assert piece.box == Box.whole((7, 2))
    assert [write[0].box.shape for write in plan.writes] == [(3, 2), (3, 2), (1, 2)]


def test_shards_of_several_hosts_are_a_piece_for_each():
    layouts = ranks_of((4,), {"w": (torch.zeros(8, 2), (Shard(0),))}, ["a", "a", "b", "b"])
    plan = plan_packing(layouts, bucket_bytes=1 << 20)
    first, second = plan.entries[0].pieces
    assert (first.box.start, second.box.start) == ((0, 0), (4, 0))
    assert [bucket.domain for bucket in plan.buckets] == ["a", "b"]


def test_what_all_ranks_have_is_written_once_and_shared_out_by_size():
    tensors = {f"w{index}": (torch.zeros(10), (Replicate(),)) for index in range(5)}
    plan = plan_packing(ranks_of((2,), tensors, ["a", "b"]), bucket_bytes=1 << 20)
    assert [[write.source for write in writes] for writes in plan.writes] == [[0, 2, 4], [1, 3]]


def test_what_is_cut_in_another_way_is_gathered_if_one_rank_says_so():
    layouts = ranks_of((2,), {"w": (torch.zeros(4), (Shard(0),))}, ["p"] * 2)
    other = ranks_of((2,), {"w": (torch.zeros(4), (Strided(0),))}, ["p"] * 2)
    plan = plan_packing([layouts[0], other[1]], bucket_bytes=1 << 20)
    assert plan.gathered == (0,)
    assert [len(writes) for writes in plan.writes] == [1, 0]


def test_ranks_with_different_models_are_refused_by_name():
    one, other = (ranks_of((2,), {"w": (torch.zeros(size), (Shard(0),))}, ["p"] * 2)[0] for size in (4, 5))
    with pytest.raises(WeightMismatch, match=r"weights of rank 1 .* w is float32\[5\], not float32\[4\]"):
        plan_packing([one, other], bucket_bytes=64)


shapes = st.lists(st.integers(1, 7), min_size=1, max_size=3).map(tuple)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    mesh=st.sampled_from([(1,), (2,), (3,), (2, 2), (3, 2)]),
    shapes=st.lists(shapes, min_size=1, max_size=4),
    hosts=st.integers(1, 3),
    bucket_bytes=st.sampled_from([1, 100, 1 << 20]),
    data=st.data(),
)
def test_every_element_is_written_exactly_once_and_pieces_never_overlap(
    mesh, shapes, hosts, bucket_bytes, data
):
    placements = [
        tuple(
            data.draw(st.sampled_from([Replicate(), *(Shard(dim) for dim in range(len(shape)))]))
            for _ in mesh
        )
        for shape in shapes
    ]
    tensors = {
        f"w{i}": (torch.zeros(shape), how)
        for i, (shape, how) in enumerate(zip(shapes, placements, strict=True))
    }
    world = math.prod(mesh)
    plan = plan_packing(
        ranks_of(mesh, tensors, [f"h{rank * hosts // world}" for rank in range(world)]),
        bucket_bytes=bucket_bytes,
    )
    memory = [torch.zeros(bucket.nbytes, dtype=torch.uint8) for bucket in plan.buckets]
    for index, entry in enumerate(plan.entries):
        written = torch.zeros(entry.shape)
        for rank, writes in enumerate(plan.writes):
            for write in (write for write in writes if write.source == index):
                assert plan.buckets[write.piece.bucket].domain == plan.domains[rank]
                write.box.of(written).add_(1)
                assert write.box.overlap(write.piece.box) == write.box
        assert (written == 1).all()
        assert sum(piece.box.numel for piece in entry.pieces) == math.prod(entry.shape)
        for piece in entry.pieces:
            memory[piece.bucket][piece.offset : piece.offset + 4 * piece.box.numel] += 1
    assert all(bucket.max() <= 1 for bucket in memory)
    assert all(bucket.nbytes <= max(bucket_bytes, 4 * 343) for bucket in plan.buckets)
