"""Two real processes, FSDP2 over gloo, against one process without any sharding."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from neoproto.store import MemoryStore
from neoproto.weights.puller import WeightReader
from tests.actors import rank_program
from tests.actors.program_runs import run_program
from tests.actors.tiny_llama import make_folder


def run_ranks(folder: Path, world_size: int) -> list[dict]:
    run_program("tests.actors.rank_program", folder, world_size)
    return [load(folder / f"out{world_size}_{rank}.pt") for rank in range(world_size)]


def load(path: Path) -> dict:
    return torch.load(path, weights_only=False)  # manifests are no tensors


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("ranks")
    make_folder(path / "model", tied=True)
    return path


@pytest.fixture(scope="module")
def alone(folder):
    threads = torch.get_num_threads()
    rank_program.main(0, 1, folder)
    torch.set_num_threads(threads)
    return load(folder / "out1_0.pt")


@pytest.fixture(scope="module")
def pair(folder):
    return run_ranks(folder, 2)


@pytest.mark.parametrize("model", ["policy", "critic"])
def test_two_ranks_make_the_update_of_one(alone, pair, model):
    found = pair[0][model]
    assert found.keys() == alone[model].keys()
    for name, expected in alone[model].items():
        torch.testing.assert_close(found[name], expected, atol=1e-6, rtol=0, msg=name)


@pytest.mark.parametrize("figures", ["policy_figures", "critic_figures"])
def test_metrics_are_those_of_the_whole_batch_on_every_rank(alone, pair, figures):
    assert pair[0][figures] == pair[1][figures]
    assert pair[0][figures] == pytest.approx(alone[figures], abs=1e-5, rel=1e-5)


def test_each_rank_scores_its_own_rows(alone, pair):
    for answer in ("log_probs", "values"):
        for name, expected in alone[answer].items():
            found = torch.cat([rank[answer][name] for rank in pair])
            torch.testing.assert_close(found, expected, atol=1e-5, rtol=0, msg=name)


def read_published(ranks):
    """What a replica reads of the version that all ranks published, each its own buckets."""
    store = MemoryStore()
    for rank in ranks:
        store.put_batch(rank["buckets"])
    manifest = ranks[0]["published"]
    assert all(rank["published"] == manifest for rank in ranks)
    by_key = replace(manifest, buckets=tuple(bucket.key for bucket in manifest.buckets))
    return WeightReader(store).read(by_key), manifest.nbytes


def test_every_rank_publishes_its_shards_and_a_replica_reads_whole_weights_with_tied_ones_once(alone, pair):
    (published, nbytes), state = read_published(pair), pair[0]["policy"]
    whole, whole_nbytes = read_published([alone])
    assert published.keys() == state.keys() == whole.keys()
    assert all(torch.equal(published[name], state[name]) for name in state)
    assert all(torch.equal(whole[name], alone["policy"][name]) for name in state)
    assert published["lm_head.weight"].data_ptr() == published["model.embed_tokens.weight"].data_ptr()
    assert nbytes == whole_nbytes
    written = [sum(bucket.numel() for bucket in rank["buckets"].values()) for rank in pair]
    assert max(written) < 0.6 * sum(written)


def test_a_sharded_model_is_saved_as_one_folder_that_loads(folder, pair):
    loaded = AutoModelForCausalLM.from_pretrained(folder / "saved").state_dict()
    assert loaded.keys() == pair[0]["policy"].keys()
    assert all(torch.equal(tensor, pair[0]["policy"][name]) for name, tensor in loaded.items())


def test_what_is_not_finite_on_one_rank_raises_on_all_and_changes_nothing(pair):
    assert all("loss nan" in rank["message"] for rank in pair)
    assert all(rank["unchanged"] for rank in pair)
