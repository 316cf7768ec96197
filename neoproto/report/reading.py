"""Run folders, read strictly: what is broken is said with its file and line.

One thing is forgiven, because it is how a killed run ends: a last line without its end.
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

from neoproto.errors import ConfigError

Curve = Mapping[int, float]
"""Step -> value, steps ascending. NaN where the run wrote null."""

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
        notes: what a reader should know of the folder (killed, no samples …).
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
        ConfigError: with a sentence for each folder that is none of a run, or holds something broken.
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
        ConfigError: it does not exist, is none of a run, or a file in it is broken.
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


def check_folder(folder: Path) -> None:
    """Raises ConfigError unless `folder` looks like one that a run made."""
    if not folder.exists():
        raise ConfigError(f"{folder}: no such folder")
    if not folder.is_dir():
        raise ConfigError(f"{folder}: wanted the folder of a run, got a file")
    missing = [name for name in ("config.yaml", "metrics.jsonl") if not (folder / name).is_file()]
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
    """A short name for each: the end of its path, as long as it takes to tell them apart.

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


def read_config(path: Path) -> Mapping[str, Any]:
    """Raises ConfigError: it cannot be read, or is no mapping."""
    try:
        tree = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        where = getattr(error, "problem_mark", None)
        raise ConfigError(f"{path}{f':{where.line + 1}' if where else ''}: not YAML") from error
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    if not isinstance(tree, dict):
        raise ConfigError(f"{path}: wanted a mapping, got {type(tree).__name__}")
    return tree


def read_metrics(path: Path, notes: list[str]) -> tuple[dict[str, dict[int, float]], dict[int, float]]:
    """Curves by metric, and when each step was written, in seconds since the first line.

    Where a step was logged twice (a run that was resumed), the later line counts.

    Raises:
        ConfigError: names the line that is broken.
    """
    curves: dict[str, dict[int, float]] = {}
    times: dict[int, float] = {}
    for where, row in json_rows(path, notes):
        step = row.pop("step", None)
        if not isinstance(step, int) or isinstance(step, bool) or step < 0:
            raise ConfigError(f"{where}: 'step' is {step!r}, wanted a number of steps")
        times[step] = _number(row.pop("time", math.nan), "time", where)
        for name, value in row.items():
            curves.setdefault(name, {})[step] = _number(value, name, where)
    first = min((time for time in times.values() if math.isfinite(time)), default=0.0)
    seconds = {step: times[step] - first for step in sorted(times)}
    return {name: dict(sorted(curve.items())) for name, curve in curves.items()}, seconds


def read_samples(folder: Path, notes: list[str]) -> tuple[Sample, ...]:
    """All validation answers; nothing where the folder is missing.

    Raises:
        ConfigError: names the line that is broken.
    """
    found = []
    for path in folder.glob("step_*.jsonl"):
        number = path.stem.removeprefix("step_")
        if number.isdigit():
            found.append((int(number), path))
    return tuple(_sample(row, where) for _, path in sorted(found) for where, row in json_rows(path, notes))


def json_rows(path: Path, notes: list[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each line's object, with `path:number`. A broken last line without an end is noted and left out.

    Raises:
        ConfigError: another line is broken, or the file cannot be read.
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
        except ValueError as error:
            if number == len(lines):
                notes.append(f"{path.name} ends in a cut line: the run was killed, or is writing it now")
                return
            raise ConfigError(f"{where}: not JSON ({error})") from error
        if not isinstance(row, dict):
            raise ConfigError(f"{where}: wanted a JSON object, got {type(row).__name__}")
        yield where, row


def _number(value: Any, name: str, where: str) -> float:
    if value is None:
        return math.nan
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ConfigError(f"{where}: {name!r} is {value!r}, wanted a number or null")
    return float(value)


def _sample(row: Mapping[str, Any], where: str) -> Sample:
    missing = [name for name in Sample.__dataclass_fields__ if name not in row]
    if missing:
        raise ConfigError(f"{where}: a sample without {', '.join(map(repr, missing))}")
    texts = ("label", "uid", "data_source", "prompt", "answer", "ground_truth")
    step = row["step"]
    if not isinstance(step, int):
        raise ConfigError(f"{where}: 'step' is {step!r}, wanted a number of steps")
    return Sample(
        step=step,
        score=_number(row["score"], "score", where),
        accuracy=_number(row["accuracy"], "accuracy", where),
        **{name: str(row[name]) for name in texts},
    )
