"""A user's reward function: loaded from a file, checked, and what it returns made into a `Score`."""

from __future__ import annotations

import importlib.util
import inspect
import math
import numbers
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from actors.rewards import Score
from neoproto.data.paths import user_path
from neoproto.errors import ConfigError

ARGUMENTS = ("data_source", "solution_str", "ground_truth", "extra_info")
_FIELD = "reward.custom_reward_function"
_LARGEST_SCORE = 3e38  # scores travel as float32


class NotAScore(ValueError):
    """A reward function returned something that is no score."""


def load_reward_function(path: str | Path, name: str = "compute_score") -> Callable[..., Any]:
    """Import `name` from the Python file `path`.

    The function takes the keyword arguments `data_source`, `solution_str`, `ground_truth` and `extra_info`,
    and returns a number, or a dictionary with at least `score`; it may be `async`.

    Raises:
        ConfigError: the file is missing or cannot be imported (with the line and the original error), has no
            such name, or that is not callable with these arguments.
    """
    file = user_path(path, field=f"{_FIELD}.path").resolve()
    if not file.is_file():
        raise ConfigError(f"{_FIELD}.path: no such file: {file}")
    module = _imported(file)
    if not hasattr(module, name):
        there = [
            key
            for key, value in vars(module).items()
            if inspect.isfunction(value) and not key.startswith("_")
        ]
        raise ConfigError(
            f"{_FIELD}.name: {file} has no {name!r}; its functions: {', '.join(there) or 'none'}"
        )
    function = getattr(module, name)
    if not callable(function):
        raise ConfigError(f"{_FIELD}.name: {name!r} in {file} is not callable, it is {function!r}")
    signature = inspect.signature(function)
    try:
        signature.bind(**dict.fromkeys(ARGUMENTS))
    except TypeError as error:
        raise ConfigError(
            f"{_FIELD}.name: {name}{signature} in {file} cannot be called as {name}({', '.join(ARGUMENTS)}): "
            f"{error}"
        ) from error
    return function  # type: ignore[no-any-return]


def is_async(function: Callable[..., Any]) -> bool:
    """Whether calling it gives a coroutine."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
        getattr(function, "__call__", None)  # noqa: B004 — the method itself is looked at
    )


def to_score(returned: Any) -> Score:
    """The score that a reward function's return value means.

    A number (a truth value counts 0 or 1), or a dictionary with `score`, and `acc` if accuracy is something
    else than the score; its other entries are kept in `extra`.

    Raises:
        NotAScore: anything else, or a number that is not finite.
    """
    if not isinstance(returned, Mapping):
        value = _number(returned, "it returned")
        return Score(score=value, acc=value)
    if "score" not in returned:
        raise NotAScore(f"it returned a dictionary without 'score': {_shown(returned)}")
    score = _number(returned["score"], "it returned score =")
    acc = _number(returned["acc"], "it returned acc =") if "acc" in returned else score
    extra = {str(key): value for key, value in returned.items() if key not in ("score", "acc")}
    return Score(score=score, acc=acc, extra=extra)


def error_place(error: BaseException, file: str | Path) -> str:
    """ "line 7: ZeroDivisionError: division by zero", the line being the innermost one in `file`."""
    what = (str(error).strip().splitlines() or [""])[0]
    text = f"{type(error).__name__}: {what}" if what else type(error).__name__
    if isinstance(error, SyntaxError) and error.filename == str(file):
        return f"line {error.lineno}: {type(error).__name__}: {error.msg}"
    lines = [
        frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(file)
    ]
    return f"line {lines[-1]}: {text}" if lines else text


def _imported(file: Path) -> Any:
    module_name = f"neoproto_reward_{file.stem}_{abs(hash(str(file))):x}"
    spec = importlib.util.spec_from_file_location(module_name, file)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{_FIELD}.path: {file} is not a Python file (.py)")
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[module_name]
        raise ConfigError(f"{_FIELD}.path: {file} cannot be imported: {error_place(error, file)}") from error
    return module


def _number(value: Any, what: str) -> float:
    if getattr(value, "ndim", None) == 0:  # a scalar of numpy or torch
        value = value.item()
    if not isinstance(value, numbers.Real):
        raise NotAScore(f"{what} {_shown(value)} ({type(value).__name__}), not a number")
    try:
        number = float(value)
    except OverflowError:
        raise NotAScore(f"{what} {_shown(value)}, which is too large") from None
    if not math.isfinite(number):
        raise NotAScore(f"{what} {number}, which is not finite")
    if abs(number) > _LARGEST_SCORE:
        raise NotAScore(f"{what} {number}, which is too large")
    return number


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}…"
