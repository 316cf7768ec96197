import asyncio
import contextlib
import hashlib
import json
import os
import pickle
import resource
import threading
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch.distributed.checkpoint import HuggingFaceStorageReader

from actors.checkpoint import files as checkpoint_files
from actors.checkpoint.state import HostCopies
from actors.training.torch_model import named_weights
from neoproto.errors import ConfigError, WeightMismatch
from tests.actors.checkpoint_program import KINDS, Trained, differing
from tests.actors.tiny_llama import make_folder

SHARD, STATE = "shard-00000-of-00001.safetensors", "rank-00000-of-00001.json"


@pytest.fixture
def policy(tied_llama_folder):
    return Trained("policy", tied_llama_folder)


@pytest.fixture
def saved(policy, tmp_path):
    """A checkpoint after one update."""
    policy.update(0)
    policy.checkpoints.save(tmp_path / "saved")
    policy.finish()
    return tmp_path / "saved"


@pytest.fixture
def gate(monkeypatch):
    """Writing waits until it is set."""
    gate, write = threading.Event(), checkpoint_files.write_checkpoint

    def gated(*args):
        assert gate.wait(60)
        return write(*args)

    monkeypatch.setattr(checkpoint_files, "write_checkpoint", gated)
    yield gate
    gate.set()


