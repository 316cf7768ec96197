"""A user's reward function: loaded from a file, checked, and what it returns made into a `Score`."""

from __future__ import annotations

import inspect
import math
import numbers
from collections.abc import Callable, Mapping
from decimal import Decimal
from pathlib import Path
from typing import Any

from neoproto.packages import users_first
from neoproto.rewards.ground_truth import number_text
from neoproto.rewards.score import Score
from neoproto.text import shown
from neoproto.user_code import load_function

ARGUMENTS = ("data_source", "solution_str", "ground_truth", "extra_info")
_FIELD = "reward.custom_reward_function"
_LARGEST_SCORE = 3e38  # scores travel as float32


class NotAScore(ValueError):
    """A reward function returned something that is no score."""


def load_reward_function(path: str | Path, name: str = "compute_score") -> Callable[..., Any]:
    """Import `name` from the Python file `path`.

    The function takes the keyword arguments `data_source`, `solution_str`, `ground_truth` and `extra_info`,
    and returns a number, or a dictionary with at least `score`; it may be `async`. While
    the file is imported, packages of the user's win over ours of the same names.

    Raises:
        ConfigError: the file is missing or cannot be imported (with the line and the original error), has no
            such name, or that is not callable with these arguments.
    """
    with users_first():
        return load_function(path, name, field=_FIELD, keywords=ARGUMENTS)


def is_async(function: Callable[..., Any]) -> bool:
    """Whether calling it gives a coroutine."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
        getattr(function, "__call__", None)  # noqa: B004 — the method itself is looked at
    )


def to_score(returned: Any) -> Score:
    """The score that a reward function's return value means.

    A number (a truth value counts 0 or 1), or a dictionary with `score`, and `acc` if accuracy is something
    else than the score; its other entries are kept in `extra`. `pred`, if it is there, is what the answer
    counts as in a vote (verl's name).

    Raises:
        NotAScore: anything else, or a number that is not finite.
    """
    if not isinstance(returned, Mapping):
        value = _number(returned, "it returned")
        return Score(score=value, acc=value)
    if "score" not in returned:
        raise NotAScore(f"it returned a dictionary without 'score': {shown(returned, 80)}")
    score = _number(returned["score"], "it returned score =")
    acc = _number(returned["acc"], "it returned acc =") if "acc" in returned else score
    extra = {str(key): value for key, value in returned.items() if key not in ("score", "acc")}
    return Score(score=score, acc=acc, vote=_vote(extra.get("pred")), extra=extra)


def _vote(pred: Any) -> str | None:
    """`pred` as a text that equal values share: 3 and 3.0 are one number. None if it has none."""
    if pred is None:
        return None
    try:
        if getattr(pred, "ndim", None) == 0:  # a scalar of numpy or torch
            pred = pred.item()
        if isinstance(pred, int | float | Decimal):
            number = Decimal(str(pred)) if isinstance(pred, float) else Decimal(pred)
            if number.is_finite():
                return number_text(number)
        return str(pred).strip()
    except Exception:  # noqa: BLE001 — the object's own code; its score counts all the same
        return None


def _number(value: Any, what: str) -> float:
    if getattr(value, "ndim", None) == 0:  # a scalar of numpy or torch
        value = value.item()
    if not isinstance(value, numbers.Real):
        raise NotAScore(f"{what} {shown(value, 80)} ({type(value).__name__}), not a number")
    try:
        number = float(value)
    except OverflowError:
        raise NotAScore(f"{what} {shown(value, 80)}, which is too large") from None
    if not math.isfinite(number):
        raise NotAScore(f"{what} {number}, which is not finite")
    if abs(number) > _LARGEST_SCORE:
        raise NotAScore(f"{what} {number}, which is too large")
    return number
