"""The answer is the ground truth to the letter."""

from __future__ import annotations

from neoproto.rewards.ground_truth import text_of
from neoproto.rewards.score import Question, Reward, Score


def exact_match(question: Question) -> Score:
    """1 if the answer is the ground truth to the letter, white space around both aside; else 0."""
    answer = question.solution.strip()
    right = float(answer == str(question.ground_truth).strip())
    return Score(score=right, acc=right, vote=answer)


CHOICE = Reward(
    name="exact_match",
    about="the ground truth to the letter",
    judge=exact_match,
    check_row=text_of,
    instant=True,
)
