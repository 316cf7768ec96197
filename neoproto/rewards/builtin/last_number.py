"""The last number of the answer is that of the ground truth."""

from __future__ import annotations

from typing import TYPE_CHECKING

from neoproto.rewards.ground_truth import find_last_number, number_text, text_of
from neoproto.rewards.score import Question, Reward, RowError, Score
from neoproto.text import shown

if TYPE_CHECKING:
    from neoproto.data.rows import PromptRow


def last_number(question: Question) -> Score:
    """1 if the last number in the answer equals the last one in the ground truth, by value; else 0.

    Thousands separators and a leading sign are understood: "…is 1,234.50" equals 1234.5.

    Raises:
        RowError: the ground truth has no number.
    """
    expected = find_last_number(str(question.ground_truth))
    if expected is None:
        raise RowError(f"the ground truth {shown(question.ground_truth)} has no number")
    found = find_last_number(question.solution)
    right = float(found == expected)
    return Score(score=right, acc=right, vote="" if found is None else number_text(found))


def check_row(row: PromptRow) -> None:
    """The ground truth has a number."""
    last_number(Question(data_source="", solution="", ground_truth=text_of(row), extra_info={}))


CHOICE = Reward(
    name="last_number",
    about="the last number in it, by value",
    judge=last_number,
    check_row=check_row,
    data_sources=("openai/gsm8k",),
    instant=True,
)
