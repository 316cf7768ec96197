"""Supervised warm start of a small causal language model on a task's training rows.

    rows ──examples──> messages, answers ──encode──> token ids ──warm_start──> a policy that is often right

Shape suffixes: b rows, t tokens, v vocabulary.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from neoproto.data.prompts import ending
from neoproto.errors import ConfigError
from neoproto.text import one_line

__all__ = [
    "Encoded",
    "Example",
    "Progress",
    "WarmStart",
    "WarmStartOptions",
    "encode",
    "exact_match",
    "examples_of",
    "warm_start",
]

_IGNORE = -100
_KEPT_OUT = 400
_MOST_TOKENS_A_STEP = 4096
_MOST_TOKENS_JUDGED = 65536


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class WarmStartOptions:
    """How the warm start goes.

    Attributes:
        learning_rate, weight_decay: AdamW's.
        learning_rate_warmup: steps over which the learning rate rises from nothing.
        batch_size: rows a step; fewer where rows are long (4096 tokens at most).
        label_smoothing: share of the target's probability given to all other tokens. It keeps the policy from
            being sure of itself, so that there is something left to explore.
        stop_score: end once sampling at temperature 1 would answer this share of questions exactly; judged on
            training rows that are kept out of the warm start.
        check_every: steps between two looks at the score.
        max_steps: the most steps; 0 leaves the first weights as they are.
    """

    learning_rate: float = 4e-3
    weight_decay: float = 0.01
    learning_rate_warmup: int = 20
    batch_size: int = 64
    label_smoothing: float = 0.1
    stop_score: float = 0.45
    check_every: int = 10
    max_steps: int = 400

    def problems(self) -> list[str]:
        """What is wrong with these values, one sentence each."""
        found = [
            f"{name}: at least {least}, got {getattr(self, name)}"
            for name, least in (
                ("batch_size", 1),
                ("check_every", 1),
                ("max_steps", 0),
                ("learning_rate_warmup", 0),
            )
            if getattr(self, name) < least
        ]
        if not self.learning_rate > 0:
            found.append(f"learning_rate: above 0, got {self.learning_rate}")
        for name in ("label_smoothing", "stop_score"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                found.append(f"{name}: from 0 to 1, got {getattr(self, name)}")
        return found


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class WarmStart:
    """Where a warm start is, or how it ended.

    Attributes:
        step, max_steps: supervised steps done, and the most there may be.
        loss: cross-entropy of the last batch, in nats a token; None before the first step.
        sampled: expected exact match of sampling at temperature 1, on the rows kept out of the warm start.
        greedy: exact match of the most probable answer there.
        seconds: since the warm start began.
    """

    step: int
    max_steps: int
    loss: float | None
    sampled: float
    greedy: float
    seconds: float


class Progress(Protocol):
    """Gets the progress of the warm start, each `check_every` steps."""

    def __call__(self, progress: WarmStart, /) -> None: ...


@dataclasses.dataclass(frozen=True, slots=True)
class Example:
    """One row's chat messages and its right answer; what the row is called, for messages to people."""

    messages: list[dict[str, Any]]
    answer: str
    row: str = "?"


@dataclasses.dataclass(frozen=True, slots=True)
class Encoded:
    """Examples as token ids, padded on the right: causal attention never looks there.

    Attributes:
        input_ids_bt: int64; prompt, answer, end-of-sequence token.
        labels_bt: int64, one shorter; the token that follows, -100 where it is the prompt's or padding.
    """

    input_ids_bt: Tensor
    labels_bt: Tensor

    def rows(self, chosen: Tensor | slice) -> Encoded:
        return Encoded(self.input_ids_bt[chosen], self.labels_bt[chosen])


def examples_of(rows: Sequence[Mapping[str, Any]]) -> list[Example]:
    """Messages and answers of rows in verl's layout.

    Raises:
        ConfigError: no rows, or a row without a text as its ground truth.
    """
    if not rows:
        raise ConfigError("warm start: there are no training rows")
    examples = []
    for index, row in enumerate(rows):
        answer, name = row["reward_model"].get("ground_truth"), row.get("uid", index)
        if not isinstance(answer, str) or not answer:
            raise ConfigError(f"warm start: row {name} needs a text as its ground truth, got {answer!r}")
        examples.append(Example([dict(message) for message in row["prompt"]], answer, str(name)))
    return examples


