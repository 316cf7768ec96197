"""The verifier of a reasoning-gym task."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING, Any

from neoproto.rewards.score import Question, Reward, RowError, Score
from neoproto.text import shown

if TYPE_CHECKING:
    from neoproto.data.rows import PromptRow

DATA_SOURCE_PREFIX = "reasoning_gym/"


def reasoning_gym(question: Question) -> Score:
    """The task's own verifier, which may give partial credit; `acc` is the exact match.

    For a task without one right answer, `acc` says whether the verifier gives full marks. The data source is
    "reasoning_gym/<task>", and `extra_info` the task's entry: `question`, `answer`, `metadata`.

    Raises:
        RowError: no such task, or extra_info lacks a part of the entry.
    """
    verifier, entry = _verifier_and_entry(question.data_source, question.extra_info)
    answer = question.solution.strip()
    score = float(verifier(answer=answer, entry=entry))
    truth = question.ground_truth
    acc = float(answer == truth.strip()) if isinstance(truth, str) else float(score >= 1)
    return Score(score=score, acc=acc, vote=answer)


def check_row(row: PromptRow) -> None:
    """The task exists, and the row has its entry."""
    _verifier_and_entry(row.data_source, row.extra_info)


def prepare() -> None:
    """Import the tasks."""
    import reasoning_gym.factory  # noqa: F401 — seconds, which the first answer should not pay


def _verifier_and_entry(data_source: str, extra_info: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """A task's verifier, and what it wants to know of the question."""
    keys = ("question", "answer", "metadata")
    if missing := [key for key in keys if key not in extra_info]:
        raise RowError(f"extra_info lacks {', '.join(missing)}, which the task's verifier needs")
    if not isinstance(extra_info["metadata"], Mapping):
        raise RowError(f"extra_info.metadata: an object is needed, got {shown(extra_info['metadata'])}")
    return _verifier(data_source.removeprefix(DATA_SOURCE_PREFIX)), {key: extra_info[key] for key in keys}


@cache
def _verifier(task: str) -> Any:
    from reasoning_gym.factory import get_score_answer_fn  # takes seconds, and only some runs need it

    try:
        return get_score_answer_fn(task)
    except ValueError as error:
        raise RowError(f"data_source: reasoning-gym has no task {task!r}") from error


CHOICE = Reward(
    name="reasoning_gym",
    about="the verifier of the reasoning-gym task",
    judge=reasoning_gym,
    check_row=check_row,
    prepare=prepare,
)
