"""Curves as they are drawn: scaled, counters as growth, and thinned where a run is long."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from neoproto.report.panels import Kind, Line
from neoproto.report.reading import Curve, RunData

MOST_POINTS = 600
"""Of one curve in the page: a screen cannot show more."""
FEWEST_POINTS = 100
MOST_DRAWN = 1e100
"""A greater value is a gap: it would leave no room for the others, and no float for an axis around it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Series:
    """Points of one curve, steps ascending; NaN is a gap."""

    steps: tuple[int, ...]
    values: tuple[float, ...]


def series_of(run: RunData, line: Line, kind: Kind, most: int = MOST_POINTS) -> Series | None:
    """The points of a line, at most about `most`; None where the run has no finite one.

    Stacked lines of a run that have the same steps keep having the same steps.
    """
    curve = run.curves.get(line.metric)
    return None if curve is None else drawn(curve, kind, line.scale, most)


def points_for(runs: int) -> int:
    """So many points may a curve have on a page of so many runs: the page stays a few megabytes."""
    return max(FEWEST_POINTS, min(MOST_POINTS, 3 * MOST_POINTS // runs))


def drawn(curve: Curve, kind: Kind = "lines", scale: float = 1.0, most: int = MOST_POINTS) -> Series | None:
    """The same, of any curve."""
    if kind == "growth":
        curve = growth(curve)
    steps = list(curve)
    values = [value * scale if abs(value) < MOST_DRAWN else math.nan for value in curve.values()]
    if not any(map(math.isfinite, values)):
        return None
    if len(steps) > most:
        steps, values = averaged(steps, values, most) if kind == "stacked" else extremes(steps, values, most)
    return Series(steps=tuple(steps), values=tuple(values))


def growth(curve: Curve) -> dict[int, float]:
    """What a counter grew by per step, from each point to the next; NaN where it fell (it was reset)."""
    steps = list(curve)
    return {
        step: (curve[step] - curve[before]) / (step - before) if curve[step] >= curve[before] else math.nan
        for before, step in pairwise(steps)
    }


def extremes(steps: Sequence[int], values: Sequence[float], most: int) -> tuple[list[int], list[float]]:
    """Keep the lowest and the highest point of each stretch, and both ends: peaks stay visible."""
    kept = {0, len(steps) - 1}
    for stretch in _stretches(len(steps), most // 2):
        finite = [index for index in stretch if math.isfinite(values[index])]
        if finite:
            kept |= {min(finite, key=values.__getitem__), max(finite, key=values.__getitem__)}
        else:
            kept.add(stretch[0])
    chosen = sorted(kept)
    return [steps[index] for index in chosen], [values[index] for index in chosen]


def averaged(steps: Sequence[int], values: Sequence[float], most: int) -> tuple[list[int], list[float]]:
    """The mean of each stretch, at its last step."""
    thin_steps, thin_values = [], []
    for stretch in _stretches(len(steps), most):
        thin_steps.append(steps[stretch[-1]])
        thin_values.append(mean(values[index] for index in stretch))
    return thin_steps, thin_values


def mean(values: Iterable[float]) -> float:
    """Of the finite values; NaN without any."""
    finite = [value for value in values if math.isfinite(value)]
    return total(finite) / len(finite) if finite else math.nan


def total(values: Sequence[float]) -> float:
    """Of finite values; infinite where no float holds it."""
    try:
        return math.fsum(values)
    except OverflowError:
        return sum(values)


def _stretches(length: int, count: int) -> Iterable[range]:
    edges = [length * number // count for number in range(count + 1)]
    return [range(start, stop) for start, stop in pairwise(edges) if start < stop]