def encode(examples: Sequence[Example], tokenizer: Any, *, longest: int) -> Encoded:
    """Token ids of prompts (through the chat template) and answers, but for pairs longer than `longest`.

    Raises:
        ConfigError: nothing is short enough, or the chat template does not take a row's messages.
    """
    pairs = []
    shortest: float = float("inf")
    for example in examples:
        try:
            prompt = tokenizer.apply_chat_template(
                example.messages, return_dict=False, **ending(example.messages)
            )
        except Exception as error:  # a template may raise anything over messages that it does not accept
            raise ConfigError(
                f"warm start: row {example.row}: the tiny model's chat template refuses it: {one_line(error)}"
            ) from error
        answer = [*tokenizer.encode(example.answer, add_special_tokens=False), tokenizer.eos_token_id]
        shortest = min(shortest, len(prompt) + len(answer))
        if len(prompt) + len(answer) <= longest:
            pairs.append((prompt, answer))
    if not pairs:
        raise ConfigError(
            f"warm start: a question with its answer takes {shortest} tokens or more, the model has {longest}"
        )
    width = max(len(prompt) + len(answer) for prompt, answer in pairs)
    input_ids_bt = torch.full((len(pairs), width), tokenizer.pad_token_id)
    labels_bt = torch.full((len(pairs), width), _IGNORE)
    for row, (prompt, answer) in enumerate(pairs):
        end = len(prompt) + len(answer)
        input_ids_bt[row, :end] = torch.tensor([*prompt, *answer])
        labels_bt[row, len(prompt) : end] = torch.tensor(answer)
    return Encoded(input_ids_bt, labels_bt[:, 1:].contiguous())


def warm_start(
    model: Any, encoded: Encoded, options: WarmStartOptions, *, seed: int, progress: Progress | None = None
) -> WarmStart:
    """Supervised steps on the answers, in place, until `stop_score` or `max_steps`.

    The first rows (400, or a quarter of few, or 65,536 tokens of long ones) judge the score and are not
    trained on. `seed` fixes the order of the rest; nothing else is drawn.
    """
    started = time.monotonic()
    total, width = encoded.input_ids_bt.shape
    kept_out = min(_KEPT_OUT, total // 4, max(_MOST_TOKENS_JUDGED // width, 1))
    batch_size = min(options.batch_size, max(_MOST_TOKENS_A_STEP // width, 1))
    judged = encoded.rows(slice(0, kept_out or total))
    batches = _row_numbers(kept_out, total, batch_size, torch.Generator().manual_seed(seed))
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=options.learning_rate, weight_decay=options.weight_decay, betas=(0.9, 0.98)
    )
    loss: float | None = None
    step = 0
    while True:
        sampled, greedy = exact_match(model, judged)
        state = WarmStart(
            step=step, max_steps=options.max_steps, loss=loss,
            sampled=sampled, greedy=greedy, seconds=time.monotonic() - started,
        )  # fmt: skip
        if progress is not None:
            progress(state)
        if step >= options.max_steps or sampled >= options.stop_score:
            return state
        for _ in range(min(options.check_every, options.max_steps - step)):
            step += 1
            for group in optimizer.param_groups:
                group["lr"] = options.learning_rate * min(1.0, step / max(options.learning_rate_warmup, 1))
            loss = _supervised_step(model, optimizer, encoded.rows(next(batches)), options.label_smoothing)


@torch.no_grad()
def exact_match(model: Any, encoded: Encoded) -> tuple[float, float]:
    """Expected exact match of sampling at temperature 1, and of greedy decoding; nothing is drawn.

    The probability of the whole answer, end-of-sequence token included, is what sampling gets on average;
    greedy decoding is right where each of the answer's tokens is the most probable one.
    """
    log_probs_btv = torch.log_softmax(model(encoded.input_ids_bt[:, :-1], use_cache=False).logits, dim=-1)
    answered_bt = encoded.labels_bt != _IGNORE
    targets_bt = encoded.labels_bt.clamp(min=0)
    chosen_bt = log_probs_btv.gather(2, targets_bt[..., None]).squeeze(2)
    right_bt = (log_probs_btv.argmax(dim=-1) == targets_bt) | ~answered_bt
    sampled = (chosen_bt * answered_bt).sum(dim=1).exp().mean()
    return float(sampled), float(right_bt.all(dim=1).float().mean())


def _row_numbers(first: int, end: int, batch_size: int, generator: torch.Generator) -> Iterator[Tensor]:
    """Endless batches of row numbers in [first, end), in a new order each time; an incomplete one is left."""
    while True:
        numbers = first + torch.randperm(end - first, generator=generator)
        for start in range(0, max(len(numbers) - batch_size, 0) + 1, batch_size):
            yield numbers[start : start + batch_size]


def _supervised_step(model: Any, optimizer: torch.optim.Optimizer, batch: Encoded, smoothing: float) -> float:
    logits_btv = model(batch.input_ids_bt[:, :-1], use_cache=False).logits
    loss = torch.nn.functional.cross_entropy(
        logits_btv.flatten(0, 1), batch.labels_bt.flatten(), ignore_index=_IGNORE, label_smoothing=smoothing
    )
    optimizer.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return float(loss.detach())
