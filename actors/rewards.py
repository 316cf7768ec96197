"""Built-in reward functions: pure, and chosen by name or by a row's `reward_model.style`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from functools import cache
from typing import Any, Literal, get_args

from neoproto.data.rows import PromptRow
from neoproto.errors import ConfigError

BuiltIn = Literal["exact_match", "last_number", "math_verify", "reasoning_gym"]
BUILT_INS: tuple[str, ...] = get_args(BuiltIn)
AUTO = "auto"
REASONING_GYM_PREFIX = "reasoning_gym/"
_BY_DATA_SOURCE: Mapping[str, str] = {
    "openai/gsm8k": "last_number",
    "lighteval/MATH": "math_verify",
    "DigitalLearningGmbH/MATH-lighteval": "math_verify",
}
_NUMBER = re.compile(r"[-+]?(?:\d{1,3}(?:,\d{3})+|\d+)?(?:\.\d+)?(?<=\d)")


class RowError(ValueError):
    """A row that no answer could be judged by: the input is wrong, not the answer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Score:
    """A judged answer.

    Attributes:
        score: the reward.
        acc: whether the answer is right, in [0, 1]: what is reported as accuracy.
        extra: whatever else a reward function returned.
    """

    score: float
    acc: float
    extra: Mapping[str, Any] = field(default_factory=dict)


def exact_match(solution: str, ground_truth: Any) -> Score:
    """1 if the answer is the ground truth to the letter, white space around both aside; else 0."""
    right = float(solution.strip() == str(ground_truth).strip())
    return Score(score=right, acc=right)


def last_number(solution: str, ground_truth: Any) -> Score:
    """1 if the last number in the answer equals the last one in the ground truth, by value; else 0.

    Thousands separators and a leading sign are understood: "…is 1,234.50" equals 1234.5.

    Raises:
        RowError: the ground truth has no number.
    """
    expected = find_last_number(str(ground_truth))
    if expected is None:
        raise RowError(f"the ground truth {ground_truth!r} has no number")
    right = float(find_last_number(solution) == expected)
    return Score(score=right, acc=right)


def find_last_number(text: str) -> Decimal | None:
    """The last number in a text, None if there is none."""
    found = [match for match in _NUMBER.findall(text) if match]
    return Decimal(found[-1].replace(",", "")) if found else None


def reasoning_gym_score(
    solution: str, ground_truth: Any, data_source: str, extra_info: Mapping[str, Any]
) -> Score:
    """The task's own verifier, which may give partial credit; `acc` is the exact match.

    For a task without one right answer, `acc` says whether the verifier gives full marks.

    Args:
        data_source: "reasoning_gym/<task>".
        extra_info: the task's entry: `question`, `answer`, `metadata`.

    Raises:
        RowError: no such task, or extra_info lacks a part of the entry.
    """
    missing = [key for key in ("question", "answer", "metadata") if key not in extra_info]
    if missing:
        raise RowError(f"extra_info lacks {', '.join(missing)}, which the task's verifier needs")
    entry = {key: extra_info[key] for key in ("question", "answer", "metadata")}
    answer = solution.strip()
    score = float(_verifier(data_source.removeprefix(REASONING_GYM_PREFIX))(answer=answer, entry=entry))
    acc = exact_match(answer, ground_truth).acc if isinstance(ground_truth, str) else float(score >= 1)
    return Score(score=score, acc=acc)


def choose_built_in(name: str, style: str, data_source: str) -> str:
    """Which built-in judges a row.

    Args:
        name: `reward.name`: a built-in, or "auto": the row's style, if it is the name of one; style "rule",
            as verl's data sets have it, goes by the data source.
        style, data_source: the row's.

    Raises:
        ConfigError: no built-in fits.
    """
    if name in BUILT_INS:
        return name
    if name != AUTO:
        raise ConfigError(f"reward.name: {name!r} is not known; known: {', '.join((AUTO, *BUILT_INS))}")
    if style in BUILT_INS:
        return style
    if style == "rule" and data_source in _BY_DATA_SOURCE:
        return _BY_DATA_SOURCE[data_source]
    raise ConfigError(
        f"reward.name={AUTO}: no built-in reward for reward_model.style={style!r} of data source "
        f"{data_source!r}; set reward.name to one of {', '.join(BUILT_INS)}, or "
        "reward.custom_reward_function.path"
    )


def check_rows(name: str, rows: Iterable[PromptRow]) -> None:
    """Refuse rows that no built-in reward judges, before anything is started.

    Args:
        name: `reward.name`.
        rows: training and validation rows; needless with a custom reward function.

    Raises:
        ConfigError: for each style and data source without a judge, naming the first such row.
    """
    problems = {}
    for row in rows:
        kind = (str(row.reward_model.get("style")), row.data_source)
        if kind in problems:
            continue
        try:
            choose_built_in(name, *kind)
        except ConfigError as error:
            problems[kind] = f"{row.origin}: {error}"
    if problems:
        raise ConfigError(*problems.values())


@cache
def _verifier(task: str) -> Any:
    from reasoning_gym.factory import get_score_answer_fn  # takes seconds, and only some runs need it

    try:
        return get_score_answer_fn(task)
    except ValueError as error:
        raise RowError(str(error)) from error
