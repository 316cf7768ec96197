"""math-verify in its child process."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from actors.math_judge import MathJudge


@pytest.fixture(scope="module")
def judge() -> Iterator[MathJudge]:
    made = MathJudge()
    yield made
    made.close()


def test_equal_expressions_are_right_whatever_they_look_like(judge: MathJudge) -> None:
    assert judge.score("so the answer is $\\frac{1}{2}$", "0.5") == 1.0
    assert judge.score("$x^2 + 2x + 1$", "$(x+1)^2$") == 1.0
    assert judge.score("it is 3", "4") == 0.0
    assert judge.score("no idea", "4") == 0.0
    assert judge.timeouts == 0


def test_a_ground_truth_without_an_expression_is_an_error(judge: MathJudge) -> None:
    with pytest.raises(ValueError, match="no expression in the ground truth 'words only'"):
        judge.score("4", "words only")


def test_a_killed_child_counts_as_a_wrong_answer_and_is_replaced(judge: MathJudge) -> None:
    assert judge.score("4", "4") == 1.0
    child = judge._child
    assert child is not None
    child.kill()
    child.wait()
    assert judge.score("4", "4") == 1.0
    assert judge._child is not child


def test_an_answer_nobody_can_compute_is_wrong_in_bounded_time(
    judge: MathJudge, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert judge.score("4", "4") == 1.0
    assert judge._child is not None
    os.kill(judge._child.pid, signal.SIGSTOP)
    monkeypatch.setattr("actors.math_judge._REPLY_S", 0.2)
    before = judge.timeouts
    assert judge.score("4", "4") == 0.0
    assert judge.timeouts == before + 1
    monkeypatch.undo()
    assert judge.score("4", "4") == 1.0


def test_closing_ends_the_child() -> None:
    made = MathJudge()
    made.score("1", "1")
    child = made._child
    made.close()
    made.close()
    assert child is not None
    assert child.returncode is not None
