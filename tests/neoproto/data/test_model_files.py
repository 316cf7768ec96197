"""What a model folder must hold, and what is said of one that does not."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from neoproto.data.model_files import (
    check_model_folder,
    count_parameters,
    read_json_object,
    read_model_config,
)
from neoproto.errors import ConfigError

CONFIG = {"model_type": "llama", "hidden_size": 64, "num_attention_heads": 2, "num_hidden_layers": 1}


def folder_of(path: Path, **files: Any) -> Path:
    """A folder that passes, with these files instead of its own: bytes as they are, all else as JSON."""
    path.mkdir(exist_ok=True)
    save_file({"a": np.zeros(4)}, path / "model.safetensors")
    named = {"config.json": CONFIG, "tokenizer.json": {}} | files
    for name, content in named.items():
        (path / name).write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    return path


def refused(folder: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        check_model_folder(folder, field="x")
    (problem,) = caught.value.problems
    assert problem.startswith("x: ")
    assert "\n" not in problem
    return problem.removeprefix("x: ")


def test_what_a_folder_lacks_is_listed(tmp_path: Path) -> None:
    assert refused(tmp_path / "nowhere") == f"no such folder: {tmp_path}/nowhere"
    assert "lacks config.json, weights (model.safetensors, or " in refused(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    assert refused(tmp_path / "pipe") == f"{tmp_path}/pipe is a named pipe, a folder is needed"


@pytest.mark.parametrize(
    ("name", "there"),
    [("model.safetensors", True), ("pytorch_model.bin", True), ("training_args.bin", False)],
)
def test_not_every_file_of_a_kind_holds_weights(tmp_path: Path, name: str, there: bool) -> None:
    folder = folder_of(tmp_path)
    (folder / "model.safetensors").rename(folder / name)
    if name.endswith(".bin"):
        torch.save({"a": torch.zeros(4)}, folder / name)
    if there:
        assert check_model_folder(folder) == folder
    else:
        assert "it lacks weights (model.safetensors" in refused(folder)


@pytest.mark.parametrize(
    ("weight_map", "said"),
    [
        ({"a": "model.safetensors"}, None),
        (
            {"a": "m-1.safetensors", "b": "m-2.safetensors", "c": "model.safetensors"},
            "names files that are not there: m-1.safetensors, m-2.safetensors",
        ),
        (
            {str(number): f"m-{number}.safetensors" for number in range(5)},
            "names files that are not there: m-0.safetensors, m-1.safetensors, m-2.safetensors and 2 more",
        ),
        ({"a": [3]}, "weight_map: an object of tensor and file names is needed, got {'a': [3]}"),
        ({"a": 3}, "weight_map: an object of tensor and file names is needed, got {'a': 3}"),
        (None, "weight_map: an object of tensor and file names is needed, got None"),
    ],
)
def test_every_shard_that_an_index_names_is_there(tmp_path: Path, weight_map: Any, said: str | None) -> None:
    folder = folder_of(tmp_path, **{"model.safetensors.index.json": {"weight_map": weight_map}})
    if said is None:
        assert check_model_folder(folder) == folder
    else:
        assert said in refused(folder)
        (folder / "model.safetensors.index.json").rename(folder / "pytorch_model.bin.index.json")
        assert check_model_folder(folder) == folder  # nobody follows this one beside safetensors
        (folder / "model.safetensors").unlink()
        assert "pytorch_model.bin.index.json" in refused(folder)


def test_half_a_weight_file_is_damaged(tmp_path: Path) -> None:
    folder = folder_of(tmp_path)
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-8])
    assert refused(folder).startswith(f"{file} is damaged: ")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"{", "cannot be read: Expecting property name"),
        (b"\xff\xfe\x00", "cannot be read: 'utf-8' codec can't decode"),
        pytest.param(b"[" + b"1" * 5000 + b"]", "cannot be read: Exceeds the limit", id="digits"),
        ([], ": a JSON object is needed, got []"),
        ("", ": a JSON object is needed, got ''"),
        ({}, ': model_type: a name such as "llama" is needed, got None'),
        (CONFIG | {"model_type": ["llama"]}, ": model_type: a name such as"),
        (CONFIG | {"model_type": "foo"}, ": model_type: 'foo' is no causal language model"),
        (CONFIG | {"model_type": "bert"}, ": model_type: 'bert' is no causal language model"),
        (CONFIG | {"max_position_embeddings": "2048"}, ": max_position_embeddings: a whole number of at"),
        (CONFIG | {"head_dim": "abc"}, ": head_dim: a whole number of at least 1 is needed, got 'abc'"),
        (CONFIG | {"num_hidden_layers": True}, ": num_hidden_layers: a whole number of"),
        (CONFIG | {"vocab_size": 0}, ": vocab_size: a whole number of at least 1 is needed, got 0"),
        (CONFIG | {"hidden_size": 65}, " cannot be used: Class validation error"),
        (
            CONFIG | {"rope_scaling": 3},
            " cannot be used: Validation error for field 'rope_parameters': TypeErr",
        ),
    ],
)
def test_a_configuration_that_cannot_be_used_is_named(tmp_path: Path, content: Any, said: str) -> None:
    folder = folder_of(tmp_path, **{"config.json": content})
    problem = refused(folder)
    assert problem.startswith(str(folder / "config.json"))
    assert said in problem


def test_an_encoder_may_be_a_decoder(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, **{"config.json": {"model_type": "bert", "is_decoder": True}})
    assert check_model_folder(folder) == folder


def test_the_text_part_has_the_sizes_and_the_whole_has_the_head(tmp_path: Path) -> None:
    config = {"architectures": ["XForConditionalGeneration"], "text_config": {"n_embd": 4}, "vocab_size": 7}
    found = read_model_config(folder_of(tmp_path, **{"config.json": config}), field="x")
    assert found == {"architectures": ["XForConditionalGeneration"], "n_embd": 4, "hidden_size": 4}


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^x: .*none\.json cannot be read: .*No such file"):
        read_json_object(tmp_path / "none.json", field="x")


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 5\n"


def whole(path: Path) -> Path:
    save_file({"a": np.zeros((30, 64)), "b": np.zeros(7)}, path)
    return path


def test_parameters_are_counted_from_headers_over_all_files(tmp_path: Path) -> None:
    whole(tmp_path / "model-1.safetensors")
    save_file({"c": np.zeros(()), "d": np.zeros((2, 3))}, tmp_path / "model-2.safetensors")
    weights = {"a": "model-1.safetensors", "c": "model-2.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weights}))
    assert count_parameters(tmp_path, field="f") == 30 * 64 + 7 + 1 + 6


def test_files_of_pytorch_are_counted_by_their_bytes(tmp_path: Path) -> None:
    torch.save({"a": torch.zeros(1000)}, tmp_path / "pytorch_model.bin")
    assert 1000 <= count_parameters(tmp_path, field="f") < 1500


def cut(path: Path) -> None:
    path.write_bytes(whole(path).read_bytes()[:-1])


def dangling(path: Path) -> None:
    path.symlink_to("nowhere")


@pytest.mark.parametrize(
    ("name", "make", "said"),
    [
        ("model.safetensors", cut, "{path} is damaged: "),
        ("model.safetensors", lambda path: path.write_bytes(b""), "{path} is damaged: "),
        ("model.safetensors", lambda path: path.write_bytes(POINTER), "{path} is damaged: "),
        ("model.safetensors", lambda path: path.mkdir(), "{path} is damaged: "),
        ("model.safetensors", dangling, "{path} is damaged: No such file"),
        (
            "model.safetensors",
            lambda path: save_file({}, path),
            "there are no weights in the weight fi",
        ),
        (
            "pytorch_model.bin",
            lambda path: path.write_bytes(POINTER),
            "{path} is damaged: it is no file of",
        ),
        ("pytorch_model.bin", lambda path: path.mkdir(), "{path} is damaged: Is a directory"),
        ("pytorch_model.bin", dangling, "{path} is damaged: No such file"),
    ],
)
def test_weights_that_are_not_whole_are_named(
    tmp_path: Path, name: str, make: Callable[[Path], Any], said: str
) -> None:
    path = tmp_path / name
    make(path)
    with pytest.raises(ConfigError) as caught:
        count_parameters(tmp_path, field="critic.model.path")
    assert str(caught.value).startswith(f"critic.model.path: {said.format(path=path)}")
