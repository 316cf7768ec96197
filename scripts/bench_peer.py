"""Against TRL: seconds a step, samples a second, and the score after equal wall time; GRPO and RLOO.

    python scripts/bench_peer.py [--quick] [--workloads short,long_tailed] [--algorithms grpo,rloo]

Both sides train the same model on the same questions on the same cores, in turns and with the same seeds:
ours as the shipped `grpo_monarch`, a command in a fresh process; the peer in an environment of its own,
made on first use. The peer trains for as many seconds as ours did in that turn, then one evaluator scores
both models on held-out questions. A turn lasts for `--seconds`, and from the second on for as long as the
slower side needs for enough steps. The last line is one JSON object, also after an interruption or a failure.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from _bench import BenchError, Figure, Measurements
from _peer_env import peer_python
from _peer_task import WORKLOADS, Questions, Workload, draw_questions, make_model, score, write_rows
from _runs import run

PROMPTS, SAMPLES, MAX_PROMPT = 16, 8, 32
ALGORITHMS = ("grpo", "rloo")
PEER_SCRIPT = Path(__file__).with_name("_peer_trl.py")
FIRST_GUESS_S = {"short": 0.5, "long_tailed": 1.3}
"""Seconds a step of ours, before the first turn has said how many."""
MOST_STEPS = 100_000
LEAST_INTERVALS = 5
"""Steps to take a median of."""
SPARE = 1.5
"""A turn lasts so much longer than the steps of the turn before would need: seconds of a step differ."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Side:
    """What one side did in one turn.

    Attributes:
        startup_s: from the command to the beginning of the first step.
        training_s: from there to the end of the last step.
        step_s: from each step's end to the next one's, without the first `warmup` of them if there are more.
        steps: all of them.
        enough: whether `step_s` are as many as a median wants, all after the warm-up.
        length: mean tokens of an answer, over the whole training.
        sampled, greedy: the trained model's exact match on the held-out questions.
    """

    startup_s: float
    training_s: float
    step_s: tuple[float, ...]
    steps: int
    enough: bool
    length: float
    sampled: float
    greedy: float

    @property
    def median_s(self) -> float:
        return statistics.median(self.step_s)


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """Of the command line."""

    workloads: tuple[str, ...]
    algorithms: tuple[str, ...]
    turns: int
    seconds: float
    warmup: int
    cores: str
    threads: int
    peer_options: Mapping[str, Any]
    cache: Path
    keep: Path | None
    overrides: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Course:
    """One workload, ready to be trained on: what both sides are handed."""

    workload: Workload
    questions: Questions
    model: Path
    rows: Path


def parse(arguments: Sequence[str] | None = None) -> Options:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    cores = ",".join(map(str, sorted(os.sched_getaffinity(0))))
    parser.add_argument("--workloads", type=_names(tuple(WORKLOADS)), default=tuple(WORKLOADS))
    parser.add_argument("--algorithms", type=_names(ALGORITHMS), default=ALGORITHMS)
    parser.add_argument("--turns", type=int, default=3, help="of each side, each with a seed of its own")
    parser.add_argument("--seconds", type=float, default=30.0, help="of training in a turn, about")
    parser.add_argument("--warmup", type=int, default=2, help="first steps that are left out of the medians")
    parser.add_argument("--cores", default=cores, help="as for taskset -c (default: all of this process)")
    parser.add_argument("--threads", type=int, default=2, help="of torch, on both sides")
    parser.add_argument(
        "--cache", type=Path, help="for models and the peer's environment (default: the project's)"
    )
    parser.add_argument(
        "--peer-options",
        type=json.loads,
        default={},
        metavar="JSON",
        help="over those of TRL's configuration, to see whether others are faster",
    )
    parser.add_argument("--keep", type=Path, help="folder for the runs (default: temporary, removed)")
    parser.add_argument("--quick", action="store_true", help="one short turn, to try it out")
    parser.add_argument("overrides", nargs="*", help="given to every run of ours")
    given = parser.parse_args(arguments)
    if given.turns < 1 or given.seconds <= 0 or given.warmup < 1 or given.threads < 1:
        parser.error("--turns, --seconds, --warmup and --threads must be at least 1 (seconds above 0)")
    if given.cache is None:
        from actors.models.tiny_model import cache_folder

        given.cache = cache_folder()
    return Options(
        workloads=given.workloads,
        algorithms=given.algorithms,
        turns=1 if given.quick else given.turns,
        seconds=min(given.seconds, 8.0) if given.quick else given.seconds,
        warmup=1 if given.quick else given.warmup,
        cores=given.cores,
        threads=given.threads,
        peer_options=given.peer_options,
        cache=given.cache,
        keep=given.keep,
        overrides=tuple(given.overrides),
    )


