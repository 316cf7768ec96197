"""Reading GGUF: every value and tensor comes back, and what cannot be read says why."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from actors.models.gguf import GgufError, read_gguf
from tests.actors.gguf_files import F16, F32, Q4_1, Q8_0, metadata_only, write_gguf

METADATA = {
    "general.architecture": "llama",
    "flag": True,
    "count": 7,
    "scale": 0.5,
    "words": ["a", "Ġb", "🙂"],
    "numbers": [1, 2, 3],
}


def numbers(*shape: int) -> np.ndarray:
    """Multiples of a half from -4 to 3.5: every type here holds them exactly. No two rows are alike."""
    return (np.random.default_rng(0).integers(0, 16, size=shape) * 0.5 - 4).astype(np.float32)


@pytest.mark.parametrize("kind", [F32, F16, Q4_1, Q8_0])
def test_tensors_of_each_type_come_back(kind: int, tmp_path: Path) -> None:
    first, second = numbers(3, 64), numbers(96)
    path = write_gguf(tmp_path / "m.gguf", METADATA, [("a.weight", first, kind), ("b.weight", second, kind)])
    read = read_gguf(path).tensors
    assert list(read) == ["a.weight", "b.weight"]
    assert {tensor.dtype for tensor in read.values()} == {torch.float32}
    assert torch.equal(read["a.weight"], torch.from_numpy(first))
    assert torch.equal(read["b.weight"], torch.from_numpy(second))


def test_metadata_come_back(tmp_path: Path) -> None:
    assert read_gguf(write_gguf(tmp_path / "m.gguf", METADATA, [])).metadata == METADATA


def test_data_may_be_aligned_otherwise(tmp_path: Path) -> None:
    tensors = [("a", numbers(1), F32), ("b", numbers(5), F32)]
    path = write_gguf(tmp_path / "m.gguf", {"general.alignment": 128}, tensors)
    assert torch.equal(read_gguf(path).tensors["b"], torch.from_numpy(tensors[1][1]))


def test_another_file_or_version_is_refused(tmp_path: Path) -> None:
    other = tmp_path / "other.gguf"
    other.write_bytes(b"PK\3\4" + b"\0" * 60)
    with pytest.raises(GgufError, match=r"other\.gguf: this is no GGUF file"):
        read_gguf(other)
    with pytest.raises(GgufError, match="version 2 or 3 is needed, got 1"):
        read_gguf(write_gguf(tmp_path / "old.gguf", {}, [], version=1))


@pytest.mark.parametrize("kept", [10, 60, 170, -1])
def test_a_file_that_is_cut_off_is_refused(kept: int, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", METADATA, [("a", numbers(32), F32)])
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(GgufError, match="is cut off"):
        read_gguf(path)


def test_a_type_that_is_not_known_is_named(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", {}, [("a.weight", numbers(32), F32)])
    raw = bytearray(path.read_bytes())
    at = raw.index(b"a.weight") + 8 + 4 + 8
    raw[at] = 12
    path.write_bytes(raw)
    with pytest.raises(GgufError, match=r"a\.weight is of type 12; known are F32"):
        read_gguf(path)


@pytest.mark.parametrize("case", ["empty", "text", "alignment 0", "alignment by a text", "lists in lists"])
def test_a_damaged_file_is_refused(case: str, tmp_path: Path) -> None:
    alignment = {"alignment 0": 0, "alignment by a text": "32"}.get(case, 32)
    words = {"general.architecture": "llama", "general.alignment": alignment}
    path = tmp_path / "m.gguf"
    raw = metadata_only(words, lists=2000 if case == "lists in lists" else 0)
    raw = raw.replace(b"llama", b"ll\xffma") if case == "text" else raw
    path.write_bytes(b"" if case == "empty" else raw)
    with pytest.raises(GgufError, match=r"m\.gguf is damaged: "):
        read_gguf(path)
