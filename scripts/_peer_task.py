"""What both sides of `bench_peer.py` train on: a counting task, its two workloads, and one model for each.

    "count from 37 to 41"  ->  "37 38 39 40 41"

The answer's length is the question's to set, so a distribution of lengths can be asked for; numbers have two
digits and every byte is a token, hence an answer of n numbers takes 3 n tokens, with the one that ends it.
"""

from __future__ import annotations

import hashlib
import json
import math
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FIRST, LAST = 10, 99
TOKENS_A_NUMBER = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """Questions of one distribution of lengths.

    Attributes:
        max_tokens: limit of an answer; the task's own answers fit.
        goal: of our seconds a step over the peer's.
        numbers: draws how many numbers an answer has.
        warm_start_score: where the supervised start ends, see `TinyModelOptions.stop_score`.
        lr: learning rate of both sides.
    """

    name: str
    max_tokens: int
    goal: str
    numbers: Callable[[random.Random], int]
    warm_start_score: float
    lr: float

    @property
    def most_numbers(self) -> int:
        return self.max_tokens // TOKENS_A_NUMBER


def uniform(rng: random.Random) -> int:
    """1 to 10 numbers: answers of 3 to 30 tokens."""
    return rng.randint(1, 10)


def log_normal(rng: random.Random) -> int:
    """Median 8 numbers, mean near 13: 24 and near 40 tokens; one answer in a hundred has more than 230."""
    return max(1, round(rng.lognormvariate(math.log(8.0), 1.0)))


WORKLOADS: Mapping[str, Workload] = {
    one.name: one
    for one in (
        Workload(name="short", max_tokens=32, goal="<= 1.0", numbers=uniform, warm_start_score=0.4, lr=1e-3),
        Workload(
            name="long_tailed",
            max_tokens=256,
            goal="<= 0.6",
            numbers=log_normal,
            warm_start_score=0.4,
            lr=1e-3,
        ),
    )
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Questions:
    """Rows in verl's layout; no held-out question is in `train`."""

    train: tuple[dict[str, Any], ...]
    held_out: tuple[dict[str, Any], ...]


def draw_questions(workload: Workload, *, train: int, held_out: int, seed: int = 0) -> Questions:
    """Draw by the workload's distribution, a question as often as it comes; the first draws are held out."""
    drawn = _draws(workload, random.Random(seed))
    tests = [next(drawn) for _ in range(held_out)]
    kept = set(tests)
    rows: list[tuple[int, int]] = []
    while len(rows) < train:
        question = next(drawn)
        if question not in kept:
            rows.append(question)
    return Questions(
        train=tuple(_row(*question) for question in rows),
        held_out=tuple(_row(*question) for question in tests),
    )


def _draws(workload: Workload, rng: random.Random) -> Iterator[tuple[int, int]]:
    """(first number, how many)."""
    most = min(workload.most_numbers, LAST - FIRST + 1)
    while True:
        count = workload.numbers(rng)
        if count <= most:
            yield rng.randint(FIRST, LAST - count + 1), count


def _row(first: int, count: int) -> dict[str, Any]:
    answer = " ".join(str(number) for number in range(first, first + count))
    return {
        "prompt": [{"role": "user", "content": f"count from {first} to {first + count - 1}"}],
        "data_source": "count",
        "reward_model": {"style": "exact_match", "ground_truth": answer},
        "extra_info": {},
    }


def write_rows(path: Path, rows: tuple[dict[str, Any], ...]) -> None:
    """One JSON object a line: what both sides read."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def make_model(workload: Workload, questions: Questions, cache: Path) -> Path:
    """The model both sides start from: the built-in one's shape, taught on the training questions; cached."""
    from actors.tiny_model import TinyModelOptions, ensure_tiny_model

    options = TinyModelOptions(
        label_smoothing=0.02, stop_score=workload.warm_start_score, max_steps=1500, batch_size=64
    )
    return ensure_tiny_model(options, questions.train, cache)


def score(folder: Path, rows: tuple[dict[str, Any], ...], *, longest: int = 512) -> tuple[float, float]:
    """Exact match of a model on these questions: what sampling at temperature 1 gets on average, and greedy.

    Both are computed from the probabilities of the right answers: nothing is drawn, a model has one score.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from actors.warm_start import encode, exact_match, examples_of

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


def fingerprint(folder: Path) -> str:
    """Of a model's weights, to say that two runs started from the same ones."""
    return hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()[:16]