def _names(known: tuple[str, ...]) -> Any:
    def names(text: str) -> tuple[str, ...]:
        found = tuple(text.split(","))
        if unknown := [name for name in found if name not in known]:
            raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: known are {', '.join(known)}")
        return found

    return names


def overrides(course: Course, algorithm: str, options: Options, *, seed: int, steps: int) -> list[str]:
    """Of `grpo_monarch`: the same updates as the peer makes, and no validation or checkpoints."""
    actor, rollout = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
    # What each estimator's loss is a mean of, in TRL: tokens (GRPO), or sequences of summed tokens (RLOO).
    mean = {"grpo": "token-mean", "rloo": "seq-mean-token-sum"}[algorithm]
    return [
        "data=files",
        f"data.train_files=[{course.rows}]",
        f"data.train_batch_size={PROMPTS}",
        f"data.max_prompt_length={MAX_PROMPT}",
        f"data.max_response_length={course.workload.max_tokens}",
        f"actor_rollout_ref.model.path={course.model}",
        f"algorithm.adv_estimator={algorithm}",
        f"{actor}.loss_agg_mode={mean}",
        f"{actor}.ppo_mini_batch_size={PROMPTS}",
        f"{actor}.optim.lr={course.workload.lr}",
        f"{actor}.optim.lr_warmup_steps=0",
        f"{actor}.optim.lr_scheduler_type=constant",
        f"{actor}.num_threads={options.threads}",
        f"{actor}.ppo_micro_batch_size_per_gpu={course.workload.micro}",
        f"{rollout}.name=hf",
        f"{rollout}.n={SAMPLES}",
        # One: threads of two processes that wait for work keep the cores from each other.
        f"{rollout}.num_threads=1",
        # One update per batch: the policy is the one that sampled, and its log-probs need no second pass.
        "algorithm.rollout_correction.bypass_mode=true",
        f"trainer.total_training_steps={steps}",
        f"trainer.seed={seed}",
        "trainer.save_freq=-1",
        *options.overrides,
    ]


def ours(course: Course, algorithm: str, options: Options, folder: Path, *, seed: int, steps: int) -> Side:
    """One run of ours, and its figures."""
    done = run(
        folder,
        options.cache,
        *overrides(course, algorithm, options, seed=seed, steps=steps),
        config="grpo_monarch",
        prefix=("taskset", "-c", options.cores),
        measure_memory=False,
    )
    ends = [row["time"] for row in done.steps]
    began = ends[0] - done.steps[0]["timing_s/step"]
    step_s, enough = step_seconds(began, ends, options.warmup)
    lengths = [row["response_length/mean"] for row in done.steps]
    sampled, greedy = score(folder / "model", course.questions.held_out)
    return Side(
        startup_s=began - done.started,
        training_s=ends[-1] - began,
        step_s=step_s,
        steps=len(ends),
        enough=enough,
        length=statistics.mean(lengths),
        sampled=sampled,
        greedy=greedy,
    )


def step_seconds(began: float, ends: Sequence[float], warmup: int) -> tuple[tuple[float, ...], bool]:
    """From one step's end to the next one's, the first `warmup` steps left out.

    Of so few steps that nothing is left, those of the warm-up.

    Returns:
        The seconds, and whether they are enough for a median.
    """
    every = tuple(end - start for start, end in itertools.pairwise((began, *ends)))
    found = every[warmup:]
    return found or every, len(found) >= LEAST_INTERVALS


def seconds_of_a_turn(options: Options, before: tuple[Side, Side] | None) -> float:
    """How long ours is to train, about: the slower side of the turn before would have had enough steps."""
    if before is None:
        return options.seconds
    least = options.warmup + LEAST_INTERVALS + 1  # one more: a turn ends with a whole step
    slower = max(side.training_s / side.steps for side in before)
    return max(options.seconds, SPARE * least * slower)