@contextlib.contextmanager
def file_size_limit(nbytes):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("updates", [0, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_a_fresh_one_goes_on_bit_for_bit_even_from_before_the_first_step(
    tied_llama_folder, tmp_path, gate, kind, updates
):
    first = Trained(kind, tied_llama_folder)
    for seed in range(updates):
        first.update(seed)
    first.checkpoints.save(tmp_path / "saved")
    then = first.state()
    figures = [first.update(seed) for seed in (8, 9)]  # nothing has been written yet
    gate.set()
    first.finish()
    again = Trained(kind, tied_llama_folder)
    again.checkpoints.load(tmp_path / "saved")
    assert differing(again.state(), then) == []
    assert [again.update(seed) for seed in (8, 9)] == figures
    assert differing(again.state(), first.state()) == []


def test_a_step_waits_until_what_it_changes_was_copied(policy, tmp_path, monkeypatch):
    policy.update(0)
    before, fill = policy.state(), HostCopies.fill
    events = []
    policy.loop.optimizer.register_step_post_hook(lambda *_: events.append("step"))

    def slow_fill(copies, parts):
        time.sleep(0.5)
        fill(copies, parts)
        events.append("copied")

    monkeypatch.setattr(HostCopies, "fill", staticmethod(slow_fill))
    policy.checkpoints.save(tmp_path / "saved")
    assert events == [], "saving does not wait for it"
    policy.update(1)
    assert events[:2] == ["copied", "step"]
    policy.finish()
    policy.checkpoints.load(tmp_path / "saved")
    assert differing(policy.state(), before) == []


def test_a_later_save_may_need_more_room_than_an_earlier_one(policy, tmp_path):
    """The optimizer has no state before its first step."""
    for number in range(3):
        policy.checkpoints.save(tmp_path / str(number))
        then = policy.state()
        policy.finish()
        policy.update(number)
        policy.checkpoints.load(tmp_path / str(number))
        assert differing(policy.state(), then) == []
        policy.update(number)


def test_hyper_parameters_are_those_configured_and_the_rate_follows_from_the_updates(
    saved, tied_llama_folder, policy
):
    other = Trained("policy", tied_llama_folder, lr=5e-4)
    other.checkpoints.load(saved)
    assert other.loop.updates == 1
    assert other.update(1)["actor/lr"] == policy.update(1)["actor/lr"] / 2


def test_load_puts_a_model_back_that_has_trained_on(saved, policy):
    before = policy.state()
    policy.update(1)
    policy.checkpoints.load(saved)
    assert differing(policy.state(), before) == []


def test_every_file_is_named_with_its_checksum_and_the_answer_stays(saved, policy):
    digests = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in saved.iterdir()}
    assert policy.finish() == policy.finish() == digests
    assert digests.keys() == {SHARD, STATE}


def test_torch_and_safetensors_read_the_files_too(saved, policy):
    metadata = HuggingFaceStorageReader(str(saved)).read_metadata()
    tensors = dict(named_weights(policy.trained.model))
    del tensors["lm_head.weight"]  # tied
    assert {name for name in metadata.state_dict_metadata if name.startswith("model.")} == {
        f"model.{name}" for name in tensors
    }
    one = metadata.state_dict_metadata["optimizer.state.model.embed_tokens.weight.exp_avg"]
    assert tuple(one.size) == tuple(tensors["model.embed_tokens.weight"].shape)


def test_host_memory_is_kept_for_the_next_save(saved, policy, tmp_path):
    memory = policy.checkpoints._copies._memory.data_ptr()
    policy.update(1)
    policy.checkpoints.save(tmp_path / "next")
    assert policy.checkpoints._copies._memory.data_ptr() == memory
    policy.finish()


def test_one_save_waits_for_the_last_one_and_no_longer_than_it_may(policy, tmp_path, gate):
    policy.checkpoints.save(tmp_path / "first")
    before = policy.state()
    policy.update(0)
    with pytest.raises(TimeoutError, match=r"still being written after 0\.1 s"):
        policy.checkpoints.save(tmp_path / "second", timeout=0.1)
    threading.Timer(0.3, gate.set).start()
    policy.checkpoints.save(tmp_path / "second", timeout=60)
    assert (tmp_path / "first" / SHARD).exists()
    policy.finish()
    policy.checkpoints.load(tmp_path / "first")
    assert differing(policy.state(), before) == []


def test_who_stops_waiting_does_not_stop_the_writing(policy, tmp_path, gate):
    policy.checkpoints.save(tmp_path / "saved")

    async def stop_waiting():
        async with asyncio.timeout(0.05):
            await policy.checkpoints.finish()

    with pytest.raises(TimeoutError):
        asyncio.run(stop_waiting())
    gate.set()
    assert policy.finish().keys() == {SHARD, STATE}


def test_there_is_nothing_to_finish_before_the_first_save(policy):
    with pytest.raises(RuntimeError, match="no checkpoint was saved"):
        policy.finish()


def test_a_write_that_fails_says_where_as_often_as_it_is_asked_and_the_next_one_works(policy, tmp_path):
    with file_size_limit(1 << 16):
        policy.checkpoints.save(tmp_path / "full")
        for _ in range(2):
            with pytest.raises(OSError, match=f"File too large: '.*/full/{SHARD}'"):
                policy.finish()
    policy.checkpoints.save(tmp_path / "next")
    assert policy.finish().keys() == {SHARD, STATE}


def test_a_failed_write_that_nobody_asked_about_is_raised_by_the_next_save_once(policy, tmp_path):
    (tmp_path / "file").touch()
    policy.checkpoints.save(tmp_path / "file" / "saved")
    with pytest.raises(NotADirectoryError, match="file/saved"):
        policy.checkpoints.save(tmp_path / "next")
    policy.checkpoints.save(tmp_path / "next")
    assert policy.finish().keys() == {SHARD, STATE}


def test_a_checkpoint_is_never_written_over(saved, policy):
    before = {path.name: path.read_bytes() for path in saved.iterdir()}
    policy.update(1)
    policy.checkpoints.save(saved)
    with pytest.raises(FileExistsError, match=STATE):
        policy.finish()
    assert {path.name: path.read_bytes() for path in saved.iterdir()} == before


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        ({"hidden_size": 64}, r"model\.\S+ is float32\[40, 32\] in it and float32\[40, 64\] in the model"),
        ({"tied": False}, r"it lacks model\.lm_head\.weight$"),
    ],
)
def test_another_models_checkpoint_is_refused_and_changes_nothing(saved, tmp_path, make, problem):
    other = Trained("policy", make_folder(tmp_path / "other", **({"tied": True} | make)))
    other.update(0)
    before = other.state()
    with pytest.raises(WeightMismatch, match=problem):
        other.checkpoints.load(saved)
    assert differing(other.state(), before) == []


