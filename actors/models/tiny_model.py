"""The default model: a tiny Llama with its tokenizer, warm-started on a task's training questions and cached.

    rows ──> phrases ──> tokenizer ──> token ids ──> warm start (supervised) ──> Hugging Face folder ──> cache

    python -m neoproto actors.tiny_model --help

The same options, rows and library versions give the same bytes on one machine: the number of threads is fixed
here and nothing is sampled.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import hashlib
import importlib.metadata
import json
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from actors.models.cache import cache_folder, ensure_folder, no_progress_bar
from actors.models.tiny_tokenizer import build_tokenizer, shared_phrases
from actors.models.warm_start import Progress, WarmStart, WarmStartOptions, encode, examples_of, warm_start
from neoproto.data.persist import json_text
from neoproto.data.tasks import load_task
from neoproto.errors import ConfigError
from neoproto.files import unwritable, user_path
from neoproto.text import one_line, shown

__all__ = [
    "RECIPE",
    "TinyModelOptions",
    "cache_folder",
    "ensure_tiny_model",
    "make_tiny_model",
    "model_key",
]

RECIPE = 1
"""Counted up when the code makes another model from the same options and rows."""

HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256)
"""Head sizes that vLLM's CPU attention has kernels for."""

_MOST_THREADS = 1024
_MOST_PARAMETERS = 1_000_000_000
RECORD_FILE = "tiny_model.json"
_FILES = ("config.json", "model.safetensors", "tokenizer.json", RECORD_FILE)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TinyModelOptions(WarmStartOptions):
    """The model's shape, and its warm start's options; docs/task-and-recipe.md explains the values.

    Attributes:
        hidden_size, intermediate_size, num_layers, num_heads: the Llama's shape. hidden_size / num_heads must
            be a head size that vLLM has a CPU kernel for (32, 64, 80, 96, …).
        max_positions: longest prompt and response together, in tokens.
        seed: of the first weights and of the order of rows.
        num_threads: torch threads while it is made; part of what makes the result reproducible.
    """

    hidden_size: int = 128
    intermediate_size: int = 384
    num_layers: int = 2
    num_heads: int = 4
    max_positions: int = 2048
    seed: int = 0
    num_threads: int = 1

    def __post_init__(self) -> None:
        sizes = (
            "hidden_size",
            "intermediate_size",
            "num_layers",
            "num_heads",
            "max_positions",
            "num_threads",
        )
        problems = [
            f"{name}: at least 1, got {getattr(self, name)}" for name in sizes if getattr(self, name) < 1
        ]
        if not problems and self.hidden_size % self.num_heads:
            problems.append(f"hidden_size: {self.hidden_size} does not divide by num_heads {self.num_heads}")
        elif not problems and self.hidden_size // self.num_heads not in HEAD_SIZES:
            problems.append(
                f"num_heads: vLLM has no CPU kernel for heads of {self.hidden_size // self.num_heads}; "
                f"known sizes: {', '.join(map(str, HEAD_SIZES))}"
            )
        if self.num_threads > _MOST_THREADS:
            problems.append(f"num_threads: at most {_MOST_THREADS}, got {self.num_threads}")
        layer = self.hidden_size * (4 * self.hidden_size + 3 * self.intermediate_size)
        if (parameters := self.num_layers * layer) > _MOST_PARAMETERS:
            problems.append(
                f"hidden_size, intermediate_size, num_layers: {_MOST_PARAMETERS:,} parameters at most, these "
                f"have {parameters:,}"
            )
        problems += self.problems()
        if problems:
            raise ConfigError(*(f"tiny model: {problem}" for problem in problems))


def ensure_tiny_model(
    options: TinyModelOptions,
    train_rows: Sequence[Mapping[str, Any]],
    cache_dir: Path | None = None,
    progress: Progress | None = None,
) -> Path:
    """The folder of the model for these options and rows, made if the cache does not have it.

    Of two makers at once the first wins, and both get the same folder, see `ensure_folder`.

    Args:
        options: shape and warm start.
        train_rows: rows in verl's layout; never give held-out ones.
        cache_dir: instead of `cache_folder()`.
        progress: called as the warm start goes; not at all when the model is there already.

    Raises:
        ConfigError: rows that cannot be used (see `make_tiny_model`), or a cache that cannot be written.
    """
    name = f"tiny-{model_key(options, train_rows)[:16]}"
    return ensure_folder(
        name, _FILES, lambda made: make_tiny_model(made, options, train_rows, progress), cache_dir
    )


def model_key(options: TinyModelOptions, train_rows: Sequence[Mapping[str, Any]]) -> str:
    """A hash (64 hex digits) of all that the model depends on: options, rows, library versions, `RECIPE`."""
    versions = {name: importlib.metadata.version(name) for name in ("torch", "transformers", "tokenizers")}
    header = {"recipe": RECIPE, "options": dataclasses.asdict(options), "versions": versions}
    digest = hashlib.sha256(json.dumps(header, sort_keys=True).encode())
    for example in examples_of(train_rows):
        digest.update(b"\n" + json_text([example.messages, example.answer]).encode())
    return digest.hexdigest()