def job_of(
    course: Course, algorithm: str, options: Options, folder: Path, *, seed: int, seconds: float
) -> dict[str, Any]:
    """What the peer's script is told."""
    return {
        "algorithm": algorithm,
        "model": str(course.model),
        "rows": str(course.rows),
        "folder": str(folder),
        "report": str(folder / "report.json"),
        "prompts": PROMPTS,
        "samples": SAMPLES,
        "max_tokens": course.workload.max_tokens,
        "lr": course.workload.lr,
        "options": dict(options.peer_options),
        "threads": options.threads,
        "seed": seed,
        "seconds": seconds,
        "max_steps": MOST_STEPS,
    }


def peer(
    python: Path, course: Course, algorithm: str, options: Options, folder: Path, *, seed: int, seconds: float
) -> tuple[Side, dict[str, str]]:
    """One run of the peer, its figures, and the versions of its packages."""
    folder.mkdir(parents=True)
    job = folder / "job.json"
    job.write_text(json.dumps(job_of(course, algorithm, options, folder, seed=seed, seconds=seconds)))
    started, output = time.time(), folder.with_suffix(".out")
    limit = 600 + 2 * seconds
    try:
        with output.open("w") as sink:
            ended = subprocess.run(
                ["taskset", "-c", options.cores, str(python), str(PEER_SCRIPT), str(job)],
                env=peer_environment(os.environ, options.threads),
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=subprocess.STDOUT,
                timeout=limit,
            )
    except subprocess.TimeoutExpired:
        raise BenchError(f"the peer did not end within {limit:.0f} s:\n{output.read_text()}") from None
    if ended.returncode != 0:
        raise BenchError(f"the peer failed with code {ended.returncode}:\n{output.read_text()}")
    found = json.loads((folder / "report.json").read_text())
    check_prompt(course, found["prompt_ids"])
    print(f"{folder.name}: {time.time() - started:.1f} s", flush=True)
    sampled, greedy = score(folder, course.questions.held_out)
    step_s, enough = step_seconds(found["began"], found["ends"], options.warmup)
    side = Side(
        startup_s=found["began"] - started,
        training_s=found["ends"][-1] - found["began"],
        step_s=step_s,
        steps=len(found["ends"]),
        enough=enough,
        length=statistics.mean(length for step in found["lengths"] for length in step),
        sampled=sampled,
        greedy=greedy,
    )
    return side, found["versions"]


def peer_environment(environment: Mapping[str, str], threads: int) -> dict[str, str]:
    """Ours, without what points to our packages; as many threads as ours."""
    ours_only = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
    kept = {name: value for name, value in environment.items() if name not in ours_only}
    return kept | {
        "OMP_NUM_THREADS": str(threads),
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_CACHE": tempfile.gettempdir(),
    }


