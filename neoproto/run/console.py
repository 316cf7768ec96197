"""What a person sees: the placement, one line a step, the final table. The rest goes to the run folder."""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console, RenderableType
from rich.markup import escape
from rich.measure import Measurement
from rich.progress import Progress, ProgressColumn, Task, TaskID
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from neoproto.runtime.signals import Terminated

if TYPE_CHECKING:
    from neoproto.trainer.metrics.record import StepReport, TrainingResult

PLAIN_WIDTH = 120

log = logging.getLogger("neoproto.run")


class PipeConsole(Console):
    """Ends the run as SIGPIPE would where the reader of its output has gone (`… | head`)."""

    def on_broken_pipe(self) -> None:
        self.quiet = True
        with open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), sys.stdout.fileno())  # what is yet to be flushed goes there
        raise Terminated(signal.SIGPIPE)


class RunConsole:
    """Prints a run. On a terminal the step line is live; elsewhere each step is one plain line."""

    def __init__(self, console: Console | None = None, quiet: bool = False) -> None:
        # Into a file or pipe rich would fold tables at 80 columns; there is no window to fit there.
        width = None if sys.stdout is not None and sys.stdout.isatty() else PLAIN_WIDTH
        self.console = console or PipeConsole(highlight=False, soft_wrap=True, quiet=quiet, width=width)
        self._progress: Progress | None = None
        self._task: TaskID | None = None
        self._stages: dict[str, float] = {}

    def say(self, text: str) -> None:
        self.console.print(text, markup=False)

    def table(self, table: Table) -> None:
        for part in fitted(table, self.console):
            self.console.print(part, soft_wrap=isinstance(part, Table))

    @contextmanager
    def stage(self, text: str) -> Iterator[None]:
        """A piece around the training: a spinner on a terminal, one line elsewhere. Its seconds are kept."""
        start = time.perf_counter()
        with ExitStack() as stack:
            if self.console.is_terminal:
                stack.enter_context(self.console.status(text))
            else:
                self.say(f"{text} …")
            yield
        self._stages[text] = time.perf_counter() - start
        log.info("%s: %.1f s", text, self._stages[text])

    @contextmanager
    def steps(self, total: int) -> Iterator[None]:
        """Around the training loop: owns the live line."""
        if not self.console.is_terminal:
            yield
            return
        with Progress(LiveLine(self.console), console=self.console) as progress:
            self._progress, self._task = progress, progress.add_task("", total=total)
            try:
                yield
            finally:
                self._progress = self._task = None

    def step(self, report: StepReport) -> None:
        """Show one finished step."""
        if self._progress is not None and self._task is not None:
            self._progress.update(self._task, completed=report.step, report=report)
        else:
            text, left = step_line(report.metrics), clock_time(report.seconds_left)
            self.say(f"step {report.step}/{report.total_steps}  {text}  left {left}")

    def validation(self, step: int, metrics: Mapping[str, float]) -> None:
        scores = "  ".join(f"{short_name(name)} {value:.3f}" for name, value in core_scores(metrics).items())
        self.say(f"validation at step {step}: {scores}")

    def finish(self, result: TrainingResult, run_dir: Path, model_dir: Path) -> None:
        self.table(result_table(result, self._stages))
        self.say(f"run folder: {run_dir}")
        self.say(f"trained model: {model_dir}")


class LiveLine(ProgressColumn):
    """The live line of the steps, as much of it as the terminal is wide."""

    max_refresh = None

    def __init__(self, console: Console) -> None:
        super().__init__()
        self._console = console

    def render(self, task: Task) -> RenderableType:
        report: StepReport | None = task.fields.get("report")
        # One column stays free: a terminal that is made narrower would wrap a full line, and leave it behind.
        width = self._console.width - 1
        first, last = f"step {int(task.completed)}/{int(task.total or 0)}", ""
        kept = ["starting"]
        if report is not None:
            last = f"left {clock_time(report.seconds_left)}"
            parts = step_parts(report.metrics)
            for name in _FIRST_TO_GO:
                reserve = _LEAST_BAR + 2 if name in _BEFORE_THE_BAR else 0
                if len("  ".join([first, *parts.values(), last])) + reserve > width:
                    parts.pop(name, None)
            kept = [*parts.values()]
        text = "  ".join(filter(None, [*kept, last]))
        room = min(20, width - len(first) - len(text) - 4)
        line = Table.grid(padding=(0, 2, 0, 0), pad_edge=False)
        bar = (
            [ProgressBar(total=task.total, completed=task.completed, width=room)]
            if room >= _LEAST_BAR
            else []
        )
        line.add_row(Text(first, style="bold", no_wrap=True), *bar, Text(text, no_wrap=True, overflow="crop"))
        return line


