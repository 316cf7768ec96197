"""Checkpoints by two real processes, FSDP2 over gloo, and what one process makes of them."""

import hashlib

import pytest
import torch

from tests.actors.checkpoint_program import KINDS, Trained, differing
from tests.actors.program_runs import run_program
from tests.actors.tiny_llama import make_folder

FILES = {
    name.format(rank)
    for rank in range(2)
    for name in ("shard-{:05d}-of-00002.safetensors", "rank-{:05d}-of-00002.json")
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("ranks")
    make_folder(path / "model", tied=True)
    return path


@pytest.fixture(scope="module")
def alone(folder):
    """What one rank saved, by kind."""
    states = {}
    for kind in KINDS:
        one = Trained(kind, folder / "model")
        one.update(0)
        one.checkpoints.save(folder / f"alone-{kind}")
        states[kind] = one.state()
        one.finish()
    return states


@pytest.fixture(scope="module")
def pair(folder, alone):
    run_program("tests.actors.checkpoint_program", folder, 2)
    return [torch.load(folder / f"found_{rank}.pt") for rank in range(2)]


@pytest.mark.parametrize("kind", KINDS)
def test_two_ranks_go_on_bit_for_bit_and_train_while_they_write(pair, kind):
    for rank in pair:
        found = rank["going_on"][kind]
        assert found["loaded"] == []
        assert found["figures"][0] == found["figures"][1]
        assert found["end"] == []
        assert found["drawn"][0] == found["drawn"][1]
    assert pair[0]["going_on"][kind]["drawn"] != pair[1]["going_on"][kind]["drawn"]


@pytest.mark.parametrize("kind", KINDS)
def test_every_rank_writes_its_share_and_knows_its_checksums(folder, pair, kind):
    saved = folder / f"pair-{kind}"
    shares = [rank["going_on"][kind]["files"] for rank in pair]
    assert all(len(share) == 2 for share in shares)
    digests = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in saved.iterdir()}
    assert shares[0] | shares[1] == digests
    assert digests.keys() == FILES
    sizes = [path.stat().st_size for path in saved.glob("*.safetensors")]
    assert max(sizes) < 0.6 * sum(sizes)


@pytest.mark.parametrize("kind", KINDS)
def test_one_rank_loads_what_two_saved(folder, pair, kind):
    one = Trained(kind, folder / "model")
    one.checkpoints.load(folder / f"pair-{kind}")
    assert differing(one.state(), pair[0]["going_on"][kind]["saved"]) == []


@pytest.mark.parametrize("kind", KINDS)
def test_two_ranks_load_what_one_saved(alone, pair, kind):
    for rank in pair:
        assert differing(rank["resharded"][kind], alone[kind]) == []


def test_a_rank_that_cannot_write_fails_all_and_the_next_save_works(pair):
    failures = [rank["failing"]["failure"] for rank in pair]
    assert failures[0] == failures[1]
    assert "File too large" in failures[0]
    assert "failed/rank-00001-of-00002.json" in failures[0] or "failed/shard-00001" in failures[0]
    assert pair[0]["failing"]["retried"].keys() | pair[1]["failing"]["retried"].keys() == FILES


def test_what_one_rank_finds_wrong_is_raised_on_all_before_anything_is_changed(pair):
    refusals = [rank["refusing"]["refusal"] for rank in pair]
    assert refusals[0] == refusals[1]
    assert "nothing-here cannot be read as a checkpoint: No such file or directory" in refusals[0]
    assert all(rank["refusing"]["changed"] == [] for rank in pair)
