"""What is said of weight files before anything is started."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from neoproto.errors import ConfigError
from neoproto.run.weight_files import INDEX, count_parameters

POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 5\n"


def whole(path: Path) -> Path:
    save_file({"a": torch.zeros(30, 64), "b": torch.zeros(7)}, path)
    return path


def test_parameters_are_counted_from_headers_over_all_files(tmp_path: Path) -> None:
    whole(tmp_path / "model-1.safetensors")
    save_file({"c": torch.zeros(()), "d": torch.zeros(2, 3)}, tmp_path / "model-2.safetensors")
    weights = {"a": "model-1.safetensors", "c": "model-2.safetensors"}
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": weights}))
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
        (INDEX, lambda path: path.write_text("[]"), "{path} is damaged: TypeError"),
        (
            INDEX,
            lambda path: path.write_text('{"weight_map": {"a": "1.safetensors", "b": "2.safetensors"}}'),
            "{path.parent} lacks 1.safetensors and 1 more, which model.safetensors.index.json lists",
        ),
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