_LEAST_BAR = 6
_BEFORE_THE_BAR = ("tok/s", "vf_loss", "pg_loss", "length")
_FIRST_TO_GO = (*_BEFORE_THE_BAR, "s/step", "score")
"""Parts of the live line, in the order in which they are left out where it is too long."""


def step_parts(metrics: Mapping[str, float]) -> dict[str, str]:
    """The metrics of one step as text, by name."""
    # With algorithm.truncated=mask a step may have no token to train on, and then no losses.
    trained = "actor/pg_loss" in metrics
    parts = {
        "score": f"score {metrics['critic/score/mean']:.3f}",
        "length": f"length {metrics['response_length/mean']:.1f}",
        "pg_loss": f"pg_loss {metrics['actor/pg_loss']:+.4f}" if trained else "nothing to train on",
    }
    if "critic/vf_loss" in metrics:
        parts["vf_loss"] = f"vf_loss {metrics['critic/vf_loss']:.4f}"
    parts["tok/s"] = f"{metrics['perf/throughput']:,.0f} tok/s"
    parts["s/step"] = f"{metrics['perf/time_per_step']:.2f} s/step"
    return parts


def step_line(metrics: Mapping[str, float]) -> str:
    """The metrics of one step in one line."""
    return "  ".join(step_parts(metrics).values())


def fitted(table: Table, console: Console) -> list[Table | Text]:
    """The table, in a form that is no wider than the console.

    Columns with the same value in every row become a line below it; if that is not enough, every row is a
    line of text, which may be wrapped.
    """

    def fits(one: Table) -> bool:
        return (
            Measurement.get(console, console.options.update(max_width=10_000), one).maximum <= console.width
        )

    below = [Text(str(table.caption))] if table.caption else []
    table.caption = None  # it would be as wide as it is long
    if fits(table):
        return [table, *below]
    columns = [[str(cell) for cell in column.cells] for column in table.columns]
    names = [str(column.header) for column in table.columns]
    rows = list(zip(*columns, strict=True))
    same = [len(rows) > 1 and len(set(column)) == 1 for column in columns]
    narrow = Table(title=table.title, title_justify=table.title_justify)
    for column, left_out in zip(table.columns, same, strict=True):
        if not left_out:
            narrow.add_column(column.header, justify=column.justify)
    for row, of in zip(rows, table.rows, strict=True):
        cells = [cell for cell, left_out in zip(row, same, strict=True) if not left_out]
        narrow.add_row(*cells, end_section=of.end_section)
    shared = [f"{name} {column[0]}" for name, column, one in zip(names, columns, same, strict=True) if one]
    if fits(narrow):
        said = [text for text in shared if not text.endswith(" ")]
        return [narrow, *([Text.from_markup(f"all: {', '.join(said)}")] if said else []), *below]
    lines: list[Table | Text] = [Text(f"{table.title}", style="bold")]
    for row in rows:
        rest = [f"{name} {cell}" for name, cell in zip(names[1:], row[1:], strict=True) if cell]
        lines.append(Text.from_markup(f"  {row[0].strip()}: {', '.join(rest)}"))
    return [*lines, *below]


def core_scores(metrics: Mapping[str, float]) -> dict[str, float]:
    return {name: value for name, value in metrics.items() if name.startswith("val-core/")}


def short_name(metric: str) -> str:
    return metric.removeprefix("val-core/").replace("/acc/", " ")


OVERLAP = "Phases overlap, and all but testing and save_checkpoint lie within step: they do not add up."


def result_table(result: TrainingResult, stages: Mapping[str, float]) -> Table:
    """Validation before and after, then steps, samples, tokens, seconds by phase and around the training."""
    table = Table(title="result", title_justify="left", caption=OVERLAP, caption_justify="left")
    table.add_column("metric")
    table.add_column("before", justify="right")
    table.add_column("after", justify="right")
    first, last = result.first_validation, result.last_validation
    for name in core_scores(last):
        before = f"{first[name]:.3f}" if name in first else "–"
        table.add_row(escape(f"{short_name(name)} accuracy"), before, f"{last[name]:.3f}")
    table.add_section()
    rows: dict[str, Any] = {
        "steps": f"{result.steps:,}",
        "samples": f"{result.samples:,}",
        "tokens": f"{result.tokens:,}",
        "training, seconds": f"{result.training_seconds:.1f}",
    }
    phases = sorted(result.seconds.items(), key=lambda item: -item[1])
    rows |= {f"  {name.removeprefix('timing_s/')}": f"{value:.1f}" for name, value in phases}
    for name, value in rows.items():
        table.add_row(name, "", value)
    table.add_section()
    for name, seconds in stages.items():
        table.add_row(f"{name.partition(' (')[0]}, seconds", "", f"{seconds:.1f}")
    return table


def clock_time(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
