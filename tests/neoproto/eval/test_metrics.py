"""pass@k, mean@k and maj@k against counting."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from neoproto.eval.metrics import Answer, answer_metrics, majority, pass_at_k, sizes


def answers(*pairs: tuple[str | None, float]) -> list[Answer]:
    return [Answer(vote=vote, accuracy=accuracy) for vote, accuracy in pairs]


@given(st.integers(1, 7).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n), st.integers(1, n))))
def test_pass_at_k_is_the_share_of_draws_with_a_right_answer(numbers: tuple[int, int, int]) -> None:
    n, right, k = numbers
    draws = list(combinations(range(n), k))
    hits = sum(any(one < right for one in draw) for draw in draws)
    assert pass_at_k(n, right, k) == pytest.approx(hits / len(draws))


@pytest.mark.parametrize(("n", "right", "k"), [(4, 2, 0), (4, 2, 5), (4, 5, 1), (4, -1, 1)])
def test_what_does_not_exist_is_refused(n: int, right: int, k: int) -> None:
    with pytest.raises(ValueError, match="does not exist"):
        pass_at_k(n, right, k)


def test_the_majority_is_the_answer_given_most_often() -> None:
    assert majority(answers(("a", 0), ("b", 1), ("b", 1), ("c", 0))) == 1
    assert majority(answers(("a", 0), ("a", 0), ("b", 1))) == 0
    assert majority(answers(("a", 0), ("b", 1))) == 0.5
    assert majority(answers(("a", 1), ("a", 0.5), ("b", 0))) == 0.75


def test_answers_that_say_nothing_are_one_answer() -> None:
    assert majority(answers(("", 0), (None, 0), ("b", 1))) == 0
    assert majority(answers(("", 0), ("b", 1), ("b", 1))) == 1


def test_without_any_vote_there_is_no_majority() -> None:
    assert set(answer_metrics({"q": answers((None, 1), (None, 0))})) == {"mean@2", "pass@1", "pass@2"}
    assert answer_metrics({"q": answers((None, 1), ("", 0))})["maj@2"] == 0.5


def test_reported_sizes() -> None:
    assert sizes(1) == [1]
    assert sizes(6) == [1, 2, 4, 6]
    assert sizes(8) == [1, 2, 4, 8]


def test_metrics_are_means_over_questions() -> None:
    groups = {
        "q1": answers(("a", 1), ("a", 1), ("b", 0), ("c", 0)),
        "q2": answers(("x", 0), ("x", 0), ("x", 0), ("y", 1)),
    }
    assert answer_metrics(groups) == pytest.approx(
        {
            "mean@4": (0.5 + 0.25) / 2,
            "pass@1": (0.5 + 0.25) / 2,
            "pass@2": ((1 - 1 / 6) + 0.5) / 2,
            "pass@4": 1.0,
            "maj@4": 0.5,
        }
    )
    assert answer_metrics({"q": answers(("a", 1))}) == {"mean@1": 1.0}


def test_questions_with_different_numbers_of_answers_are_refused() -> None:
    with pytest.raises(ValueError, match=r"as many answers, got \[1, 2\]"):
        answer_metrics({"a": answers(("x", 1)), "b": answers(("x", 1), ("y", 0))})
    with pytest.raises(ValueError, match=r"got \[\]"):
        answer_metrics({})
