"""What happened when, in every process of a run, as one file that Chrome and Perfetto draw.

    controller, workers ── span("load weights") ──> RUN_DIR/trace/<group>-rank<k>.jsonl   while the run runs
                                                          │ merge: one lane a process
                                                          └──> RUN_DIR/trace.json         at its end

A process writes its own file, a line an event, flushed at once: what a killed run did can be merged later.
Times are those of a monotonic clock, anchored to the wall clock when the file is opened: processes of one
machine agree to well below a millisecond, and no step of the clock reorders events.

Off, a span costs a call and one comparison.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from neoproto.files import replace_file

FOLDER_VARIABLE = "NEOPROTO_TRACE"
"""In the environment of workers: where they write. Not set = no trace."""
PARTS, MERGED = "trace", "trace.json"
MOST_US = 1e18
"""A greater time (30,000 years) is damage, and so is one that is not a number."""

_NOTHING: AbstractContextManager[None] = nullcontext()
_writer: TraceWriter | None = None


class TraceWriter:
    """The events of one process, or of one lane of a test.

    Args:
        folder: of the parts; made if it is not there.
        lane: what the process is called, e.g. `rollout-rank0`; names its file.

    Raises:
        OSError: the file cannot be written.
    """

    def __init__(self, folder: Path, lane: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._anchor = time.time_ns() - time.perf_counter_ns()
        self._lock = threading.Lock()
        self._file: IO[str] | None = (folder / f"{lane}.jsonl").open("a", encoding="utf-8")
        self._write({"lane": lane, "pid": os.getpid(), "host": socket.gethostname()})

    @contextmanager
    def span(self, name: str, kind: str, **details: Any) -> Iterator[None]:
        """An event from here to the end of the block, also if that ends by an error."""
        start = time.perf_counter_ns()
        try:
            yield
        finally:
            self.add(name, kind, start, **details)

    def add(self, name: str, kind: str, start_ns: int, **details: Any) -> None:
        """An event from `start_ns` (of `time.perf_counter_ns`) to now."""
        event: dict[str, Any] = {
            "name": name,
            "cat": kind,
            "ts": (self._anchor + start_ns) / 1e3,
            "dur": (time.perf_counter_ns() - start_ns) / 1e3,
        }
        self._write(event | ({"args": details} if details else {}))

    def close(self) -> None:
        """Later events are lost."""
        with self._lock:
            if self._file is not None:
                self._file.close()
            self._file = None

    def _write(self, row: dict[str, Any]) -> None:
        line = json.dumps(row, default=str) + "\n"
        with self._lock:
            if self._file is not None:
                self._file.write(line)
                self._file.flush()


def open_process(lane: str, folder: Path | None = None) -> None:
    """Trace this process from now on, where a trace is wanted.

    Args:
        folder: of the parts; None takes that of the environment, and does nothing without one.
    """
    global _writer
    named = os.environ.get(FOLDER_VARIABLE)
    if folder is None and not named:
        return
    close_process()
    _writer = TraceWriter(folder or Path(str(named)), lane)


def close_process() -> None:
    """Trace this process no more."""
    global _writer
    if _writer is not None:
        _writer.close()
    _writer = None


def span(name: str, kind: str, **details: Any) -> AbstractContextManager[None]:
    """An event of this process from here to the end of the block.

    Args:
        kind: `phase` and `wait` of the controller, `call` of a worker, `weights` of a replica.
        details: shown with it.
    """
    return _NOTHING if _writer is None else _writer.span(name, kind, **details)


def since(name: str, kind: str, start_s: float, **details: Any) -> None:
    """An event of this process from `start_s` (of `time.perf_counter`) to now."""
    if _writer is not None:
        _writer.add(name, kind, int(start_s * 1e9), **details)


@dataclass(frozen=True, kw_only=True, slots=True)
class MergedTrace:
    """What merging found: numbers of lanes and events, and where they are now."""

    path: Path
    lanes: int
    events: int


def merge_parts(run_dir: Path, damage: list[str] | None = None) -> MergedTrace | None:
    """Write `trace.json` from the parts of a run folder; None without parts.

    A part's last line may be cut. Several processes of one lane, one after the other, are one lane.

    Args:
        damage: called with each broken line, which is left out then.

    Raises:
        OSError: a part cannot be read, or the whole cannot be written.
        ValueError: a part is broken, and `damage` is None; names its line.
    """
    parts = sorted((run_dir / PARTS).glob("*.jsonl"), key=lambda path: (path.stem != "controller", path.stem))
    if not parts:
        return None
    rows: list[dict[str, Any]] = []
    count = 0
    for number, path in enumerate(parts, start=1):
        lines, events = read_part(path, damage)
        count += len(events)
        name = f"{path.stem} (pid {', '.join(str(line.get('pid')) for line in lines)})"
        rows.append({"ph": "M", "name": "process_name", "pid": number, "tid": 0, "args": {"name": name}})
        rows.append(
            {"ph": "M", "name": "process_sort_index", "pid": number, "tid": 0, "args": {"sort_index": number}}
        )
        rows += ({"ph": "X", "pid": number, "tid": thread, **event} for thread, event in threads_of(events))
    path = run_dir / MERGED
    replace_file(path, json.dumps({"displayTimeUnit": "ms", "traceEvents": rows}).encode())
    return MergedTrace(path=path, lanes=len(parts), events=count)


def read_part(
    path: Path, damage: list[str] | None = None
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """A part's opening lines (one a process) and its events; a cut last line is left out.

    Raises:
        ValueError: another line is broken, and there is no `damage` to tell of it.
    """
    openings: list[dict[str, Any]] = []
    events: list[dict[str, Any]] = []
    lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    for number, line in enumerate(lines, start=1):
        if not line:
            continue
        try:
            row = json.loads(line)
            problem = _problem(row)
        except (ValueError, RecursionError) as error:
            if number == len(lines):
                break
            problem = f"not JSON ({error})"
        if problem is None:
            (openings if "lane" in row else events).append(row)
        elif damage is None:
            raise ValueError(f"{path}:{number}: {problem}")
        else:
            damage.append(f"{path}:{number}: {problem}")
    return openings, events


def _problem(row: Any) -> str | None:
    """Why a line is neither an opening nor an event, in words."""
    if not isinstance(row, dict):
        return f"wanted a JSON object, got {type(row).__name__}"
    times = () if "lane" in row else ("ts", "dur")
    wrong = [
        name for name in times if type(row.get(name)) not in (int, float) or not abs(row[name]) < MOST_US
    ]
    return f"an event without a time in {' and '.join(wrong)}" if wrong else None


def threads_of(events: Iterable[dict[str, Any]]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Spread events of a lane over as many threads as it takes: in one, they follow or contain each other.

    The format draws events of one thread as a stack of calls; others that overlap need a thread each.
    """
    open_ends: list[list[float]] = []
    for event in sorted(events, key=lambda one: (one["ts"], -one["dur"])):
        start, end = event["ts"], event["ts"] + event["dur"]
        for ends in open_ends:
            while ends and ends[-1] <= start:
                ends.pop()
        fits = next((n for n, ends in enumerate(open_ends) if not ends or end <= ends[-1]), None)
        if fits is None:
            fits = len(open_ends)
            open_ends.append([])
        open_ends[fits].append(end)
        yield fits, event
