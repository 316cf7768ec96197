"""Metrics of several answers to each question: pass@k, mean@k, maj@k.

n answers were drawn for each question, c of them right. All three are exact over the answers drawn; nothing
is resampled.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import comb


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """One answer.

    Attributes:
        vote: what it counts as in a vote: equal votes are one answer; "" is an answer without content, and
            None one whose vote is not known.
        accuracy: whether it is right, in [0, 1].
    """

    vote: str | None
    accuracy: float


def pass_at_k(n: int, right: int, k: int) -> float:
    """Chance that k of n answers drawn without replacement hold a right one.

    The unbiased estimator of Chen et al. 2021 (arXiv:2107.03374), equation 1: 1 - C(n - c, k) / C(n, k).

    Raises:
        ValueError: not 1 <= k <= n, or not 0 <= right <= n.
    """
    if not 1 <= k <= n or not 0 <= right <= n:
        raise ValueError(f"pass@{k} of {right} right ones among {n} answers does not exist")
    return 1.0 - comb(n - right, k) / comb(n, k)


def majority(answers: Sequence[Answer]) -> float:
    """Accuracy of the answer given most often; the mean of those that tie, each by its own mean accuracy.

    Answers without content, or whose vote is not known, count as one answer.
    """
    ballots: dict[str, list[float]] = {}
    for answer in answers:
        ballots.setdefault(answer.vote or "", []).append(answer.accuracy)
    most = max(map(len, ballots.values()))
    return mean([mean(accuracies) for accuracies in ballots.values() if len(accuracies) == most])


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def sizes(n: int) -> list[int]:
    """The k that are reported: powers of two, and n itself."""
    return sorted({1 << power for power in range(n.bit_length()) if 1 << power <= n} | {n})


def answer_metrics(groups: Mapping[str, Sequence[Answer]]) -> dict[str, float]:
    """`mean@n`, `pass@k` and `maj@n` over questions; no `maj@n` where no answer's vote is known.

    Args:
        groups: the answers to each question, as many to each.

    Raises:
        ValueError: no question, or different numbers of answers.
    """
    counts = {len(answers) for answers in groups.values()}
    if len(counts) != 1 or 0 in counts:
        raise ValueError(f"every question needs as many answers, got {sorted(counts)}")
    (n,) = counts
    right = [sum(answer.accuracy >= 1 for answer in answers) for answers in groups.values()]
    metrics = {f"mean@{n}": mean([mean([one.accuracy for one in answers]) for answers in groups.values()])}
    if n > 1:
        metrics |= {f"pass@{k}": mean([pass_at_k(n, count, k) for count in right]) for k in sizes(n)}
        if any(answer.vote is not None for answers in groups.values() for answer in answers):
            metrics[f"maj@{n}"] = mean([majority(answers) for answers in groups.values()])
    return metrics
