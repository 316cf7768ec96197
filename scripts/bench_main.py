"""The default run as a person starts it: wall time, learning, memory, log-prob agreement, repeatability.

    python scripts/bench_main.py [--seeds 3] [--keep DIR]

Each run is `python -m neoproto.run --config-name ppo_monarch` in a fresh process, the first one with an empty
model cache. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import itertools
import shutil
import statistics
import tempfile
from collections.abc import Iterator
from pathlib import Path

from _bench import Figure, Measurements, positive
from _runs import Run, run

SHORT = ["trainer.total_training_steps=5", "trainer.val_before_train=false", "trainer.test_freq=-1"]


def learning_figures(runs: list[Run]) -> list[Figure]:
    """Held-out exact match over seeds."""
    before = [one.validation(False, r"mean@\d+") for one in runs]
    after = [one.validation(True, r"mean@\d+") for one in runs]
    greedy_before = [one.validation(False, "greedy") for one in runs]
    greedy_after = [one.validation(True, "greedy") for one in runs]
    gain = statistics.mean(after) - statistics.mean(before)
    greedy_gain = statistics.mean(greedy_after) - statistics.mean(greedy_before)
    return [
        Figure(
            name="heldout_sampled_before",
            value=statistics.mean(before),
            unit="ratio",
            goal="<= 0.55",
            detail={"seeds": before},
        ),
        Figure(
            name="heldout_sampled_after", value=statistics.mean(after), unit="ratio", detail={"seeds": after}
        ),
        Figure(name="heldout_sampled_gain", value=gain, unit="ratio", goal=">= 0.25"),
        Figure(name="heldout_greedy_gain", value=greedy_gain, unit="ratio", goal=">= 0"),
        Figure(
            name="heldout_greedy_after",
            value=statistics.mean(greedy_after),
            unit="ratio",
            goal=">= 0.75",
            detail={"seeds": greedy_after, "before": greedy_before, "aim": 0.9},
        ),
    ]


def cost_figures(runs: list[Run]) -> list[Figure]:
    """Wall time, start-up, memory and the controller's share."""
    cold, share = runs[0], []
    for one in runs:
        share += [row["perf/controller_share"] for row in one.steps[5:] or one.steps]
    memory = [one.peak_pss_gib for one in runs if one.peak_pss_gib is not None]
    first = [one.steps[0]["time"] - one.started for one in runs]
    step = [statistics.median(row["timing_s/step"] for row in one.steps) for one in runs]
    return [
        Figure(
            name="wall_time_with_empty_cache",
            value=cold.seconds,
            unit="s",
            goal="<= 240",
            detail={"all": [one.seconds for one in runs]},
        ),
        Figure(
            name="command_to_end_of_first_step",
            value=first[0],
            unit="s",
            goal="<= 60",
            detail={"all": first, "note": "the first run makes the model and validates before it"},
        ),
        Figure(
            name="peak_pss",
            value=max(memory),
            unit="GiB",
            goal="<= 8",
            detail={"all": memory},
        ),
        Figure(name="controller_share_median", value=statistics.median(share), unit="ratio", goal="<= 0.1"),
        Figure(name="step_seconds_median", value=statistics.median(step), unit="s", detail={"seeds": step}),
    ]


def agreement_figures(folder: Path, cache: Path, hot: Run) -> Iterator[Figure]:
    """Log-prob agreement at two temperatures, and a repeated run; each as soon as its run is done."""

    def worst(one: Run) -> float:
        return float(max(row["training/rollout_log_probs_diff_max"] for row in one.steps))

    yield Figure(name="log_prob_difference_t1.0", value=worst(hot), unit="nat", goal="<= 0.0001")
    cool = run(folder / "temperature_0.6", cache, *SHORT, "actor_rollout_ref.rollout.temperature=0.6")
    yield Figure(name="log_prob_difference_t0.6", value=worst(cool), unit="nat", goal="<= 0.0001")
    again = [run(folder / f"same_seed_{i}", cache, *SHORT, "trainer.seed=1") for i in range(2)]
    kept = [[{k: v for k, v in row.items() if deterministic(k)} for row in one.steps] for one in again]
    yield Figure(
        name="steps_that_differ_with_the_same_seed",
        value=sum(a != b for a, b in itertools.zip_longest(*kept)),
        unit="steps",
        goal="<= 0",
        detail={"compared": "every metric but times, bit for bit"},
    )


def deterministic(name: str) -> bool:
    return name != "time" and not name.startswith(("timing_s/", "perf/t", "perf/controller", "store/"))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=positive, default=3)
    parser.add_argument(
        "--keep", type=Path, help="folder for the run folders (default: a temporary one, removed)"
    )
    options = parser.parse_args()
    folder = Path(options.keep or tempfile.mkdtemp(prefix="bench_main_")).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    cache = Path(tempfile.mkdtemp(prefix="bench_main_cache_"))
    runs: list[Run] = []
    try:
        with Measurements("main", options.seeds) as measured:
            measured.repeat(
                options.seeds,
                lambda turn: runs.append(run(folder / f"seed_{turn + 1}", cache, f"trainer.seed={turn + 1}")),
            )
            measured.attempt("what was learned", lambda: learning_figures(runs))
            measured.attempt("what a run costs", lambda: cost_figures(runs))
            measured.check()
            measured.add(agreement_figures(folder, cache, runs[0]))
    finally:
        shutil.rmtree(cache)
        if options.keep is None:
            shutil.rmtree(folder)


if __name__ == "__main__":
    main()
