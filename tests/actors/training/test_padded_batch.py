import pytest
import torch

from actors.training.padded_batch import PaddedBatch, mini_batch_rows
from tests.actors.tiny_llama import make_batch


def test_a_piece_is_cut_to_its_longest_prompt_and_response():
    columns = make_batch(6, prompt_width=9, response_width=7)
    batch = PaddedBatch(columns)
    rows = torch.tensor([4, 1])
    micro = batch.cut(rows)
    prompt, response = int(batch.prompt_lengths[rows].max()), int(batch.response_lengths[rows].max())
    assert prompt < 9
    assert response < 7
    assert micro.response_width == response
    for name in ("input_ids", "attention_mask", "position_ids"):
        assert torch.equal(getattr(micro, name), columns[name][rows, 9 - prompt : 9 + response]), name
    assert micro.attention_mask.sum() == columns["attention_mask"][rows].sum()
    for name in ("responses", "response_mask", "advantages"):
        assert torch.equal(micro[name], columns[name][rows, :response]), name


def test_a_piece_without_any_response_keeps_one_column():
    columns = make_batch(2)
    columns["attention_mask"][:, 9:] = 0
    micro = PaddedBatch(columns).cut(torch.arange(2))
    assert micro.response_width == 1
    assert micro.response_lengths.tolist() == [0, 0]


def test_micro_batches_hold_every_row_once_and_like_lengths_together():
    batch = PaddedBatch(make_batch(11))
    rows = torch.tensor([10, 2, 3, 7, 0, 5, 8])
    pieces = list(batch.micro_batches(rows, 3))
    assert [len(piece.rows) for piece in pieces] == [3, 3, 1]
    assert sorted(torch.cat([piece.rows for piece in pieces]).tolist()) == sorted(rows.tolist())
    lengths = [piece.attention_mask.sum(dim=1) for piece in pieces]
    assert lengths[0].max() <= lengths[1].min()
    assert lengths[1].max() <= lengths[2].min()


def test_columns_per_row_travel_along():
    columns = make_batch(4) | {"truncated": torch.tensor([True, False, True, False])}
    assert PaddedBatch(columns).cut(torch.tensor([2, 3]))["truncated"].tolist() == [True, False]


def test_missing_columns_and_odd_shapes_are_named():
    columns = make_batch(4)
    with pytest.raises(ValueError, match="the batch lacks responses, response_mask"):
        PaddedBatch({name: columns[name] for name in ("input_ids", "attention_mask", "position_ids")})
    with pytest.raises(ValueError, match=r"advantages has shape \(4, 3\), expected \(4, 7\)"):
        PaddedBatch(columns | {"advantages": torch.zeros(4, 3)})
    with pytest.raises(ValueError, match=r"position_ids has shape \(4, 7\), expected \(4, 16\)"):
        PaddedBatch(columns | {"position_ids": torch.zeros(4, 7)})


def on_all_ranks(total: int, mini: int, world_size: int, seed: int | None, n: int = 1) -> list[list[int]]:
    """The rows of each mini-batch in the numbering of the whole batch, over all ranks."""
    share = total // world_size
    ranks = [
        mini_batch_rows(share, mini, rank=rank, world_size=world_size, seed=seed, samples_per_prompt=n)
        for rank in range(world_size)
    ]
    assert {len(pieces) for pieces in ranks} == {total // mini}
    assert {len(rows) for pieces in ranks for rows in pieces} == {mini // world_size}
    return [
        sorted(rank * share + row for rank, pieces in enumerate(ranks) for row in pieces[index].tolist())
        for index in range(total // mini)
    ]


@pytest.mark.parametrize("seed", [None, 3])
def test_mini_batches_are_the_same_on_any_number_of_ranks_and_hold_every_row_once(seed):
    alone = on_all_ranks(48, 12, 1, seed)
    assert sorted(row for rows in alone for row in rows) == list(range(48))
    for world_size in (2, 3, 4, 6, 12):
        assert on_all_ranks(48, 12, world_size, seed) == alone


def test_without_a_seed_a_mini_batch_takes_every_kth_row():
    assert on_all_ranks(8, 4, 1, None) == [[0, 2, 4, 6], [1, 3, 5, 7]]


def test_without_a_seed_the_samples_of_a_prompt_are_in_one_mini_batch():
    assert on_all_ranks(8, 4, 1, None, n=4) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert on_all_ranks(12, 6, 1, None, n=3) == [[0, 1, 2, 6, 7, 8], [3, 4, 5, 9, 10, 11]]


@pytest.mark.parametrize(("prompts", "mini", "n"), [(24, 12, 4), (12, 12, 2), (36, 12, 1), (48, 12, 8)])
def test_prompts_stay_together_in_the_same_mini_batches_on_every_number_of_ranks_that_divides_them(
    prompts, mini, n
):
    alone = on_all_ranks(prompts * n, mini * n, 1, None, n)
    assert sorted(row for rows in alone for row in rows) == list(range(prompts * n))
    for rows in alone:
        assert len({row // n for row in rows}) == mini
    for world_size in (2, 3, 4, 6, 12):
        assert on_all_ranks(prompts * n, mini * n, world_size, None, n) == alone


def test_ranks_that_do_not_divide_the_prompts_keep_together_what_they_can():
    """A mini-batch of one prompt's four samples, two of them on each rank."""
    assert on_all_ranks(8, 4, 2, None, n=4) == [[0, 1, 4, 5], [2, 3, 6, 7]]
    assert on_all_ranks(24, 6, 2, None, n=2) == on_all_ranks(24, 6, 2, None, n=1)


def test_shuffling_depends_on_the_seed_and_favours_no_mini_batch():
    assert on_all_ranks(48, 12, 1, 3) != on_all_ranks(48, 12, 1, 4)
    seen = torch.zeros(12, 3)
    for seed in range(600):
        for index, rows in enumerate(mini_batch_rows(12, 4, rank=0, world_size=1, seed=seed)):
            seen[rows, index] += 1
    assert (seen / 600 - 1 / 3).abs().max() < 0.1


def test_shares_that_do_not_work_out_are_refused():
    with pytest.raises(ValueError, match="3 ranks cannot share mini-batches of 8 samples equally"):
        mini_batch_rows(8, 8, rank=0, world_size=3, seed=None)
    with pytest.raises(ValueError, match="20 samples do not divide into mini-batches of 8"):
        mini_batch_rows(10, 8, rank=0, world_size=2, seed=None)
    with pytest.raises(ValueError, match="0 samples do not divide"):
        mini_batch_rows(0, 8, rank=0, world_size=1, seed=None)