def test_a_policys_checkpoint_is_not_a_critics(saved, tied_llama_folder):
    critic = Trained("critic", tied_llama_folder)
    with pytest.raises(WeightMismatch, match=r"it lacks model.body.+ more; the model lacks model.model"):
        critic.checkpoints.load(saved)


class Trap:
    """Unpickling it makes a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (os.mkdir, (str(self.path),))


def replace_by_pickle(path: Path) -> None:
    path.write_bytes(pickle.dumps(Trap(path.parent / "executed")))


def replace_by_torch_save(path: Path) -> None:
    torch.save({"model.x": torch.zeros(3), "trap": Trap(path.parent / "executed")}, path)


def cut_short(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 100)


def drop_optimizer_place(path: Path) -> None:
    """A header without a tensor's place."""
    replace_places(path, "{}")


def nest_places(path: Path) -> None:
    """A header whose places are thousands of lists in lists."""
    replace_places(path, "[" * 5000 + "]" * 5000)


def replace_places(path: Path, places: str) -> None:
    data = path.read_bytes()
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    header["__metadata__"]["DCP_SHARDING_INFO"] = places
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + int.from_bytes(data[:8], "little") :])


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        (SHARD, replace_by_pickle),
        (SHARD, replace_by_torch_save),
        (SHARD, cut_short),
        (SHARD, drop_optimizer_place),
        (SHARD, nest_places),
        (STATE, lambda path: path.write_text("[" * 5000 + "]" * 5000)),
        (SHARD, Path.unlink),
        (STATE, replace_by_pickle),
        (STATE, cut_short),
        (STATE, Path.unlink),
        (STATE, lambda path: path.write_text("[1]")),
        (STATE, lambda path: path.write_text(json.dumps({"format": checkpoint_files.FORMAT}))),
    ],
)
def test_what_is_no_file_of_a_checkpoint_is_refused_by_name_and_nothing_in_it_runs(
    saved, policy, name, damage
):
    damage(saved / name)
    before = policy.state()
    with pytest.raises(ConfigError, match="shard-…" if damage == Path.unlink and name == SHARD else name):
        policy.checkpoints.load(saved)
    assert differing(policy.state(), before) == []
    assert not (saved / "executed").exists()


def test_a_file_of_another_format_is_said_to_be_that(saved, policy):
    save_file({"a": torch.zeros(1)}, saved / SHARD)
    with pytest.raises(ConfigError, match=rf"^{saved}/{SHARD} is not a file of a checkpoint \("):
        policy.checkpoints.load(saved)


def test_a_folder_with_shards_of_two_checkpoints_is_refused(saved, policy):
    (saved / "shard-00001-of-00002.safetensors").touch()
    with pytest.raises(ConfigError, match=r"of \[1, 2\] ranks"):
        policy.checkpoints.load(saved)


def test_a_piece_that_is_missing_is_noticed(saved, policy):
    """As if a second rank's shard had been replaced by an empty one."""
    data = (saved / SHARD).read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    places = json.loads(header["__metadata__"]["DCP_SHARDING_INFO"])
    places["model.model.norm.weight"]["shape"] = [64]
    header["__metadata__"]["DCP_SHARDING_INFO"] = json.dumps(places)
    text = json.dumps(header).encode()
    (saved / SHARD).write_bytes(len(text).to_bytes(8, "little") + text + data[8 + size :])
    with pytest.raises(ConfigError, match=r"32 of 64 elements of model\.model\.norm\.weight"):
        policy.checkpoints.load(saved)
