"""`services.json` of a run folder: which run each service has for it, and what every start superseded.

resume, restart ─> begin ─> RunStart (noted here) ─> every service: same run, values marked
                     ▲
metrics.jsonl ───────┘ how far the start before came
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from neoproto.errors import ConfigError
from neoproto.files import named_errors, replace_file
from neoproto.trainer.checkpoint.history import METRICS

SERVICE_RUNS = "services.json"
TAIL_BYTES = 1 << 20
"""Of `metrics.jsonl`, read to find its last step: many lines of it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunStart:
    """One start of a run: the first, a resume or a restart.

    Attributes:
        start: its number, from 1.
        step: the step it resumes from; 0 at the beginning.
        time: Unix seconds.
        first, last: the steps that the starts before it had logged and that are taken again, both included;
            None if there are none.
    """

    start: int
    step: int
    time: float
    first: int | None = None
    last: int | None = None

    @property
    def superseded(self) -> int:
        """How many steps are taken again."""
        return 0 if self.first is None or self.last is None else self.last - self.first + 1


class ServiceRuns:
    """The content of `services.json` of a run folder; every change is written at once.

    Raises:
        ConfigError: the file is there and damaged.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / SERVICE_RUNS
        self._runs: dict[str, dict[str, str]] = {}
        self.starts: list[RunStart] = []
        if self.exists:
            self._read()

    @property
    def exists(self) -> bool:
        return self.path.exists()

    def of(self, service: str) -> Mapping[str, str]:
        """What was kept of the run of a service; empty if it has none."""
        return self._runs.get(service, {})

    def keep(self, service: str, run: Mapping[str, str]) -> None:
        """Record the run of a service."""
        if self._runs.get(service) != run:
            self._runs[service] = dict(run)
            self._write()

    def begin(self, step: int) -> None:
        """Note a start of the run that resumes from `step`. To be called before `metrics.jsonl` is cut."""
        first = step + 1 if step else 0  # from the beginning, the validation of step 0 is repeated too
        last = last_logged_step(self.path.with_name(METRICS))
        # What was logged before there was a service is in none.
        again = bool(self.starts) and last is not None and last >= first
        self.starts.append(
            RunStart(
                start=len(self.starts) + 1,
                step=step,
                time=round(time.time(), 3),
                first=first if again else None,
                last=last if again else None,
            )
        )
        self._write()

    def _write(self) -> None:
        tree = {"runs": self._runs, "starts": [asdict(start) for start in self.starts]}
        replace_file(self.path, (json.dumps(tree, indent=1) + "\n").encode(), synced=True)

    def _read(self) -> None:
        try:
            tree = json.loads(self.path.read_bytes())
            self._runs = {
                str(name): {str(key): str(value) for key, value in run.items()}
                for name, run in tree["runs"].items()
            }
            self.starts = [_checked(RunStart(**start)) for start in tree["starts"]]
        except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise ConfigError(
                f"{self.path}: cannot be read as what a run wrote ({type(error).__name__}: {error}); "
                "without this file the services begin new runs"
            ) from error


def _checked(start: RunStart) -> RunStart:
    numbers = [start.start, start.step, start.time, start.first or 0, start.last or 0]
    if any(isinstance(number, bool) or not isinstance(number, int | float) for number in numbers):
        raise ValueError(f"a start is {asdict(start)}")
    return start


def last_logged_step(path: Path) -> int | None:
    """The highest step near the end of `metrics.jsonl`; None without any."""
    if not path.exists():
        return None
    with named_errors(path), path.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES))
        lines = file.read().splitlines()
    steps = [step for line in lines if (step := _step(line)) is not None]
    return max(steps, default=None)


def _step(line: bytes) -> int | None:
    """None of a line that was cut, by the kill of a run or by where reading began."""
    try:
        row: Any = json.loads(line)
    except (ValueError, RecursionError):
        return None
    step = row.get("step") if isinstance(row, dict) else None
    return step if isinstance(step, int) and not isinstance(step, bool) else None
