"""Built-in reward functions: pure, and chosen by name or by a row's `reward_model.style`."""

from __future__ import annotations

import numbers
import re
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from functools import cache
from typing import Any, Literal, get_args

from neoproto.data.rows import PromptRow
from neoproto.errors import ConfigError
from neoproto.text import Problems, shown

BuiltIn = Literal["exact_match", "last_number", "math_verify", "reasoning_gym"]
BUILT_INS: tuple[str, ...] = get_args(BuiltIn)
AUTO = "auto"
REASONING_GYM_PREFIX = "reasoning_gym/"
_BY_DATA_SOURCE: Mapping[str, str] = {
    "openai/gsm8k": "last_number",
    "lighteval/MATH": "math_verify",
    "DigitalLearningGmbH/MATH-lighteval": "math_verify",
}
_PARSING_LIMIT_S = 3
_NUMBER = re.compile(r"[-+]?(?:\d{1,3}(?:,\d{3})+|\d+)?(?:\.\d+)?(?<=\d)")


class RowError(ValueError):
    """A row that no answer could be judged by: the input is wrong, not the answer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Score:
    """A judged answer.

    Attributes:
        score: the reward.
        acc: whether the answer is right, in [0, 1]: what is reported as accuracy.
        vote: what was compared with the ground truth, as a text that equal answers share ("" where the
            answer has nothing to compare); None where a reward function does not tell.
        extra: whatever else a reward function returned.
    """

    score: float
    acc: float
    vote: str | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)


def exact_match(solution: str, ground_truth: Any) -> Score:
    """1 if the answer is the ground truth to the letter, white space around both aside; else 0."""
    answer = solution.strip()
    right = float(answer == str(ground_truth).strip())
    return Score(score=right, acc=right, vote=answer)


def last_number(solution: str, ground_truth: Any) -> Score:
    """1 if the last number in the answer equals the last one in the ground truth, by value; else 0.

    Thousands separators and a leading sign are understood: "…is 1,234.50" equals 1234.5.

    Raises:
        RowError: the ground truth has no number.
    """
    expected = find_last_number(str(ground_truth))
    if expected is None:
        raise RowError(f"the ground truth {shown(ground_truth)} has no number")
    found = find_last_number(solution)
    right = float(found == expected)
    return Score(score=right, acc=right, vote="" if found is None else number_text(found))


def find_last_number(text: str) -> Decimal | None:
    """The last number in a text, None if there is none."""
    found = [match for match in _NUMBER.findall(text) if match]
    return Decimal(found[-1].replace(",", "")) if found else None


def number_text(number: Decimal) -> str:
    """A text that equal numbers share, exact: "3" for 3, 3.0 and 3.00."""
    text = format(number, "f")  # not `normalize`, which rounds to 28 digits
    text = text.rstrip("0").rstrip(".") if "." in text else text
    return "0" if text in ("-0", "") else text


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
    verifier, entry = _verifier_and_entry(data_source, extra_info)
    answer = solution.strip()
    score = float(verifier(answer=answer, entry=entry))
    acc = exact_match(answer, ground_truth).acc if isinstance(ground_truth, str) else float(score >= 1)
    return Score(score=score, acc=acc, vote=answer)


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
    """Refuse rows that no built-in reward judges, or by which theirs could judge no answer.

    Args:
        name: `reward.name`.
        rows: training and validation rows; needless with a custom reward function.

    Raises:
        ConfigError: for each style and data source without a judge, naming the first such row; and for each
            row whose ground truth or `extra_info` its judge cannot use. The first ten problems are listed and
            the rest counted.
    """
    problems = Problems()
    without_judge = set()
    for row in rows:
        kind = (str(row.reward_model.get("style")), row.data_source)
        if kind in without_judge:
            continue
        try:
            chosen = choose_built_in(name, *kind)
        except ConfigError as error:
            without_judge.add(kind)
            problems.add(f"{row.origin}: {error}")
            continue
        try:
            check_row(chosen, row)
        except RowError as error:
            problems.add(f"{row.origin}: {error} (judged by {chosen})")
    problems.raise_any()


def check_row(chosen: str, row: PromptRow) -> None:
    """Whether this built-in can judge answers to the row.

    Raises:
        RowError: it cannot.
    """
    ground_truth = row.reward_model.get("ground_truth")
    if chosen == "reasoning_gym":
        _verifier_and_entry(row.data_source, row.extra_info)
        return
    if not isinstance(ground_truth, str | numbers.Number):
        raise RowError(f"reward_model.ground_truth: a text or a number is needed, got {shown(ground_truth)}")
    if chosen == "last_number":
        last_number("", ground_truth)
    elif chosen == "math_verify" and not _has_mathematics(str(ground_truth)):
        raise RowError(f"math-verify finds no expression in the ground truth {shown(ground_truth)}")


def _verifier_and_entry(data_source: str, extra_info: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """A task's verifier, and what it wants to know of the question."""
    keys = ("question", "answer", "metadata")
    if missing := [key for key in keys if key not in extra_info]:
        raise RowError(f"extra_info lacks {', '.join(missing)}, which the task's verifier needs")
    if not isinstance(extra_info["metadata"], Mapping):
        raise RowError(f"extra_info.metadata: an object is needed, got {shown(extra_info['metadata'])}")
    return _verifier(data_source.removeprefix(REASONING_GYM_PREFIX)), {key: extra_info[key] for key in keys}


@cache
def _has_mathematics(ground_truth: str) -> bool:
    """Whether math-verify finds an expression in it.

    LaTeX between its signs is taken for one: to parse that takes long, and no data set lacks it by mistake.
    """
    in_main = threading.current_thread() is threading.main_thread()  # its limit is a signal
    if not in_main or any(sign in ground_truth for sign in ("$", r"\(", r"\[", r"\boxed")):
        return True
    from math_verify import parse  # half a second, and only some runs need it

    return bool(parse(ground_truth, parsing_timeout=_PARSING_LIMIT_S))


@cache
def _verifier(task: str) -> Any:
    from reasoning_gym.factory import get_score_answer_fn  # takes seconds, and only some runs need it

    try:
        return get_score_answer_fn(task)
    except ValueError as error:
        raise RowError(f"data_source: reasoning-gym has no task {task!r}") from error
