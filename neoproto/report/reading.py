"""Run folders, read so that a damaged one still makes a page.

    config.yaml ──────> plain containers           broken: the folder is refused
    metrics.jsonl ─┬──> curves, seconds            a broken line or value: left out, with a note
    validation/ ───┴──> samples

A note names file and line. A last line without its end has one of its own: it is how a killed run ends.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from neoproto.config.saved import read
from neoproto.errors import ConfigError
from neoproto.text import first_line, shown

Curve = Mapping[int, float]
"""Step -> value, steps ascending. NaN where the run wrote null."""

RUN_FILES = ("config.yaml", "metrics.jsonl")
"""What every run that trains leaves in its folder."""
MOST_STEPS = 10**15
"""A greater number of a step is damage: a browser cannot distinguish it from the next one."""
MOST_VALUES, MOST_LEVELS, MOST_DIGITS = 100_000, 50, 300
"""Of a configuration. A small file whose parts refer to each other can describe a tree without end."""

_TIMESTAMP = re.compile(r"\d{4}-\d\d-\d\d_\d\d-\d\d-\d\d(_\d+)?")


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """One validation answer, as `validation/step_N.jsonl` has it."""

    step: int
    label: str
    uid: str
    data_source: str
    prompt: str
    answer: str
    ground_truth: str
    score: float
    accuracy: float


@dataclass(frozen=True, kw_only=True, slots=True)
class RunData:
    """What a run left in its folder.

    Attributes:
        name: how the page calls it; unique among the runs of the page.
        config: the resolved configuration, as plain containers.
        curves: by metric name; `step` and `time` of the file are not among them.
        seconds: step -> when its line was written, in seconds since the first line.
        samples: validation answers, in the order of their steps.
        complete: it trained to its end and wrote the model.
        notes: remarks on the folder (killed, no samples …).
    """

    name: str
    folder: Path
    config: Mapping[str, Any]
    curves: Mapping[str, Curve]
    seconds: Curve
    samples: tuple[Sample, ...]
    complete: bool
    notes: tuple[str, ...]

    @property
    def last_step(self) -> int:
        """The newest step that has metrics; 0 without any."""
        return max(self.seconds, default=0)


def read_runs(folders: Sequence[Path]) -> list[RunData]:
    """Read run folders, in the order given.

    Raises:
        ConfigError: with a sentence for each folder that is none of a run, or cannot be read.
    """
    problems: list[str] = []
    runs: list[RunData] = []
    for folder, name in zip(folders, run_names(folders), strict=True):
        try:
            runs.append(read_run(folder, name))
        except ConfigError as error:
            problems += error.problems
    if problems:
        raise ConfigError(*problems)
    return runs


def read_run(folder: Path, name: str) -> RunData:
    """Read one run folder.

    Raises:
        ConfigError: it does not exist, is none of a run, its configuration is broken, or its metrics cannot
            be read.
    """
    check_folder(folder)
    config = read_config(folder / "config.yaml")
    notes: list[str] = []
    curves, seconds = read_metrics(folder / "metrics.jsonl", notes)
    samples = read_samples(folder / "validation", notes)
    if not samples and any(name.startswith("val-") for name in curves):
        notes.append("validation/ has no samples, although the run validated")
    return RunData(
        name=name,
        folder=folder,
        config=config,
        curves=curves,
        seconds=seconds,
        samples=samples,
        complete=is_complete(folder, config, max(seconds, default=0)),
        notes=tuple(notes),
    )


def check_folder(folder: Path, wanted: Sequence[str] = RUN_FILES) -> None:
    """Raises ConfigError unless `folder` looks like one that a run made: it has the files that are wanted."""
    try:
        there, is_folder = folder.exists(), folder.is_dir()
        missing = [name for name in wanted if not (folder / name).is_file()]
    except OSError as error:
        raise ConfigError(f"{folder}: cannot be read: {error.strerror}") from error
    if not there:
        raise ConfigError(f"{folder}: no such folder")
    if not is_folder:
        raise ConfigError(f"{folder}: wanted the folder of a run, got a file")
    if missing:
        raise ConfigError(
            f"{folder}: not the folder of a run that trains: it has no {' and no '.join(missing)}"
        )


def is_complete(folder: Path, config: Mapping[str, Any], last_step: int) -> bool:
    """Whether the model was written and no step is missing: a run that trains on still has an older model."""
    trainer = config.get("trainer")
    wanted = trainer.get("total_training_steps") if isinstance(trainer, dict) else None
    missing = isinstance(wanted, int) and last_step < wanted
    return (folder / "model" / "config.json").is_file() and not missing


def run_names(folders: Sequence[Path]) -> list[str]:
    """A short name for each: the end of its path, as long as needed to distinguish them.

    A folder named by time says little, so that its experiment stands before it.
    """
    absolute = [folder.absolute() for folder in folders]
    for length in range(1, 1 + max((len(path.parts) for path in absolute), default=1)):
        names = [
            "/".join(path.parts[-(length + bool(_TIMESTAMP.fullmatch(path.name))) :]) for path in absolute
        ]
        if len(set(names)) == len(names):
            return names
    return [f"{path.name} ({number})" for number, path in enumerate(absolute, start=1)]


def read_config(path: Path) -> dict[str, Any]:
    """The file as plain containers with texts as keys, escaped texts as they were in the run.

    Raises:
        ConfigError: it cannot be read, is not YAML or no mapping, or has no end.
    """
    try:
        tree = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    except (
        Exception
    ) as error:  # PyYAML raises what its constructors happen to meet: `!!timestamp x`, `!!bool x`
        where = getattr(error, "problem_mark", None)
        reason = getattr(error, "problem", None) or first_line(error)
        raise ConfigError(f"{path}{f':{where.line + 1}' if where else ''}: not YAML ({reason})") from error
    if not isinstance(tree, dict):
        raise ConfigError(f"{path}: wanted a mapping, got {type(tree).__name__}")
    try:
        plain: dict[str, Any] = read(plain_tree(tree))
    except ValueError as error:
        raise ConfigError(f"{path}: {error}") from error
    return plain


def plain_tree(tree: Any) -> Any:
    """A copy with mappings, lists and what JSON has only: of other values (a date) the text.

    Raises:
        ValueError: more values, levels or digits than any configuration has; or it holds itself.
    """
    count = 0

    def copied(value: Any, path: tuple[str, ...]) -> Any:
        nonlocal count
        count += 1
        if count > MOST_VALUES:
            raise ValueError(f"it has more than {MOST_VALUES:,} values")
        if len(path) > MOST_LEVELS:
            raise ValueError(f"{path[0]} holds itself, or has more than {MOST_LEVELS} levels")
        if isinstance(value, dict):
            names = {str(copied(key, path)): one for key, one in value.items()}
            return {name: copied(one, (*path, name)) for name, one in names.items()}
        if isinstance(value, list | tuple | set):
            return [copied(one, (*path, str(number))) for number, one in enumerate(value)]
        if isinstance(value, int) and abs(value) >= 10**MOST_DIGITS:
            raise ValueError(f"{'.'.join(path) or 'a key'} is a number of more than {MOST_DIGITS} digits")
        return value if value is None or isinstance(value, str | int | float) else str(value)

    return copied(tree, ())


def read_metrics(path: Path, notes: list[str]) -> tuple[dict[str, dict[int, float]], dict[int, float]]:
    """Curves by metric, and when each step was written, in seconds since the first line.

    Where a step was logged twice (a run that was resumed), the later line counts.

    Raises:
        ConfigError: the file cannot be read.
    """
    curves: dict[str, dict[int, float]] = {}
    times: dict[int, float] = {}
    damage: list[str] = []
    for where, row in json_rows(path, notes, damage):
        try:
            step = _step(row.pop("step", None))
        except ValueError as error:
            damage.append(f"{where}: {error}")
            continue
        times.setdefault(step, math.nan)
        for name, value in row.items():
            try:
                number = _number(value, name)
            except ValueError as error:
                damage.append(f"{where}: {error}")
                continue
            (times if name == "time" else curves.setdefault(name, {}))[step] = number
    notes += note_of(damage)
    first = min((time for time in times.values() if math.isfinite(time)), default=0.0)
    seconds = {step: times[step] - first for step in sorted(times)}
    return {name: dict(sorted(curve.items())) for name, curve in curves.items()}, seconds


def read_samples(folder: Path, notes: list[str]) -> tuple[Sample, ...]:
    """All validation answers but those whose line is damaged; nothing where the folder is missing."""
    found = []
    for path in folder.glob("step_*.jsonl"):
        number = path.stem.removeprefix("step_")
        if number.isdecimal():
            found.append((int(number), path))
    samples: list[Sample] = []
    damage: list[str] = []
    for _, path in sorted(found):
        try:
            for where, row in json_rows(path, notes, damage):
                try:
                    samples.append(_sample(row))
                except ValueError as error:
                    damage.append(f"{where}: {error}")
        except ConfigError as error:
            damage += error.problems
    notes += note_of(damage)
    return tuple(samples)


def note_of(damage: Sequence[str]) -> list[str]:
    """One note on all that was left out: the first case, and how many more there are; none without any."""
    more = f" (and {len(damage) - 1:,} more)" if len(damage) > 1 else ""
    return [f"left out: {damage[0]}{more}"] if damage else []


def json_rows(path: Path, notes: list[str], damage: list[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each line's object, with `path:number`.

    Args:
        notes: gets a broken last line without an end.
        damage: gets the other lines that are left out.

    Raises:
        ConfigError: the file cannot be read.
    """
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            if number == len(lines):
                notes.append(f"{path.name} ends in a cut line: the run was killed, or is writing it now")
            else:
                damage.append(f"{where}: not JSON ({error})")
            continue
        if isinstance(row, dict):
            yield where, row
        else:
            damage.append(f"{where}: wanted a JSON object, got {type(row).__name__}")


def _step(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < MOST_STEPS:
        raise ValueError(f"'step' is {shown(value)}, wanted a number of steps")
    return value


def _number(value: Any, name: str) -> float:
    if value is None:
        return math.nan
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{name!r} is {shown(value)}, wanted a number or null")
    try:
        return float(value)
    except OverflowError:
        raise ValueError(f"{name!r} is {shown(value)}, which no float holds") from None


def _sample(row: Mapping[str, Any]) -> Sample:
    missing = [name for name in Sample.__dataclass_fields__ if name not in row]
    if missing:
        raise ValueError(f"a sample without {', '.join(map(repr, missing))}")
    texts = ("label", "uid", "data_source", "prompt", "answer", "ground_truth")
    return Sample(
        step=_step(row["step"]),
        score=_number(row["score"], "score"),
        accuracy=_number(row["accuracy"], "accuracy"),
        **{name: str(row[name]) for name in texts},
    )