def check_prompt(course: Course, peer_ids: Sequence[int]) -> None:
    """Refuse a comparison in which the two sides tokenise questions differently."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(course.model, local_files_only=True)
    messages = course.questions.train[0]["prompt"]
    mine = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    if list(mine) != list(peer_ids):
        raise BenchError(f"the peer's prompt has the tokens {list(peer_ids)}, ours {list(mine)}")


def take_turns(
    python: Path, course: Course, algorithm: str, options: Options, folder: Path, measured: Measurements
) -> tuple[list[tuple[Side, Side]], dict[str, str]]:
    """Ours and the peer one after the other, so often; the peer trains as long as ours did."""
    pairs: list[tuple[Side, Side]] = []
    versions: dict[str, str] = {}

    def turn(number: int) -> None:
        name, seed = f"{course.workload.name}_{algorithm}_{number + 1}", number + 1
        before = pairs[-1] if pairs else None
        guess = before[0].training_s / before[0].steps if before else FIRST_GUESS_S[course.workload.name]
        seconds = seconds_of_a_turn(options, before)
        steps = max(round(seconds / guess), options.warmup + LEAST_INTERVALS)
        mine = ours(course, algorithm, options, folder / f"{name}_ours", seed=seed, steps=steps)
        show(f"{name}_ours", mine)
        theirs, found = peer(
            python, course, algorithm, options, folder / f"{name}_trl", seed=seed, seconds=mine.training_s
        )
        show(f"{name}_trl", theirs)
        versions.update(found)
        pairs.append((mine, theirs))

    measured.repeat(options.turns, turn)
    return pairs, versions


def show(name: str, side: Side) -> None:
    """What a side did, as soon as it is known: a failure of the other one must not hide it."""
    few = "" if side.enough else " (few for a median)"
    print(
        f"{name}: {side.median_s:.3f} s a step, {side.steps} steps{few} in {side.training_s:.1f} s; "
        f"score {side.sampled:.3f}",
        flush=True,
    )


def figures_of(
    course: Course, algorithm: str, pairs: Sequence[tuple[Side, Side]], before: tuple[float, float]
) -> list[Figure]:
    """The comparison of one workload and algorithm.

    Args:
        before: sampled and greedy score of the model that both started from.
    """
    name = f"{course.workload.name}_{algorithm}"
    mine, theirs = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    # Turns that were too short count for want of others.
    timed = [pair for pair in pairs if pair[0].enough and pair[1].enough]
    few = (
        None if timed else f"{min(len(side.step_s) for pair in pairs for side in pair)} timed step(s) a turn"
    )
    seconds = [
        statistics.median(side.median_s for side in sides) for sides in zip(*(timed or pairs), strict=True)
    ]
    scores = [statistics.mean(side.sampled for side in sides) for sides in (mine, theirs)]

    def detail(what: str) -> dict[str, list[float]]:
        return {
            side: [getattr(one, what) for one in ones] for side, ones in (("ours", mine), ("trl", theirs))
        }

    return [
        Figure(
            name=f"{name}_step_vs_trl",
            value=seconds[0] / seconds[1],
            unit="ratio",
            goal=course.workload.goal,
            detail=detail("median_s")
            | {
                "ratio_a_turn": [a.median_s / b.median_s for a, b in pairs],
                "steps": detail("steps"),
                "enough": detail("enough"),
            },
            incomplete=few,
        ),
        Figure(
            name=f"{name}_samples_per_s", value=PROMPTS * SAMPLES / seconds[0], unit="1/s",
            detail={"trl": PROMPTS * SAMPLES / seconds[1]}, incomplete=few,
        ),
        Figure(
            name=f"{name}_score_above_trl",
            value=scores[0] - scores[1],
            unit="ratio",
            goal="> 0",
            detail={"before": before[0]} | detail("sampled") | {"training_s": detail("training_s")},
        ),
        Figure(
            name=f"{name}_greedy_above_trl",
            value=statistics.mean(a.greedy - b.greedy for a, b in pairs),
            unit="ratio",
            detail={"before": before[1]} | detail("greedy"),
        ),
        Figure(
            name=f"{name}_answer_tokens",
            value=statistics.mean(side.length for side in mine),
            unit="tokens",
            detail=detail("length"),
        ),
        Figure(
            name=f"{name}_startup",
            value=statistics.median(side.startup_s for side in mine),
            unit="s",
            detail=detail("startup_s"),
        ),
    ]  # fmt: skip


def prepare(workload: Workload, cache: Path, folder: Path) -> Course:
    """Questions, the file of them, and the model."""
    questions = draw_questions(workload, train=4000, held_out=400)
    rows = folder / f"{workload.name}.jsonl"
    write_rows(rows, questions.train)
    return Course(
        workload=workload, questions=questions, model=make_model(workload, questions, cache), rows=rows
    )


def main() -> None:
    options = parse()
    python = peer_python(options.cache)
    folder = Path(options.keep or tempfile.mkdtemp(prefix="bench_peer_")).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with Measurements("peer", options.turns) as measured:
            for name in options.workloads:
                course = prepare(WORKLOADS[name], options.cache, folder)
                before = score(course.model, course.questions.held_out)
                for algorithm in options.algorithms:
                    pairs, versions = take_turns(python, course, algorithm, options, folder, measured)
                    print("peer:", ", ".join(f"{name} {version}" for name, version in versions.items()))
                    measured.add(figures_of(course, algorithm, pairs, before))
    finally:
        if options.keep is None:
            shutil.rmtree(folder)


if __name__ == "__main__":
    main()
