"""What a reward function receives, and what it returns.

Question ──judge──> Score, or Failure: no score for this answer; or RowError: no answer could be judged
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from neoproto.choices import Choice

if TYPE_CHECKING:
    from neoproto.data.rows import PromptRow


class RowError(ValueError):
    """A row that no answer could be judged by: the input is wrong, not the answer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    """One answer to judge; what reward functions are called with.

    Attributes:
        vote: its `Score.vote` is wanted too, which takes math-verify's judge longer.
    """

    data_source: str
    solution: str
    ground_truth: Any
    extra_info: dict[str, Any]
    vote: bool = False


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


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """An answer without a score.

    Attributes:
        kind: `timeout`: no verdict in time. `error`: the judge raised, died or returned no score. `input`:
            the row cannot be judged, whatever the answer.
        text: what happened.
    """

    kind: Literal["timeout", "error", "input"]
    text: str


Verdict: TypeAlias = "Score | Failure"


def _nothing() -> None:
    """No preparation."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Reward(Choice):
    """A built-in reward function.

    Attributes:
        judge: the verdict on one answer. Raises `RowError` for a row that it cannot judge by.
        check_row: raises `RowError` for a row that no answer could be judged by.
        data_sources: of rows of the style "rule" (verl's) that it judges.
        instant: no answer keeps it busy, so it judges in the worker itself; others judge in child processes.
        prepare: makes ready in such a child, before the first question.
        timeout_s, memory_bytes: bounds of such a child that are its own; None = the configured limit, and no
            bound.
    """

    judge: Callable[[Question], Verdict]
    check_row: Callable[[PromptRow], object]
    data_sources: tuple[str, ...] = ()
    instant: bool = False
    prepare: Callable[[], object] = field(default=_nothing)
    timeout_s: float | None = None
    memory_bytes: int | None = None

    def verdict(self, question: Question) -> Verdict:
        """The verdict on one answer; a row that cannot be judged by is a failure of the input."""
        try:
            return self.judge(question)
        except RowError as error:
            return Failure(kind="input", text=str(error))
