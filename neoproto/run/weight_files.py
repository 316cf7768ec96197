"""The weight files of a Hugging Face folder: whole, as far as their headers tell; no weight is read."""

from __future__ import annotations

import json
import math
from pathlib import Path

from neoproto.errors import ConfigError, first_line

INDEX = "model.safetensors.index.json"
_TORCH_MARKS = (b"PK", b"\x80")
"""What PyTorch's files begin with: zip archives, and pickles before them."""


def count_parameters(folder: Path, *, field: str) -> int:
    """Numbers in a folder's safetensors files; of PyTorch's, their bytes at four a number.

    Args:
        field: the configuration key the folder comes from, for messages.

    Raises:
        ConfigError: a file is damaged, or the pointer of one that was not downloaded; one of several is
            missing; there is no number in them.
    """
    _check_index(folder, field)
    files = sorted(folder.glob("*.safetensors"))
    if files:
        count = sum(math.prod(shape) for file in files for shape in _shapes(file, field).values())
    else:
        count = sum(_torch_bytes(file, field) for file in sorted(folder.glob("pytorch_model*.bin"))) // 4
    if not count:
        raise ConfigError(f"{field}: there are no weights in the weight files of {folder}")
    return count


def _check_index(folder: Path, field: str) -> None:
    """A model of several files has a list of them."""
    path = folder / INDEX
    if not path.exists() or (folder / "model.safetensors").exists():
        return
    try:
        listed = {str(name) for name in json.loads(path.read_bytes())["weight_map"].values()}
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ConfigError(
            f"{field}: {path} is damaged: {type(error).__name__}: {first_line(error)}"
        ) from error
    if missing := sorted(name for name in listed if not (folder / name).is_file()):
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise ConfigError(f"{field}: {folder} lacks {missing[0]}{more}, which {INDEX} lists")


def _shapes(file: Path, field: str) -> dict[str, tuple[int, ...]]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="numpy") as opened:
            names = list(opened.keys())
            return {name: tuple(opened.get_slice(name).get_shape()) for name in names}
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"{field}: {file} is damaged: {first_line(error)}") from error


def _torch_bytes(file: Path, field: str) -> int:
    try:
        with file.open("rb") as opened:
            if not opened.read(2).startswith(_TORCH_MARKS):
                raise ConfigError(f"{field}: {file} is damaged: it is no file of PyTorch's")
        return file.stat().st_size
    except OSError as error:
        raise ConfigError(f"{field}: {file} is damaged: {error.strerror or error}") from error
