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
from collections.abc import Callable, Iterator
from pathlib import Path

from _bench import Figure, Measurements, positive
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
    return float(statistics.median(row["timing_s/update_weights"] for row in one.steps[5:] or one.steps))


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


def learning(runs: dict[str, list[Run]]) -> Iterator[Figure]:
    """Held-out scores, and what the asynchronous modes are below sync."""
    figures, scores = per_mode(
        runs, "heldout_sampled", "ratio", lambda one: one.validation(True, r"mean@\d+")
    )
    yield from figures
    figures, greedy = per_mode(runs, "heldout_greedy", "ratio", lambda one: one.validation(True, "greedy"))
    yield from figures
    for mode in MODES[1:]:
        for label, values in (("sampled", scores), ("greedy", greedy)):
            yield Figure(
                name=f"heldout_{label}_{mode}_below_sync",
                value=values["sync"] - values[mode],
                unit="ratio",
                goal="<= 0.03",
            )


def wall_time(runs: dict[str, list[Run]]) -> Iterator[Figure]:
    """Seconds of training, and those of the asynchronous modes over sync's."""
    figures, seconds = per_mode(runs, "training_seconds", "s", training_seconds)
    yield from figures
    for mode in MODES[1:]:
        goal = "<= 1.1" if mode == "decoupled_async" else None
        yield Figure(
            name=f"wall_time_{mode}_vs_sync", value=seconds[mode] / seconds["sync"], unit="ratio", goal=goal
        )


def weight_work(runs: dict[str, list[Run]]) -> Iterator[Figure]:
    """What handing out weights takes of the trainer."""
    figures, weights = per_mode(runs, "weight_seconds_a_step", "s", weight_seconds)
    yield from figures
    yield Figure(
        name="weight_work_decoupled_vs_separate",
        value=weights["decoupled_async"] / weights["separate_async"],
        unit="ratio",
        goal="<= 0.1",
    )


def off_policy(runs: dict[str, list[Run]]) -> list[Figure]:
    """Spans and staleness of what the asynchronous modes trained on."""
    figures = []
    for mode in MODES[1:]:
        if mode not in runs:
            continue
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
    parser.add_argument("--seeds", type=positive, default=3)
    parser.add_argument("--config", default="ppo_monarch")
    parser.add_argument("--keep", type=Path, help="folder for the run folders (default: temporary, removed)")
    parser.add_argument("overrides", nargs="*", help="given to every run")
    options = parser.parse_args()
    folder = Path(options.keep or tempfile.mkdtemp(prefix="bench_modes_")).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    cache = Path(tempfile.mkdtemp(prefix="bench_modes_cache_"))
    runs: dict[str, list[Run]] = {}

    def turn(number: int) -> None:
        seed, place = divmod(number, len(MODES))
        seed += 1
        mode = MODES[(seed + place) % len(MODES)]
        overrides = (f"trainer.mode={mode}", f"trainer.seed={seed}", *options.overrides)
        done = run(folder / f"{mode}_{seed}", cache, *overrides, config=options.config)
        runs.setdefault(mode, []).append(done)

    try:
        with Measurements("modes", options.seeds) as measured:
            measured.repeat(options.seeds * len(MODES), turn)
            for what, figures in (
                ("what was learned", learning),
                ("wall time", wall_time),
                ("work on weights", weight_work),
                ("staleness", off_policy),
            ):
                measured.attempt(what, lambda figures=figures: figures(runs))  # type: ignore[misc]
            measured.check()
    finally:
        shutil.rmtree(cache)
        if options.keep is None:
            shutil.rmtree(folder)


if __name__ == "__main__":
    main()
