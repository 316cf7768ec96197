"""What a Hugging Face model folder holds, looked at before anything loads it.

folder ──> weights: every shard there, every header whole
       └─> config.json ──> sizes are numbers ──> a causal language model that transformers can make
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from neoproto.errors import ConfigError
from neoproto.files import user_path, wrong_kind
from neoproto.text import one_line, shown

MODEL_FIELD = "actor_rollout_ref.model.path"
_SAFE, _SAFE_INDEX = "model.safetensors", "model.safetensors.index.json"
_BIN, _BIN_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"
_TORCH_MARKS = (b"PK", b"\x80")
"""What PyTorch's files begin with: zip archives, and pickles before them."""
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt")
_TOKENIZER_JSON = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json",
)  # fmt: skip
_USUAL_NAMES = {
    "n_embd": "hidden_size",
    "n_head": "num_attention_heads",
    "n_inner": "intermediate_size",
    "n_layer": "num_hidden_layers",
    "n_positions": "max_position_embeddings",
}
"""What GPT-2 and its descendants call these sizes in `config.json`."""
_SIZES = (*_USUAL_NAMES.values(), "num_key_value_heads", "head_dim", "vocab_size")


def check_model_folder(path: str | Path, *, field: str = MODEL_FIELD) -> Path:
    """Refuse a folder that is not a Hugging Face causal language model with its tokenizer.

    This imports transformers' models, which takes seconds.

    Args:
        path: the folder.
        field: the configuration key it comes from, for messages.

    Raises:
        ConfigError: as `find_model_folder`; or a file of its weights is missing or damaged, or
            the configuration cannot be used.
    """
    folder = find_model_folder(path, field=field)
    count_parameters(folder, field=field)
    _check_causal(folder, field)
    return folder


def find_model_folder(path: str | Path, *, field: str = MODEL_FIELD) -> Path:
    """Refuse a folder that has not the files of a model and its tokenizer.

    Raises:
        ConfigError: no such folder, or it lacks `config.json`, weights or tokenizer files; all are listed.
    """
    folder = user_path(path, field=field)
    if problem := wrong_kind(folder, "folder"):
        raise ConfigError(f"{field}: {problem}")
    if not folder.is_dir():
        raise ConfigError(f"{field}: no such folder: {folder}")
    missing = []
    if not (folder / "config.json").is_file():
        missing.append("config.json")
    if not any((folder / name).is_file() for name in (_SAFE, _SAFE_INDEX, _BIN, _BIN_INDEX)):
        missing.append(f"weights ({_SAFE}, or {_SAFE_INDEX} and the shards that it names)")
    if not any((folder / name).is_file() for name in _TOKENIZER_FILES):
        missing.append("a tokenizer (tokenizer.json or tokenizer_config.json)")
    if missing:
        raise ConfigError(
            f"{field}: {folder} is not a Hugging Face model folder, it lacks {', '.join(missing)}"
        )
    return folder


def check_tokenizer_files(folder: Path, *, field: str = MODEL_FIELD) -> None:
    """Refuse a tokenizer's files that are no JSON objects: transformers' own message does not name them.

    Raises:
        ConfigError: as `read_json_object`.
    """
    for name in _TOKENIZER_JSON:
        if (folder / name).exists():
            read_json_object(folder / name, field=field)


def read_json_object(path: Path, *, field: str) -> dict[str, Any]:
    """A JSON file of a model folder that holds one object.

    Raises:
        ConfigError: it cannot be read, is no JSON, or holds something else.
    """
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:  # a ValueError: no text, no JSON, endless digits
        raise ConfigError(f"{field}: {path} cannot be read: {one_line(error)}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{field}: {path}: a JSON object is needed, got {shown(values)}")
    return values


def read_model_config(model: str | Path, *, field: str) -> dict[str, Any]:
    """The model's `config.json`, its text part where it has several; sizes under their usual names too.

    Sizes that are there are whole numbers of at least 1.

    Raises:
        ConfigError: missing, not a JSON object, or with a size that is no such number.
    """
    path = Path(model) / "config.json"
    whole = read_json_object(path, field=field)
    inner = whole.get("text_config")
    found = whole
    if isinstance(inner, dict):
        found = inner | {"architectures": whole.get("architectures")}
    renamed = {usual: found[name] for name, usual in _USUAL_NAMES.items() if name in found}
    config = renamed | found
    bad = [
        f"{field}: {path}: {name}: a whole number of at least 1 is needed, got {shown(config[name])}"
        for name in _SIZES
        if config.get(name) is not None and (type(config[name]) is not int or config[name] < 1)
    ]
    if bad:
        raise ConfigError(*bad)
    return config


