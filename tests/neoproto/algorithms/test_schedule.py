from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from neoproto.algorithms.names import LR_SCHEDULES
from neoproto.algorithms.schedule import lr_multiplier


@given(
    warmup=st.integers(0, 20),
    total=st.integers(1, 60),
    kind=st.sampled_from(LR_SCHEDULES),
    min_ratio=st.sampled_from([0.0, 0.1, 1.0]),
)
def test_every_planned_step_learns_and_the_course_is_up_then_down(
    warmup: int, total: int, kind: str, min_ratio: float
) -> None:
    course = [lr_multiplier(step, warmup, total, kind, min_ratio) for step in range(total)]
    assert all(0.0 < rate <= 1.0 for rate in course)
    top = max(warmup - 1, 0)
    assert course[:top] == sorted(course[:top])
    assert course[top:] == sorted(course[top:], reverse=True)
    if total > top:
        assert course[top] == 1.0


def test_values_by_hand() -> None:
    assert [lr_multiplier(s, 4, 8, "constant") for s in range(6)] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
    linear = [lr_multiplier(s, 2, 6, "linear", 0.2) for s in range(8)]
    assert linear == pytest.approx([0.5, 1.0, 1.0, 0.8, 0.6, 0.4, 0.2, 0.2])
    cosine = [lr_multiplier(s, 0, 4, "cosine") for s in range(5)]
    assert cosine == pytest.approx([1.0, 0.5 * (1 + math.sqrt(0.5)), 0.5, 0.5 * (1 - math.sqrt(0.5)), 0.0])


def test_a_warm_up_longer_than_the_run_is_still_a_warm_up() -> None:
    assert [lr_multiplier(s, 4, 2, "linear") for s in range(5)] == [0.25, 0.5, 0.75, 1.0, 0.0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((-1, 0, 1), "step=-1"),
        ((0, -1, 1), "warmup_steps=-1"),
        ((0, 0, 0), "total_steps=0"),
        ((0, 0, 1, "step"), "must be one of constant, linear, cosine, got 'step'"),
        ((0, 0, 1, "linear", 1.5), "min_ratio must be in"),
    ],
)
def test_errors_name_the_argument(arguments: tuple[int, int, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        lr_multiplier(*arguments)
