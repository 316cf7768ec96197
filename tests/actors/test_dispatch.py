from types import SimpleNamespace

import pytest
import torch

from actors.dispatch import first_result, joined, replicate, split_batch, spread_batch
from actors.training.critic import CriticWorker
from actors.training.policy import PolicyWorker
from actors.training.reference import ReferenceWorker
from neoproto.data import DataProto
from neoproto.runtime.registration import CustomDispatch, Dispatch, method_table

GROUP = SimpleNamespace(world_size=2)


def test_every_rank_gets_the_same_arguments():
    assert replicate(GROUP, 7, path="x") == (([7, 7],), {"path": ["x", "x"]})


def test_a_batch_is_split_and_never_padded():
    batch = DataProto.from_dict(tensors={"a": torch.arange(4)})
    (shares,), rest = split_batch(GROUP, batch)
    assert [share["a"].tolist() for share in shares] == [[0, 1], [2, 3]]
    assert rest == {}
    with pytest.raises(ValueError, match="3 rows do not divide over 2 ranks"):
        split_batch(GROUP, batch.slice(0, 3))


def test_independent_rows_are_spread_in_nearly_equal_shares_and_joined_in_order():
    batch = DataProto.from_dict(tensors={"a": torch.arange(3)})
    (shares,), rest = spread_batch(GROUP, batch)
    assert [share["a"].tolist() for share in shares] == [[0], [1, 2]]
    assert rest == {}
    assert joined(GROUP, shares)["a"].tolist() == [0, 1, 2]
    (shares,), _ = spread_batch(GROUP, batch.slice(0, 1))
    assert [len(share) for share in shares] == [0, 1]
    assert joined(GROUP, shares)["a"].tolist() == [0]
    (nothing,), _ = spread_batch(GROUP, batch.slice(0, 0))
    assert len(joined(GROUP, nothing)) == 0


def test_updates_split_and_publishing_replicates_and_both_answer_once():
    for cls, split, replicated in (
        (PolicyWorker, ["update_actor"], ["publish_weights", "save_hf"]),
        (CriticWorker, ["update_critic"], []),
    ):
        table = method_table(cls)
        for names, function in ((split, split_batch), (replicated, replicate)):
            for name in names:
                assert table[name].dispatch_mode == CustomDispatch(
                    dispatch_fn=function, collect_fn=first_result
                )
    assert first_result(GROUP, [{"x": 1.0}, {"x": 1.0}]) == {"x": 1.0}


@pytest.mark.parametrize(
    ("cls", "name"),
    [
        (PolicyWorker, "compute_log_prob"),
        (CriticWorker, "compute_values"),
        (ReferenceWorker, "compute_ref_log_prob"),
    ],
)
def test_scoring_splits_pads_and_concatenates(cls, name):
    spec = method_table(cls)[name]
    assert spec.dispatch_mode is Dispatch.DP_COMPUTE_PROTO
    assert spec.pad
