"""Loading a user's reward function, and reading what it returns."""

from __future__ import annotations

from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from actors.reward.function import is_async, load_reward_function, to_score
from neoproto.errors import ConfigError

ARGUMENTS = "data_source, solution_str, ground_truth, extra_info"


def write(folder: Path, text: str, name: str = "my_reward.py") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def test_a_function_is_loaded_by_path_and_name(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        f"from dataclasses import dataclass\n@dataclass\nclass Kept:\n    value: int\n"
        f"def compute_score({ARGUMENTS}=None): return 1\nasync def mine(**kwargs): return 2\n",
    )
    plain, other = load_reward_function(path), load_reward_function(path, "mine")
    assert plain(data_source="a", solution_str="b", ground_truth="c") == 1
    assert (is_async(plain), is_async(other)) == (False, True)


def test_an_object_with_an_async_call_is_async(tmp_path: Path) -> None:
    path = write(
        tmp_path, f"class R:\n    async def __call__(self, {ARGUMENTS}): return 1\ncompute_score = R()\n"
    )
    assert is_async(load_reward_function(path))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "import no_such_module_here\n",
            r"line 1: ModuleNotFoundError: No module named 'no_such_module_here'",
        ),
        ("\nx = 1 / 0\n", r"line 2: ZeroDivisionError: division by zero"),
        ("def f(:\n", r"line 1: SyntaxError: "),
        ("import sys\nsys.exit(3)\n", r"line 2: SystemExit: 3"),
        ("def other(a): pass\n", r"has no 'compute_score'; its functions: other"),
        ("compute_score = max\n", r"'compute_score' in .* does not say its arguments"),
        ("compute_score = 3\n", r"'compute_score' in .* is not callable, it is 3"),
        ("def compute_score(a, b): pass\n", r"compute_score\(a, b\) in .* cannot be called as"),
    ],
)
def test_what_cannot_be_used_is_named(tmp_path: Path, text: str, said: str) -> None:
    path = write(tmp_path, text)
    with pytest.raises(ConfigError, match=said) as caught:
        load_reward_function(path)
    assert str(path) in str(caught.value)
    assert str(caught.value).startswith("reward.custom_reward_function.")


def test_a_missing_or_strange_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no such file: .*absent\.py"):
        load_reward_function(tmp_path / "absent.py")
    with pytest.raises(ConfigError, match=r"is not a Python file"):
        load_reward_function(write(tmp_path, "x", "reward.txt"))


@pytest.mark.parametrize(
    ("returned", "score", "acc"),
    [
        (1, 1.0, 1.0),
        (True, 1.0, 1.0),
        (0.25, 0.25, 0.25),
        (np.float32(0.5), 0.5, 0.5),
        (torch.tensor(2.0), 2.0, 2.0),
        ({"score": 0.5}, 0.5, 0.5),
        ({"score": 0.5, "acc": True, "why": "close"}, 0.5, 1.0),
    ],
)
def test_numbers_and_dictionaries_are_scores(returned: Any, score: float, acc: float) -> None:
    made = to_score(returned)
    assert (made.score, made.acc) == (score, acc)
    assert made.extra == ({"why": "close"} if isinstance(returned, dict) and "why" in returned else {})


@pytest.mark.parametrize(
    ("returned", "said"),
    [
        (None, r"it returned None \(NoneType\), not a number"),
        ("1", r"it returned '1' \(str\)"),
        (float("nan"), "it returned nan, which is not finite"),
        ({"acc": 1}, "a dictionary without 'score'"),
        ({"score": float("inf")}, "score = inf"),
        ({"score": 1, "acc": "yes"}, r"acc = 'yes' \(str\)"),
        ([1], r"it returned \[1\]"),
    ],
)
def test_anything_else_is_refused(returned: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        to_score(returned)


@pytest.mark.parametrize(
    ("pred", "vote"),
    [
        (" 42 ", "42"),
        (42, "42"),
        (42.0, "42"),
        (Decimal("42.00"), "42"),
        (np.float32(0.5), "0.5"),
        (torch.tensor(7), "7"),
        (float("nan"), "nan"),
        (["a", 1], "['a', 1]"),
        (None, None),
    ],
)
def test_pred_is_the_vote(pred: Any, vote: str | None) -> None:
    assert to_score({"score": 1, "pred": pred}).vote == vote


def test_without_pred_there_is_no_vote() -> None:
    assert to_score({"score": 1}).vote is None
    assert to_score({"score": 1, "pred": 10**5000}).vote == "1" + 5000 * "0"
    assert to_score(1).vote is None
    assert to_score({"score": 1, "pred": [10**5000]}).vote is None  # has no text
