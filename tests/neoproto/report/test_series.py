from __future__ import annotations

import math

import pytest

from neoproto.report.series import averaged, drawn, extremes, growth, mean, points_for, total


def test_a_short_curve_is_drawn_as_it_is() -> None:
    series = drawn({1: 1.0, 3: math.nan, 4: 2.0}, scale=2.0)
    assert series is not None
    assert series.steps == (1, 3, 4)
    assert (series.values[0], series.values[2]) == (2.0, 4.0)
    assert math.isnan(series.values[1])


def test_a_curve_without_a_figure_is_none() -> None:
    assert drawn({}) is None
    assert drawn({1: math.nan, 2: math.inf, 3: 1.7e308}) is None


def test_a_mean_that_no_float_holds_is_infinite() -> None:
    assert mean([1.7e308, 1.7e308]) == total([1.7e308, 1.7e308]) == math.inf
    assert mean([1.0, math.nan, 2.0, math.inf]) == 1.5
    assert math.isnan(mean([math.nan]))


def test_thinning_keeps_peaks_ends_and_gaps() -> None:
    values = [0.0] * 5000
    values[1234], values[3210] = 9.0, -9.0
    values[100:200] = [math.nan] * 100
    steps, thin = extremes(range(5000), values, 600)
    assert len(steps) <= 602
    assert (steps[0], steps[-1]) == (0, 4999)
    assert steps == sorted(steps)
    assert thin[steps.index(1234)] == 9.0
    assert thin[steps.index(3210)] == -9.0
    assert any(map(math.isnan, thin))


def test_stacked_curves_stay_on_common_steps() -> None:
    one = drawn(dict.fromkeys(range(1, 2001), 1.0), "stacked")
    other = drawn({step: float(step % 2) for step in range(1, 2001)}, "stacked")
    assert one is not None
    assert other is not None
    assert one.steps == other.steps
    assert len(one.steps) == 600
    assert set(one.values) == {1.0}
    steps, values = averaged([1, 2, 3, 4], [0.0, 1.0, math.nan, 5.0], 2)
    assert (steps, values) == ([2, 4], [0.5, 5.0])


def test_growth_is_per_step_and_a_reset_is_a_gap() -> None:
    grown = growth({1: 10.0, 2: 14.0, 4: 20.0, 5: 3.0, 6: 5.0})
    assert {step: value for step, value in grown.items() if step != 5} == {2: 4.0, 4: 3.0, 6: 2.0}
    assert math.isnan(grown[5])
    assert drawn({1: 10.0}, "growth") is None


def test_many_runs_have_fewer_points_each() -> None:
    assert [points_for(runs) for runs in (1, 3, 4, 9, 100)] == [600, 600, 450, 200, 100]


@pytest.mark.parametrize("length", [1, 2, 601, 602, 1199, 10_000])
def test_thinning_works_at_any_length(length: int) -> None:
    series = drawn({step: float(step) for step in range(length)})
    assert series is not None
    assert len(series.steps) <= 602
    assert (series.steps[0], series.steps[-1]) == (0, length - 1)
