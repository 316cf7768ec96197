"""What both sides of `bench_peer.py` train on: counting down, in two workloads, and one model for each.

    "count down from [3]"  ->  "[3][2][1][0]"        (each number in brackets is one token)

The answer's length is the question's to set, so a distribution of lengths can be asked for: an answer that
starts at n takes n + 2 tokens, with the one that ends it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import math
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from neoproto.files import new_folder

HIGHEST = 254
QUESTION = "count down from "
_RECIPE = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """Questions of one distribution of lengths.

    Attributes:
        max_tokens: limit of an answer; the task's own answers fit.
        goal: of our seconds a step over the peer's.
        first: draws the number that is counted down from.
        warm_start_score: where the supervised start ends, see `TinyModelOptions.stop_score`.
        check_every: supervised steps between two looks at that score.
        lr: learning rate of both sides.
        micro: rows of one forward and backward pass on our side, which sorts them by length.
    """

    name: str
    max_tokens: int
    goal: str
    first: Callable[[random.Random], int]
    warm_start_score: float
    check_every: int
    lr: float
    micro: int

    @property
    def highest(self) -> int:
        return min(self.max_tokens - 2, HIGHEST)


def uniform(rng: random.Random) -> int:
    """0 to 30: answers of 2 to 32 tokens."""
    return rng.randint(0, 30)


def log_normal(rng: random.Random) -> int:
    """Answers of 25 tokens in the median and 40 in the mean; one in a hundred has over 200."""
    return max(0, round(rng.lognormvariate(math.log(25.0), 1.0)) - 2)


WORKLOADS: Mapping[str, Workload] = {
    one.name: one
    for one in (
        Workload(
            name="short",
            max_tokens=32,
            goal="<= 1.0",
            first=uniform,
            warm_start_score=0.4,
            check_every=2,
            lr=2e-4,
            micro=64,
        ),
        Workload(
            name="long_tailed",
            max_tokens=256,
            goal="<= 0.6",
            first=log_normal,
            warm_start_score=0.4,
            check_every=10,
            lr=2e-4,
            micro=16,
        ),
    )
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Questions:
    """Rows in verl's layout; no held-out question is in `train`."""

    train: tuple[dict[str, Any], ...]
    held_out: tuple[dict[str, Any], ...]


def draw_questions(workload: Workload, *, train: int, held_out: int, seed: int = 0) -> Questions:
    """Draw by the workload's distribution, a question as often as it comes.

    There are only as many questions as numbers, so held-out ones are other draws of questions that are
    trained on: scores say how well the task was learnt, not how it generalises.
    """
    rng = random.Random(seed)
    drawn = (workload.first(rng) for _ in itertools.count())
    rows = [
        _row(first)
        for first in itertools.islice((n for n in drawn if n <= workload.highest), train + held_out)
    ]
    return Questions(train=tuple(rows[held_out:]), held_out=tuple(rows[:held_out]))


def _row(first: int) -> dict[str, Any]:
    return {
        "prompt": [{"role": "user", "content": f"{QUESTION}[{first}]"}],
        "data_source": "count_down",
        "reward_model": {
            "style": "exact_match",
            "ground_truth": "".join(f"[{number}]" for number in range(first, -1, -1)),
        },
        "extra_info": {},
    }


def write_rows(path: Path, rows: tuple[dict[str, Any], ...]) -> None:
    """One JSON object a line: what both sides read."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def make_model(workload: Workload, questions: Questions, cache: Path) -> Path:
    """The model both sides start from: the built-in one's shape, taught on the training questions; cached."""
    from actors.models.tiny_model import TinyModelOptions
    from actors.models.tiny_tokenizer import build_tokenizer

    options = TinyModelOptions(
        label_smoothing=0.0,
        stop_score=workload.warm_start_score,
        check_every=workload.check_every,
        max_steps=800,
    )
    told = json.dumps([_RECIPE, dataclasses.asdict(options), questions.train], sort_keys=True)
    folder = cache / "models" / f"peer-{workload.name}-{hashlib.sha256(told.encode()).hexdigest()[:12]}"
    if not folder.exists():
        phrases = [QUESTION, *(f"[{number}]" for number in range(HIGHEST + 1))]
        tokenizer = build_tokenizer(phrases, max_length=options.max_positions)
        with new_folder(folder) as made:
            _teach(made, options, tokenizer, questions)
    return folder


def _teach(folder: Path, options: Any, tokenizer: Any, questions: Questions) -> None:
    import torch

    from actors.models.tiny_model import new_model
    from actors.models.warm_start import WarmStart, encode, examples_of, warm_start

    def show(state: WarmStart) -> None:
        print(
            f"warm start, step {state.step}: sampled {state.sampled:.3f}, greedy {state.greedy:.3f}",
            flush=True,
        )

    torch.set_num_threads(options.num_threads)
    torch.manual_seed(options.seed)
    encoded = encode(examples_of(questions.train), tokenizer, longest=options.max_positions)
    model = new_model(options, tokenizer)
    warm_start(model, encoded, options, seed=options.seed, progress=show)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def score(folder: Path, rows: tuple[dict[str, Any], ...], *, longest: int = 512) -> tuple[float, float]:
    """Exact match of a model on these questions: what sampling at temperature 1 gets on average, and greedy.

    Both are computed from the probabilities of the right answers: nothing is drawn, a model has one score.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from actors.models.warm_start import encode, exact_match, examples_of

    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    model = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True, dtype=torch.float32).eval()
    encoded = encode(examples_of(rows), tokenizer, longest=longest)
    pieces = [encoded.rows(slice(start, start + 100)) for start in range(0, len(rows), 100)]
    found = [exact_match(model, piece) for piece in pieces]
    sizes = [len(piece.input_ids_bt) for piece in pieces]
    sampled, greedy = (
        sum(value * size for value, size in zip(values, sizes, strict=True)) / sum(sizes)
        for values in zip(*found, strict=True)
    )
    return sampled, greedy
