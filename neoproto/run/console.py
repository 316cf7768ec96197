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
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table

from neoproto.runtime.signals import Terminated
from neoproto.trainer.record import StepReport, TrainingResult

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
        self.console.print(table)

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
        columns = [
            TextColumn("[bold]step[/bold]"),
            MofNCompleteColumn(),
            BarColumn(bar_width=20),
            TextColumn("{task.description}"),
            TextColumn("left"),
            TimeRemainingColumn(),
        ]
        with Progress(*columns, console=self.console) as progress:
            self._progress, self._task = progress, progress.add_task("starting", total=total)
            try:
                yield
            finally:
                self._progress = self._task = None

    def step(self, report: StepReport) -> None:
        """Show one finished step."""
        text = step_line(report.metrics)
        if self._progress is not None and self._task is not None:
            self._progress.update(self._task, completed=report.step, description=text)
        else:
            left = clock_time(report.seconds_left)
            self.say(f"step {report.step}/{report.total_steps}  {text}  left {left}")

    def validation(self, step: int, metrics: Mapping[str, float]) -> None:
        scores = "  ".join(f"{short_name(name)} {value:.3f}" for name, value in core_scores(metrics).items())
        self.say(f"validation at step {step}: {scores}")

    def finish(self, result: TrainingResult, run_dir: Path, model_dir: Path) -> None:
        self.table(result_table(result, self._stages))
        self.say(f"run folder: {run_dir}")
        self.say(f"trained model: {model_dir}")


def step_line(metrics: Mapping[str, float]) -> str:
    """The figures of one step in one line."""
    parts = [
        f"score {metrics['critic/score/mean']:.3f}",
        f"length {metrics['response_length/mean']:.1f}",
    ]
    # With algorithm.truncated=mask a step may have no token to train on, and then no losses.
    trained = "actor/pg_loss" in metrics
    parts.append(f"pg_loss {metrics['actor/pg_loss']:+.4f}" if trained else "nothing to train on")
    if "critic/vf_loss" in metrics:
        parts.append(f"vf_loss {metrics['critic/vf_loss']:.4f}")
    parts.append(f"{metrics['perf/throughput']:,.0f} tok/s")
    parts.append(f"{metrics['perf/time_per_step']:.2f} s/step")
    return "  ".join(parts)


def core_scores(metrics: Mapping[str, float]) -> dict[str, float]:
    return {name: value for name, value in metrics.items() if name.startswith("val-core/")}


def short_name(metric: str) -> str:
    return metric.removeprefix("val-core/").replace("/acc/", " ")


OVERLAP = "Phases overlap, and all but testing and save_checkpoint lie within step: they do not add up."


def result_table(result: TrainingResult, stages: Mapping[str, float]) -> Table:
    """Validation before and after, then steps, samples, tokens, seconds by phase and around the training."""
    table = Table(title="result", title_justify="left", caption=OVERLAP, caption_justify="left")
    table.add_column("figure")
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
        table.add_row(f"{name}, seconds", "", f"{seconds:.1f}")
    return table


def clock_time(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
