"""Validation samples as the page holds them: questions once, answers by step, at most so many characters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from neoproto.report.reading import RunData, Sample

BUDGET = 2_000_000
"""Characters of all samples of a page."""
LONGEST = 5_000
"""Characters of one text; of a longer one the middle is left out."""
ROW_COST = 40
"""About what a row takes besides its answer."""

Question = tuple[str, str, str, str]
"""uid, data source, prompt, ground truth."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleTable:
    """All samples of a page, ready for JSON.

    Attributes:
        questions: of all runs together.
        labels: ways of drawing answers.
        rows: by run: question, step, label (all numbers), answer, score, accuracy.
        all_questions: how many there were before some were left out.
    """

    questions: tuple[Question, ...]
    labels: tuple[str, ...]
    rows: tuple[tuple[tuple[Any, ...], ...], ...]
    all_questions: int


def sample_table(runs: Sequence[RunData], budget: int = BUDGET) -> SampleTable | None:
    """The samples of all runs, or None without any.

    What exceeds the budget is left out by question, evenly over all of them: of a question that is kept,
    every step and every run stays, so that they can be compared.
    """
    every = [sample for run in runs for sample in run.samples]
    if not every:
        return None
    costs: dict[Question, int] = {}
    for sample in every:
        question = question_of(sample)
        before = costs.get(question, sum(len(shortened(text)) for text in question))
        costs[question] = before + len(shortened(sample.answer)) + ROW_COST
    kept = chosen(list(costs), sum(costs.values()), budget)
    labels = sorted({sample.label for sample in every})
    number = {question: index for index, question in enumerate(kept)}
    return SampleTable(
        questions=tuple(
            (uid, source, shortened(prompt), shortened(truth)) for uid, source, prompt, truth in kept
        ),
        labels=tuple(labels),
        rows=tuple(
            tuple(
                (
                    number[question_of(sample)],
                    sample.step,
                    labels.index(sample.label),
                    shortened(sample.answer),
                    sample.score,
                    sample.accuracy,
                )
                for sample in run.samples
                if question_of(sample) in number
            )
            for run in runs
        ),
        all_questions=len(costs),
    )


def question_of(sample: Sample) -> Question:
    """What two runs must share for their answers to be compared."""
    return sample.uid, sample.data_source, sample.prompt, sample.ground_truth


def chosen(questions: list[Question], cost: int, budget: int) -> list[Question]:
    """So many of the questions as the budget allows if all cost the same, evenly spaced; at least one."""
    count = len(questions) if cost <= budget else max(1, len(questions) * budget // cost)
    return [questions[index * len(questions) // count] for index in range(count)]


def shortened(text: str) -> str:
    """The text, or its beginning and its end: a long answer's result stands there."""
    if len(text) <= LONGEST:
        return text
    head, tail = LONGEST * 3 // 5, LONGEST * 2 // 5
    return f"{text[:head]}\n[… {len(text) - head - tail:,} characters left out …]\n{text[-tail:]}"
