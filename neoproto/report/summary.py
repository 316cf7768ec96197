"""The final metrics of a run, and what differs between the configurations of several."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from neoproto.report.reading import RunData
from neoproto.report.series import mean, total
from neoproto.trainer.metrics.services import flattened

LAST_STEPS = 10
"""Final training metrics are means over so many steps: a single batch is too noisy."""
NOT_COMPARED = ("runtime.run_dir",)
ABSENT = "(absent)"


@dataclass(frozen=True, kw_only=True, slots=True)
class Figure:
    """One final metric of a run: NaN where it has none.

    Attributes:
        value: the last one, of what is measured more than once.
        first, best: of such a metric: where it began, and the highest.
    """

    name: str
    unit: str
    value: float
    first: float | None = None
    best: float | None = None


def figures(run: RunData) -> list[Figure]:
    """Final metrics, the same names for every run; validation by data source and way of drawing."""
    steps = run.curves.get("timing_s/step", {})
    tokens = run.curves.get("perf/total_num_tokens", {})
    found = [
        Figure(name="Steps", unit="", value=float(run.last_step)),
        Figure(name=f"Score, last {LAST_STEPS} steps", unit="", value=at_end(run, "critic/score/mean")),
    ]
    for name, curve in run.curves.items():
        if name.startswith("val-core/"):
            values = [value for value in curve.values() if math.isfinite(value)]
            short = name.removeprefix("val-core/").replace("/acc/", ", ")
            found.append(
                Figure(
                    name=f"Validation {short}",
                    unit="",
                    value=values[-1] if values else math.nan,
                    first=values[0] if values else math.nan,
                    best=max(values, default=math.nan),
                )
            )
    wall = max((value for value in run.seconds.values() if math.isfinite(value)), default=math.nan)
    found += [
        Figure(name="Wall time of the loop", unit="s", value=wall),
        Figure(name="Time of a step, mean", unit="s", value=mean(steps.values())),
        Figure(name="Tokens", unit="", value=total(_finite(tokens.values())) if tokens else math.nan),
        Figure(
            name="Throughput, mean",
            unit="tokens/s/device",
            value=mean(run.curves.get("perf/throughput", {}).values()),
        ),
        Figure(
            name=f"Response length, last {LAST_STEPS} steps",
            unit="tokens",
            value=at_end(run, "response_length/mean"),
        ),
        Figure(name=f"Entropy, last {LAST_STEPS} steps", unit="nats", value=at_end(run, "actor/entropy")),
        Figure(
            name="Staleness, mean",
            unit="versions",
            value=mean(run.curves.get("training/off_policy/trajectory_staleness/mean", {}).values()),
        ),
    ]
    return found


def figure_rows(runs: Sequence[RunData]) -> list[dict[str, Any]]:
    """One row a metric, with a value for each run; rows without any value are left out.

    `first` and `best` are as `values`, or None if the metric has none in any run.
    """
    by_run = [{figure.name: figure for figure in figures(run)} for run in runs]
    names = list(dict.fromkeys(name for one in by_run for name in one))
    rows = []
    for name in names:
        values = [one[name].value if name in one else math.nan for one in by_run]
        if any(map(math.isfinite, values)):
            unit = next(one[name].unit for one in by_run if name in one)
            row: dict[str, Any] = {"name": name, "unit": unit, "values": values}
            for what in ("first", "best"):
                more = [getattr(one[name], what) if name in one else None for one in by_run]
                row[what] = None if all(one is None for one in more) else more
            rows.append(row)
    return rows


def differences(runs: Sequence[RunData]) -> list[dict[str, Any]]:
    """One row for each key of the configuration in which the runs differ, with each run's value as text."""
    flat = [dict(flattened(run.config)) for run in runs]
    keys = list(dict.fromkeys(key for one in flat for key in one))
    rows = []
    for key in keys:
        values = [one.get(key, ABSENT) for one in flat]
        if len(set(values)) > 1 and key not in NOT_COMPARED:
            rows.append({"key": key, "values": values})
    return rows


def at_end(run: RunData, metric: str) -> float:
    """Mean of the last steps that have the metric."""
    return mean(list(run.curves.get(metric, {}).values())[-LAST_STEPS:])


def _finite(values: Iterable[float]) -> list[float]:
    return [value for value in values if math.isfinite(value)]
