"""The answer is mathematically equal to the ground truth, by math-verify."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from decimal import Decimal
from functools import cache
from typing import TYPE_CHECKING, Any

from neoproto.rewards.ground_truth import number_text, text_of
from neoproto.rewards.score import Failure, Question, Reward, RowError, Score, Verdict
from neoproto.text import shown

if TYPE_CHECKING:
    from neoproto.data.rows import PromptRow

_LIMIT_S = 3
"""For parsing, and again for comparing: math-verify's own limits, which are signals."""
_VOTE_LIMIT_S = 1
_DIGITS = 6
"""To which math-verify compares values, see its `verify`."""


def math_verify(question: Question) -> Verdict:
    """1 if the answer is mathematically equal to the ground truth, else 0.

    Raises:
        RowError: there is no expression in the ground truth.
    """
    from math_verify import parse, verify
    from math_verify.errors import TimeoutException

    try:
        gold = parse(str(question.ground_truth), parsing_timeout=_LIMIT_S)
        if not gold:
            raise RowError(f"math-verify finds no expression in the ground truth {question.ground_truth!r}")
        answer = parse(question.solution, parsing_timeout=_LIMIT_S)
        right = float(verify(gold, answer, timeout_seconds=_LIMIT_S))
        # Whatever is right is one answer, however it is written.
        vote = math_vote(gold if right else answer) if question.vote else None
        return Score(score=right, acc=right, vote=vote)
    except TimeoutException:
        return Failure(kind="timeout", text="math-verify gave up on it")
    except (MemoryError, RecursionError) as error:
        return Failure(kind="error", text=f"math-verify gave up on it: {type(error).__name__}")


def math_vote(parsed: Sequence[Any]) -> str:
    """What an answer that math-verify parsed counts as in a vote.

    Equal texts are equal mathematics by its rules: values to six digits, "x = 5" as 5, "9%" as 9. Where
    that takes too long, it is the expression as it was written; "" if there was none.
    """
    from math_verify.errors import TimeoutException
    from math_verify.grader import get_pct_val, is_equation, take_last_relation
    from math_verify.utils import timeout

    def canonical(expression: Any) -> str:
        if not hasattr(expression, "is_number"):  # words, a matrix
            return str(expression).strip()
        if is_equation(expression):
            expression = take_last_relation(expression).rhs
        whole = get_pct_val(expression)
        value = whole if getattr(whole, "is_Integer", False) else expression.doit()
        if not value.is_number:
            value = value.simplify()
            return str(value.cancel() if hasattr(value, "cancel") else value)
        rounded = value if value.is_Integer else value.round(_DIGITS)
        return number_text(Decimal(str(rounded))) if value.is_real else str(rounded)

    if not parsed:
        return ""
    try:
        return str(timeout(_VOTE_LIMIT_S)(canonical)(parsed[0]))
    except (Exception, TimeoutException):  # noqa: BLE001 — whatever sympy makes of it
        return str(parsed[-1]).strip() if isinstance(parsed[-1], str) else "an expression"


def check_row(row: PromptRow) -> None:
    """The ground truth has an expression."""
    text = text_of(row)
    if not _has_mathematics(text):
        truth = row.reward_model.get("ground_truth")
        raise RowError(f"math-verify finds no expression in the ground truth {shown(truth)}")


def prepare() -> None:
    """Import sympy and what it imports late."""
    math_verify(Question(data_source="", solution="1", ground_truth="1", extra_info={}))


@cache
def _has_mathematics(ground_truth: str) -> bool:
    """Whether math-verify finds an expression in it.

    LaTeX between its signs is taken for one: to parse that takes long, and no data set lacks it by mistake.
    """
    in_main = threading.current_thread() is threading.main_thread()  # its limit is a signal
    if not in_main or any(sign in ground_truth for sign in ("$", r"\(", r"\[", r"\boxed")):
        return True
    from math_verify import parse  # half a second, and only some runs need it

    return bool(parse(ground_truth, parsing_timeout=_LIMIT_S))


CHOICE = Reward(
    name="math_verify",
    about="mathematically equal, by math-verify",
    judge=math_verify,
    check_row=check_row,
    data_sources=("lighteval/MATH", "DigitalLearningGmbH/MATH-lighteval"),
    prepare=prepare,
    timeout_s=12.0,  # math-verify's own limits are three times 3 s
    memory_bytes=2 << 30,
)
