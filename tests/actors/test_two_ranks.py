"""Two real processes, FSDP2 over gloo, against one process without any sharding."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.actors import rank_program
from tests.actors.tiny_llama import make_folder

ROOT = Path(__file__).parents[2]


def run_ranks(folder: Path, world_size: int) -> list[dict]:
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.actors.rank_program", str(rank), str(world_size), str(folder)],
            cwd=ROOT,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(world_size)
    ]
    try:
        outputs = [process.communicate(timeout=240)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    for process, output in zip(processes, outputs, strict=True):
        assert process.returncode == 0, output
    return [torch.load(folder / f"out{world_size}_{rank}.pt") for rank in range(world_size)]


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
    return torch.load(folder / "out1_0.pt")


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


def test_sharded_weights_are_published_whole_and_tied_ones_once(alone, pair):
    published, state = pair[0]["published"], pair[0]["policy"]
    assert published.keys() == state.keys() == alone["published"].keys()
    assert all(torch.equal(published[name], state[name]) for name in state)
    assert published["lm_head.weight"].data_ptr() == published["model.embed_tokens.weight"].data_ptr()
    assert pair[0]["published_bytes"] == pair[1]["published_bytes"] == alone["published_bytes"]


def test_a_sharded_model_is_saved_as_one_folder_that_loads(folder, pair):
    loaded = AutoModelForCausalLM.from_pretrained(folder / "saved").state_dict()
    assert loaded.keys() == pair[0]["policy"].keys()
    assert all(torch.equal(tensor, pair[0]["policy"][name]) for name, tensor in loaded.items())


def test_what_is_not_finite_on_one_rank_raises_on_all_and_changes_nothing(pair):
    assert all("loss nan" in rank["message"] for rank in pair)
    assert all(rank["unchanged"] for rank in pair)
