"""Hugging Face models as the torch workers use them: loading, sharding, reading out, saving."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from actors.training.ranks import Ranks
from neoproto.data.model_files import end_token_ids
from neoproto.errors import ConfigError
from neoproto.files import named_errors
from neoproto.text import one_line
from neoproto.weights import parse_dtype
from neoproto.weights.sharding import whole_tensor

TOKENIZER_FILES = (
    "tokenizer*",
    "vocab*",
    "merges*",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template*",
    "additional_chat_templates",
    "*.model",
    "*.tiktoken",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelOptions:
    """Which model, and how it is held.

    Attributes:
        path: a local Hugging Face folder; nothing is downloaded.
        dtype: of parameters and arithmetic, torch's name.
        attn_implementation: as transformers calls it.
        gradient_checkpointing: recompute activations in the backward pass.
        trust_remote_code: run code that lies in the folder.
    """

    path: str
    dtype: str = "float32"
    attn_implementation: str = "sdpa"
    gradient_checkpointing: bool = False
    trust_remote_code: bool = False


def load_model(options: ModelOptions, ranks: Ranks, *, head: bool) -> nn.Module:
    """The model of the folder on this rank's device, without dropout, not sharded yet.

    Args:
        head: with its language-model head, or the body alone.

    Raises:
        OSError: the folder has no model in it.
    """
    # Here, not above: the controller imports the worker classes and never loads a model.
    from transformers import AutoModel, AutoModelForCausalLM

    factory = AutoModelForCausalLM if head else AutoModel
    model: nn.Module = factory.from_pretrained(
        options.path,
        local_files_only=True,
        dtype=parse_dtype(options.dtype),
        attn_implementation=options.attn_implementation,
        trust_remote_code=options.trust_remote_code,
    )
    model.to(ranks.device)
    remove_dropout(model)
    model.eval()
    if options.gradient_checkpointing:
        model.gradient_checkpointing_enable()  # type: ignore[operator]
        model.train()
    return model


def remove_dropout(model: nn.Module) -> None:
    """Set every dropout rate to 0: two passes over the same tokens must give the same log-probs."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name in ("attention_dropout", "dropout", "resid_dropout"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)


def shard(model: nn.Module, ranks: Ranks) -> None:
    """Spread the parameters over the ranks (FSDP2), each decoder layer a unit; alone, do nothing."""
    if ranks.world_size == 1:
        return
    # FSDP takes a second to import; a single rank does not need it.
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(ranks.device.type, (ranks.world_size,))
    names = {name for module in model.modules() for name in getattr(module, "_no_split_modules", None) or ()}
    for module in model.modules():
        if type(module).__name__ in names:
            fully_shard(module, mesh=mesh)
    fully_shard(model, mesh=mesh)


def named_weights(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and persistent buffers by name; tied ones are the same object under each of their names."""
    state: dict[str, Tensor] = model.state_dict(keep_vars=True)
    return state


@torch.no_grad()
def gathered_state(model: nn.Module, ranks: Ranks) -> dict[str, Tensor]:
    """All weights whole, on the CPU of rank 0; the other ranks take part and get an empty mapping."""
    state: dict[str, Tensor] = {}
    seen: dict[int, Tensor] = {}
    for name, tensor in named_weights(model).items():
        if id(tensor) not in seen:
            whole = whole_tensor(tensor).detach()
            seen[id(tensor)] = whole.cpu() if ranks.rank == 0 else whole.new_empty(0)
        state[name] = seen[id(tensor)]
    return state if ranks.rank == 0 else {}


def save_hf_folder(model: Any, source: str | Path, target: str | Path, ranks: Ranks) -> None:
    """Write weights (safetensors), config, and the source folder's tokenizer with its chat template.

    Everything is written beside `target` and moved there at the end; what was there before is replaced.
    Collective: all ranks return when the folder is complete.

    Raises:
        OSError: on rank 0, with the path: it could not be written, and what was is removed again.
    """
    state = gathered_state(model, ranks)
    if ranks.rank == 0:
        target = Path(target)
        target.parent.mkdir(parents=True, exist_ok=True)
        # Always the same name: what a killed writer left, gigabytes of it, is replaced by the next one.
        unfinished = target.with_name(target.name + ".unfinished")
        _remove(unfinished)
        try:
            with named_errors(unfinished):
                _write(model, Path(source), unfinished, state)
        except BaseException:
            shutil.rmtree(unfinished, ignore_errors=True)
            raise
        _remove(target)
        unfinished.rename(target)
    ranks.barrier()


def check_savable(source: Path, *, field: str) -> None:
    """Try what writing a model trained from this folder needs beside its weights: that it ends well is known
    before anything is started.

    Args:
        field: the configuration key that the folder comes from, for messages.

    Raises:
        ConfigError: transformers does not write its configuration, or a file of its tokenizer cannot be read.
    """
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(source, local_files_only=True, trust_remote_code=False)
        with TemporaryDirectory() as scratch:
            config.save_pretrained(scratch)
        for file in _tokenizer_files(source):
            for one in file.rglob("*") if file.is_dir() else (file,):
                if not one.is_dir():
                    one.open("rb").close()
    except Exception as error:  # the file is the user's, and each model's configuration has checks of its own
        raise ConfigError(
            f"{field}: a model trained from {source} could not be written: {one_line(error)}"
        ) from error


def _write(model: Any, source: Path, folder: Path, state: dict[str, Tensor]) -> None:
    generation = getattr(model, "generation_config", None)
    try:
        if generation is not None:
            # transformers loads and serves settings that it refuses to save, such as a temperature without
            # do_sample. They are the user's, and stay as they were; only what it can save is handed to it.
            model.generation_config = type(generation)()
        model.save_pretrained(folder, state_dict=state)
    except SafetensorError as error:  # its text is "No space left on device", without the path
        raise OSError(f"{folder}: {error}") from error
    finally:
        if generation is not None:
            model.generation_config = generation
    if generation is not None:
        _write_generation(copy.deepcopy(generation), source, folder)
    for file in _tokenizer_files(source):
        if file.is_dir():
            shutil.copytree(file, folder / file.name)
        else:
            shutil.copyfile(file, folder / file.name)


def _write_generation(generation: Any, source: Path, folder: Path) -> None:
    """The settings of generation, with the end tokens that answers were trained to end with.

    A file that names none leaves them to `config.json` here, not in every program that will read the folder.
    """
    if generation.eos_token_id is None and (ends := end_token_ids(source)):
        generation.eos_token_id = list(ends) if len(ends) > 1 else ends[0]
    generation.to_json_file(folder / "generation_config.json", use_diff=True, keys_to_pop=["compile_config"])


def _tokenizer_files(folder: Path) -> Iterable[Path]:
    return sorted({file for pattern in TOKENIZER_FILES for file in folder.glob(pattern)})


def _remove(folder: Path) -> None:
    if folder.exists():
        shutil.rmtree(folder)
