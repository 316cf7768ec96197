"""The three trainer modes on the default task: what they learn, how long they take, and what weights cost.

    python scripts/bench_modes.py [--seeds 3] [--config ppo_monarch] [--keep DIR] [OVERRIDE …]

For each seed the three modes run one after another, in turning order, each as `python -m neoproto.run` in a
fresh process, with the same number of samples. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path

from _bench import Figure, report
from _runs import Run, run

MODES = ("sync", "separate_async", "decoupled_async")
SPANS = "training/off_policy/trajectory_spans"
STALE = "training/off_policy/trajectory_staleness"


def training_seconds(one: Run) -> float:
    """Wall time from the first step's start to the last step's end, validation left out."""
    steps = one.steps
    between = [row["timing_s/testing"] for row in one.rows if "timing_s/testing" in row]
    inner = sum(between[1:-1])  # the first is before the first step, the last after the last
    first = steps[0]["time"] - steps[0]["timing_s/step"]
    return float(steps[-1]["time"] - first - inner)


def weight_seconds(one: Run) -> float:
    """Median seconds a step that the trainer spends on handing out weights."""
    return float(statistics.median(row["timing_s/update_weights"] for row in one.steps[5:]))


def per_mode(
    runs: dict[str, list[Run]], name: str, unit: str, value: Callable[[Run], float]
) -> tuple[list[Figure], dict[str, float]]:
    """One figure a mode, the mean over its seeds."""
    found = {mode: [value(one) for one in ones] for mode, ones in runs.items()}
    means = {mode: statistics.mean(values) for mode, values in found.items()}
    return [
        Figure(name=f"{name}_{mode}", value=means[mode], unit=unit, detail={"seeds": found[mode]})
        for mode in runs
    ], means


def figures_of(runs: dict[str, list[Run]]) -> list[Figure]:
    """Learning, wall time, weight work and off-policy figures, with the goals between modes."""
    figures, scores = per_mode(
        runs, "heldout_sampled", "ratio", lambda one: one.validation(True, r"mean@\d+")
    )
    more, greedy = per_mode(runs, "heldout_greedy", "ratio", lambda one: one.validation(True, "greedy"))
    figures += more
    for mode in MODES[1:]:
        for label, values in (("sampled", scores), ("greedy", greedy)):
            figures.append(
                Figure(
                    name=f"heldout_{label}_{mode}_below_sync",
                    value=values["sync"] - values[mode],
                    unit="ratio",
                    goal="<= 0.03",
                )
            )
    more, seconds = per_mode(runs, "training_seconds", "s", training_seconds)
    figures += more
    for mode in MODES[1:]:
        goal = "<= 1.1" if mode == "decoupled_async" else None
        figures.append(
            Figure(
                name=f"wall_time_{mode}_vs_sync",
                value=seconds[mode] / seconds["sync"],
                unit="ratio",
                goal=goal,
            )
        )
    more, weights = per_mode(runs, "weight_seconds_a_step", "s", weight_seconds)
    figures += more
    figures.append(
        Figure(
            name="weight_work_decoupled_vs_separate",
            value=weights["decoupled_async"] / weights["separate_async"],
            unit="ratio",
            goal="<= 0.1",
        )
    )
    return figures + off_policy(runs)


def off_policy(runs: dict[str, list[Run]]) -> list[Figure]:
    """Spans and staleness of what the asynchronous modes trained on."""
    figures = []
    for mode in MODES[1:]:
        rows = [row for one in runs[mode] for row in one.steps]
        goal = "== 1" if mode == "decoupled_async" else None
        mean = statistics.mean(row[f"{SPANS}/mean"] for row in rows)
        figures += [
            Figure(name=f"trajectory_spans_mean_{mode}", value=mean, unit="versions", goal=goal),
            Figure(
                name=f"trajectory_spans_max_{mode}",
                value=max(row[f"{SPANS}/max"] for row in rows),
                unit="versions",
            ),
            Figure(
                name=f"trajectory_staleness_mean_{mode}",
                value=statistics.mean(row[f"{STALE}/mean"] for row in rows),
                unit="versions",
                detail={"max": max(row[f"{STALE}/max"] for row in rows)},
            ),
        ]
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--config", default="ppo_monarch")
    parser.add_argument("--keep", type=Path, help="folder for the run folders (default: temporary, removed)")
    parser.add_argument("overrides", nargs="*", help="given to every run")
    options = parser.parse_args()
    folder = Path(options.keep or tempfile.mkdtemp(prefix="bench_modes_")).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    cache = Path(tempfile.mkdtemp(prefix="bench_modes_cache_"))
    runs: dict[str, list[Run]] = {mode: [] for mode in MODES}
    try:
        for seed in range(1, options.seeds + 1):
            turned = MODES[seed % len(MODES) :] + MODES[: seed % len(MODES)]
            for mode in turned:
                overrides = (f"trainer.mode={mode}", f"trainer.seed={seed}", *options.overrides)
                runs[mode].append(run(folder / f"{mode}_{seed}", cache, *overrides, config=options.config))
        figures = figures_of(runs)
    finally:
        shutil.rmtree(cache)
        if options.keep is None:
            shutil.rmtree(folder)
    report("modes", options.seeds, figures)


if __name__ == "__main__":
    main()
