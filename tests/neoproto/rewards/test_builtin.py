"""The built-in rewards, by hand; math-verify's judge is in tests/actors/reward/test_judge_pool.py."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from neoproto.rewards.builtin import REWARDS
from neoproto.rewards.score import Failure, Question, RowError, Score


def score(
    name: str, solution: str, truth: Any, source: str = "", extra: dict[str, Any] | None = None
) -> Score:
    asked = Question(data_source=source, solution=solution, ground_truth=truth, extra_info=extra or {})
    made = REWARDS[name].judge(asked)
    assert isinstance(made, Score)
    return made


@pytest.mark.parametrize(
    ("solution", "truth", "right"),
    [
        ("cba", "cba", 1),
        (" cba\n", "cba", 1),
        ("cba", " cba ", 1),
        ("Cba", "cba", 0),
        ("c ba", "cba", 0),
        ("7", 7, 1),
    ],
)
def test_exact_match_ignores_outer_white_space_only(solution: str, truth: Any, right: int) -> None:
    made = score("exact_match", solution, truth)
    assert (made.score, made.acc) == (right, right)


def test_last_number_compares_values() -> None:
    assert score("last_number", "so 5 … 1,000", "1000.0").score == 1
    assert score("last_number", "1000 so 5", "1000").score == 0
    assert score("last_number", "none at all", "1").score == 0
    assert score("last_number", "18", "… #### 18").acc == 1
    with pytest.raises(RowError, match="the ground truth 'x' has no number"):
        score("last_number", "1", "x")


def test_reasoning_gyms_verifier_gives_partial_credit_and_acc_is_exact() -> None:
    extra = {"question": "Spell abcd backward", "answer": "dcba", "metadata": {"word": "abcd"}}

    def judged(solution: str) -> tuple[float, float]:
        made = score("reasoning_gym", solution, "dcba", "reasoning_gym/spell_backward", extra)
        return made.score, made.acc

    assert judged(" dcba ") == (1.0, 1.0)
    partial, acc = judged("dcbx")
    assert 0 < partial < 1
    assert acc == 0
    with pytest.raises(RowError, match="extra_info lacks answer, metadata"):
        score("reasoning_gym", "x", "y", "reasoning_gym/spell_backward", {"question": "q"})
    with pytest.raises(RowError, match="reasoning-gym has no task 'no_such_task'"):
        score("reasoning_gym", "x", "y", "reasoning_gym/no_such_task", extra)


def test_a_row_that_cannot_be_judged_by_is_a_failure_of_the_input() -> None:
    asked = Question(data_source="", solution="1", ground_truth="x", extra_info={})
    assert REWARDS["last_number"].verdict(asked) == Failure(
        kind="input", text="the ground truth 'x' has no number"
    )


def test_judges_import_neither_torch_nor_numpy() -> None:
    """A child process that judges starts without them."""
    program = "import sys, actors.reward.judge_child; print(sorted({'torch', 'numpy'} & sys.modules.keys()))"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "[]"