def make_tiny_model(
    folder: Path,
    options: TinyModelOptions,
    train_rows: Sequence[Mapping[str, Any]],
    progress: Progress | None = None,
) -> WarmStart:
    """Make the model and write it to `folder`: weights in float32, tokenizer with chat template, a record.

    Args:
        folder: created; files of an earlier model in it are overwritten.
        options, train_rows, progress: as in `ensure_tiny_model`.

    Returns:
        How the warm start ended. `max_steps` reached below `stop_score` is no error: a hard task
        starts lower.

    Raises:
        ConfigError: no rows, a row without a text answer, no question that fits `max_positions`.
    """
    examples = examples_of(train_rows)
    phrases = shared_phrases([example.messages[-1]["content"] for example in examples])
    tokenizer = build_tokenizer(phrases, max_length=options.max_positions)
    encoded = encode(examples, tokenizer, longest=options.max_positions)
    with _reproducible(options):
        model = new_model(options, tokenizer)
        end = warm_start(model, encoded, options, seed=options.seed, progress=progress)
    with no_progress_bar():
        model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    record = {
        "recipe": RECIPE,
        "options": dataclasses.asdict(options),
        "phrases": list(phrases),
        "rows": len(encoded.input_ids_bt),
        "rows_too_long": len(examples) - len(encoded.input_ids_bt),
        "parameters": model.num_parameters(),
        "warm_start": {"steps": end.step, "sampled": end.sampled, "greedy": end.greedy},
    }
    Path(folder, RECORD_FILE).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    return end


def new_model(options: TinyModelOptions, tokenizer: Any) -> Any:
    """A Llama of this shape with torch's random weights, for this tokenizer."""
    from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

    tokens = {name: getattr(tokenizer, name) for name in ("pad_token_id", "bos_token_id", "eos_token_id")}
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=options.hidden_size,
        intermediate_size=options.intermediate_size,
        num_hidden_layers=options.num_layers,
        num_attention_heads=options.num_heads,
        num_key_value_heads=options.num_heads,
        head_dim=options.hidden_size // options.num_heads,
        max_position_embeddings=options.max_positions,
        tie_word_embeddings=True,
        dtype="float32",
        **tokens,
    )
    model = LlamaForCausalLM(config).float()
    model.generation_config = GenerationConfig(**tokens)
    return model


@contextlib.contextmanager
def _reproducible(options: TinyModelOptions) -> Iterator[None]:
    """Threads and the global generator are set, and afterwards are as they were."""
    threads = torch.get_num_threads()
    torch.set_num_threads(options.num_threads)
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(options.seed)
            yield
    finally:
        torch.set_num_threads(threads)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m neoproto actors.tiny_model",
        description="Make the tiny default model, or find it in the cache, and print its folder.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--out", type=Path, help="write it here instead of the cache")
    task = parser.add_argument_group("the task it is warm-started on (its held-out questions are not used)")
    task.add_argument("--task", default="spell_backward", help="a reasoning-gym data set")
    task.add_argument("--size", type=int, default=5600, help="distinct training questions")
    task.add_argument("--val-size", type=int, default=600, help="questions held out")
    task.add_argument("--task-seed", type=int, default=0, help="seed of the questions and their split")
    task.add_argument(
        "--options", type=_json_object, metavar="JSON", default='{"min_word_len": 3, "max_word_len": 4}',
        help="the task's own options",
    )  # fmt: skip
    model = parser.add_argument_group("the model and its warm start")
    for option in dataclasses.fields(TinyModelOptions):
        kind = type(option.default)
        model.add_argument(
            f"--{option.name.replace('_', '-')}", type=kind, default=option.default, help=kind.__name__
        )
    return parser


def _json_object(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise argparse.ArgumentTypeError(f"not JSON: {one_line(error)}") from error
    if not isinstance(found, dict):
        raise argparse.ArgumentTypeError(f"a JSON object is needed, got {shown(found)}")
    return found


def _writable_folder(path: Path) -> Path:
    """The folder, made here: not to find out that it cannot be after minutes of warm start."""
    folder = user_path(path, field="--out")
    with unwritable(f"--out: {folder}"):
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    return folder


def _print_progress(state: WarmStart) -> None:
    loss = "" if state.loss is None else f", loss {state.loss:.3f}"
    print(
        f"step {state.step}/{state.max_steps}{loss}: exact match sampled {state.sampled:.3f}, "
        f"greedy {state.greedy:.3f} ({state.seconds:.1f} s)",
        file=sys.stderr,
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns its exit code (2 for bad input)."""
    given = vars(_parser().parse_args(arguments))
    names = [option.name for option in dataclasses.fields(TinyModelOptions)]
    try:
        options = TinyModelOptions(**{name: given[name] for name in names})
        rows = load_task(
            given["task"], given["size"], given["task_seed"], given["options"], given["val_size"]
        ).train  # fmt: skip
        if given["out"] is None:
            folder = ensure_tiny_model(options, rows, progress=_print_progress)
        else:
            folder = _writable_folder(given["out"])
            make_tiny_model(folder, options, rows, _print_progress)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    print(folder)
    return 0