def head_dim(config: Mapping[str, Any]) -> int | None:
    """Size of an attention head, None where the configuration has none."""
    if config.get("head_dim"):
        return int(config["head_dim"])
    if config.get("hidden_size") and config.get("num_attention_heads"):
        return int(config["hidden_size"] // config["num_attention_heads"])
    return None


def vocabulary_size(model: str | Path, *, field: str = MODEL_FIELD) -> int | None:
    """How many tokens the model knows, None where its configuration has none.

    Raises:
        ConfigError: as `read_model_config`.
    """
    size: int | None = read_model_config(model, field=field).get("vocab_size")
    return size


def end_token_ids(folder: Path, *, field: str = MODEL_FIELD) -> tuple[int, ...]:
    """Tokens that end an answer by the model's own files, by the rule of transformers' generation: those of
    `generation_config.json`; where it names none, those of `config.json`, or of its text part.

    Numbers in `config.json` that are no token of the model, such as -1, stand for none.

    Raises:
        ConfigError: a file cannot be read, or names what is no number; `generation_config.json` names what is
            no token of the model.
    """
    generation, config = folder / "generation_config.json", folder / "config.json"
    known = vocabulary_size(folder, field=field)
    listed = read_json_object(generation, field=field).get("eos_token_id") if generation.exists() else None
    if listed is not None:
        return _token_numbers(listed, generation, field, math.inf if known is None else known)
    whole = read_json_object(config, field=field)
    for part in (whole, *(whole.get(name) for name in ("decoder", "generator", "text_config"))):
        if isinstance(part, dict) and part.get("eos_token_id") is not None:
            numbers = _token_numbers(part["eos_token_id"], config, field, None)
            return tuple(one for one in numbers if one >= 0 and (known is None or one < known))
    return ()


def _token_numbers(listed: Any, path: Path, field: str, below: float | None) -> tuple[int, ...]:
    """One or several whole numbers; with `below`, from 0 to that."""
    numbers = listed if isinstance(listed, list) else [listed]
    if any(type(one) is not int or (below is not None and not 0 <= one < below) for one in numbers):
        most = "" if below in (None, math.inf) else f" below {below} (vocab_size in config.json)"
        raise ConfigError(
            f"{field}: {path}: eos_token_id: token numbers{most} are needed, got {shown(listed)}"
        )
    return tuple(numbers)


def count_parameters(folder: Path, *, field: str = MODEL_FIELD) -> int:
    """Numbers in the weight files, by their headers, no weight is read; of PyTorch's, bytes at four a number.

    Raises:
        ConfigError: a file is damaged, or the pointer of one that was not downloaded; one that an index names
            is missing; there is no number in them.
    """
    # Engines follow the index of safetensors wherever there is one, and PyTorch's where nothing else is.
    safe = _shards(folder / _SAFE_INDEX, field) if (folder / _SAFE_INDEX).is_file() else set()
    safe |= {path.name for path in folder.glob("*.safetensors")}
    if safe:
        count = sum(_numbers(folder / name, field) for name in sorted(safe))
    else:
        single = os.path.lexists(folder / _BIN)
        names = {_BIN} if single else _shards(folder / _BIN_INDEX, field)
        count = sum(_torch_bytes(folder / name, field) for name in sorted(names)) // 4
    if not count:
        raise ConfigError(f"{field}: there are no weights in the weight files of {folder}")
    return count


def _shards(index: Path, field: str) -> set[str]:
    """Names of the files that an index spreads the weights over, all of which are there."""
    weight_map = read_json_object(index, field=field).get("weight_map")
    named = list(weight_map.values()) if isinstance(weight_map, dict) else []
    if not named or not all(isinstance(name, str) for name in named):
        raise ConfigError(
            f"{field}: {index}: weight_map: an object of tensor and file names is needed, got "
            f"{shown(weight_map)}"
        )
    names = set(named)
    if missing := sorted(name for name in names if not (index.parent / name).is_file()):
        listed = ", ".join(missing[:3]) + (f" and {len(missing) - 3} more" if len(missing) > 3 else "")
        raise ConfigError(f"{field}: {index} names files that are not there: {listed}")
    return names


def _numbers(file: Path, field: str) -> int:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="numpy") as opened:  # compares the header with the file's length
            return sum(math.prod(opened.get_slice(name).get_shape()) for name in opened.keys())  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"{field}: {file} is damaged: {one_line(error)}") from error


def _torch_bytes(file: Path, field: str) -> int:
    try:
        with file.open("rb") as opened:
            if not opened.read(2).startswith(_TORCH_MARKS):
                raise ConfigError(f"{field}: {file} is damaged: it is no file of PyTorch's")
        return file.stat().st_size
    except OSError as error:
        raise ConfigError(f"{field}: {file} is damaged: {error.strerror or error}") from error


def _check_causal(folder: Path, field: str) -> None:
    path = folder / "config.json"
    whole = read_json_object(path, field=field)
    read_model_config(folder, field=field)
    kind = whole.get("model_type")
    if not isinstance(kind, str):
        raise ConfigError(f'{field}: {path}: model_type: a name such as "llama" is needed, got {shown(kind)}')
    from transformers import AutoConfig, GenerationConfig, __version__
    from transformers.models.auto import modeling_auto

    # transformers counts encoders as causal too: with `is_decoder` they can be.
    encoder = kind in modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES and whole.get("is_decoder") is not True
    if kind not in modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES or encoder:
        raise ConfigError(
            f"{field}: {path}: model_type: {shown(kind)} is no causal language model that transformers "
            f"{__version__} has"
        )
    try:
        AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # the file is the user's, and each model's configuration has checks of its own
        raise ConfigError(f"{field}: {path} cannot be used: {one_line(error)}") from error
    generation = folder / "generation_config.json"
    if generation.exists():
        read_json_object(generation, field=field)
        try:
            with _no_warnings():
                GenerationConfig.from_pretrained(folder, local_files_only=True)
        except Exception as error:  # as above: models are not loaded with one that is refused here
            raise ConfigError(f"{field}: {generation} cannot be used: {one_line(error)}") from error


@contextmanager
def _no_warnings() -> Iterator[None]:
    """Keep transformers' warnings of a file from the terminal; workers that load it log them."""
    from transformers.utils import logging

    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)
