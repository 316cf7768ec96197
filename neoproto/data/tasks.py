"""Procedural reasoning-gym tasks as prompt rows in verl's layout, split by question.

    generator ──draws──> distinct questions ──> the first `val_size` are held out
                                            └─> the rest, `size` of them, are for training

What is held out depends on the task, its options, the seed and `val_size`, not on how many questions are
drawn for training afterwards.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
from collections.abc import Iterator, Mapping
from fractions import Fraction
from typing import Any, Literal, get_args

from neoproto.errors import ConfigError
from neoproto.text import one_line

__all__ = ["DATA_SOURCE_PREFIX", "RewardStyle", "TaskRows", "load_task"]

RewardStyle = Literal["exact_match", "reasoning_gym"]
DATA_SOURCE_PREFIX = "reasoning_gym/"
_DRAWS_PER_QUESTION = 4
_LEAST_DRAWS_IN_VAIN = 10_000
"""So many draws in a row without a new question, or twice as many as the questions found if that is more, and
the task is taken to have no others."""
_SET_BY_US = ("seed", "size")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TaskRows:
    """A task's questions as rows, each question once.

    A row is a dictionary with `uid`, `prompt` (one user message), `data_source` ("reasoning_gym/<task>"),
    `reward_model` (`style`, `ground_truth`) and `extra_info`: `index` (in its split), `split` ("train" or
    "val"), and the task's own entry, which its scorer wants back: `question`, `answer`, `metadata`.

    Attributes:
        train: the rows to train on.
        val: the held-out rows; no question of theirs is in `train`, not even in other capitals.
        draws: how many questions the generator was asked for.
        duplicates: draws dropped because the question had been seen.
        held_out_variants: draws dropped because the question differs from a held-out one in capitals only.
    """

    train: tuple[dict[str, Any], ...]
    val: tuple[dict[str, Any], ...]
    draws: int
    duplicates: int
    held_out_variants: int


def load_task(
    name: str,
    size: int,
    seed: int,
    options: Mapping[str, Any] | None = None,
    val_size: int = 600,
    *,
    reward_style: RewardStyle = "exact_match",
    field: str = "data.task",
) -> TaskRows:
    """Draw a task's questions and split them. The same arguments give the same rows.

    Args:
        name: a reasoning-gym data set.
        size: distinct questions to train on; a task that has fewer gives what it has (`len(rows.train)`). It
            is not asked further when thousands of draws in a row have brought nothing new.
        seed: the generator's; question i is drawn with seed + i.
        options: keyword arguments of the task's own configuration.
        val_size: distinct questions held out.
        reward_style: how answers are judged: equal to the task's answer, or by the task's own scorer
            (which gives partial credit).
        field: the configuration key of all this, for messages.

    Raises:
        ConfigError: an unknown task or option, an option's value that the task refuses, counts below what is
            possible, fewer distinct questions than `val_size` plus one, a task without one right answer
            judged by `exact_match`.
    """
    problems = [
        f"{field}.{key}: at least {least}, got {value}"
        for key, value, least in (("size", size, 1), ("val_size", val_size, 0))
        if value < least
    ]
    if reward_style not in get_args(RewardStyle):
        problems.append(
            f"{field}: unknown reward style {reward_style!r}; known: {', '.join(get_args(RewardStyle))}"
        )
    if problems:
        raise ConfigError(*problems)
    draws = _DRAWS_PER_QUESTION * (size + val_size)
    dataset = _create(name, dict(options or {}), draws, seed, field)
    split = _split(_entries(dataset, name, field), size, val_size)
    if len(split.val) < val_size or not split.train:
        found = len(split.val) + len(split.train)
        raise ConfigError(
            f"{field}.val_size: {val_size} questions to hold out and some to train on are needed, but {name} "
            f"with these options gave only {found} distinct ones in {split.draws} draws"
        )
    rows = {
        part: tuple(
            _row(name, part, index, entry, reward_style, field) for index, entry in enumerate(entries)
        )
        for part, entries in (("train", split.train), ("val", split.val))
    }
    return TaskRows(
        train=rows["train"],
        val=rows["val"],
        draws=split.draws,
        duplicates=split.duplicates,
        held_out_variants=split.held_out_variants,
    )


@dataclasses.dataclass(slots=True)
class _Split:
    train: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    val: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    draws: int = 0
    duplicates: int = 0
    held_out_variants: int = 0


def _split(entries: Iterator[dict[str, Any]], size: int, val_size: int) -> _Split:
    """The first `val_size` distinct questions are held out, the next `size` are trained on."""
    split = _Split()
    seen: set[str] = set()
    held_out: set[str] = set()
    in_vain = 0
    for entry in entries:
        split.draws += 1
        question = entry["question"]
        in_vain = in_vain + 1 if question in seen else 0
        if in_vain:
            split.duplicates += 1
        elif len(split.val) < val_size:
            split.val.append(entry)
            held_out.add(question.casefold())
        elif question.casefold() in held_out:
            split.held_out_variants += 1
        else:
            split.train.append(entry)
        seen.add(question)
        if len(split.train) == size or in_vain == max(_LEAST_DRAWS_IN_VAIN, 2 * len(seen)):
            break
    return split


def _create(name: str, options: dict[str, Any], draws: int, seed: int, field: str) -> Any:
    """The data set; reasoning-gym is imported here since that takes seconds."""
    import reasoning_gym
    from reasoning_gym.factory import DATASETS

    if name not in DATASETS:
        near = difflib.get_close_matches(name, DATASETS, n=3, cutoff=0.5)
        hint = f"; did you mean {' or '.join(near)}?" if near else ""
        raise ConfigError(f"{field}.name: reasoning-gym has no task {name!r}{hint}")
    _, config_class = DATASETS[name]
    known = {option.name for option in dataclasses.fields(config_class)}
    problems = []
    for key in options:
        if key in _SET_BY_US:
            problems.append(f"{field}.options.{key}: set {field}.{key} instead")
        elif key not in known:
            allowed = ", ".join(sorted(known.difference(_SET_BY_US))) or "none"
            problems.append(f"{field}.options.{key}: {name} has no such option; it has {allowed}")
    if problems:
        raise ConfigError(*problems)
    try:
        return reasoning_gym.create_dataset(name, size=draws, seed=seed, **options)
    except (AssertionError, AttributeError, TypeError, ValueError, KeyError, OSError) as error:
        raise ConfigError(f"{field}.options: {name} refuses {options!r}: {one_line(error)}") from error


def _entries(dataset: Any, name: str, field: str) -> Iterator[dict[str, Any]]:
    for index in range(len(dataset)):
        try:
            yield dataset[index]
        except (
            ArithmeticError,
            AssertionError,
            AttributeError,
            LookupError,
            RuntimeError,
            TypeError,
            ValueError,
        ) as error:
            raise ConfigError(f"{field}: {name} cannot make question {index}: {one_line(error)}") from error


def _row(
    name: str, split: str, index: int, entry: dict[str, Any], style: RewardStyle, field: str
) -> dict[str, Any]:
    question, answer, metadata = entry["question"], entry["answer"], _without_fractions(entry["metadata"])
    if style == "exact_match" and not isinstance(answer, str):
        raise ConfigError(f"{field}.name: {name} has no single right answer; judge it by its own scorer")
    try:
        json.dumps(metadata)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{field}.name: {name}'s questions cannot be kept as rows: {error}") from error
    return {
        "uid": f"{name}:{split}:{index}",
        "prompt": [{"role": "user", "content": question}],
        "data_source": f"{DATA_SOURCE_PREFIX}{name}",
        "reward_model": {"style": style, "ground_truth": answer},
        "extra_info": {
            "index": index, "split": split, "question": question, "answer": answer, "metadata": metadata,
        },
    }  # fmt: skip


def _without_fractions(value: Any) -> Any:
    """Fractions as plain numbers, which rows can hold: a few word problems have some in their metadata."""
    if isinstance(value, Fraction):
        return value.numerator if value.denominator == 1 else float(value)
    if isinstance(value, Mapping):
        return {key: _without_fractions(item) for key, item in value.items()}
    return [_without_fractions(item) for item in value] if type(value) is list else value
