"""What a person sees, on a terminal and elsewhere."""

from __future__ import annotations

import dataclasses
import io
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console
from rich.table import Table

from neoproto.run.console import OVERLAP, RunConsole, clock_time, result_table, step_line
from neoproto.trainer.metrics.record import StepReport, TrainingResult

METRICS = {
    "critic/score/mean": 0.41234,
    "response_length/mean": 5.25,
    "actor/pg_loss": -0.012345,
    "perf/throughput": 12345.6,
    "perf/time_per_step": 0.5,
}
RESULT = TrainingResult(
    steps=80,
    samples=20480,
    tokens=1234567,
    training_seconds=61.26,
    seconds={"timing_s/gen": 10.0, "timing_s/update_actor": 30.04},
    first_validation={"val-core/words/acc/greedy": 0.5},
    last_validation={"val-core/words/acc/greedy": 0.9, "val-core/words/acc/mean@1": 0.75},
)


def plain() -> tuple[RunConsole, io.StringIO]:
    text = io.StringIO()
    return RunConsole(Console(file=text, width=120, soft_wrap=True, highlight=False)), text


def terminal() -> tuple[RunConsole, io.StringIO]:
    text = io.StringIO()
    return RunConsole(Console(file=text, width=120, force_terminal=True, highlight=False)), text


def report(step: int = 3) -> StepReport:
    return StepReport(step=step, total_steps=80, seconds_left=75.4, metrics=METRICS)


def test_a_step_is_one_line_with_score_lengths_speed_and_time_left() -> None:
    console, text = plain()
    with console.steps(80):
        console.step(report())
    assert text.getvalue() == (
        "step 3/80  score 0.412  length 5.2  pg_loss -0.0123  12,346 tok/s  0.50 s/step  left 1:15\n"
    )


def test_the_critics_loss_is_shown_where_there_is_a_critic() -> None:
    assert "pg_loss -0.0123  vf_loss 0.2500  " in step_line(METRICS | {"critic/vf_loss": 0.25})
    assert "vf_loss" not in step_line(METRICS)


def test_a_step_that_trained_on_nothing_says_so() -> None:
    masked = {name: value for name, value in METRICS.items() if name != "actor/pg_loss"}
    assert "length 5.2  nothing to train on  12,346 tok/s" in step_line(masked)


def test_on_a_terminal_the_steps_share_one_live_line() -> None:
    console, text = terminal()
    with console.steps(80):
        for step in (1, 2, 3):
            console.step(report(step))
    shown = text.getvalue()
    assert "step 3/80" in shown
    assert "score 0.412" in shown
    assert "step 3/80  score" not in shown, "a bar is between them"
    console.step(report())  # outside, there is no live line any more
    assert "step 3/80  score" in text.getvalue()


@pytest.mark.parametrize(
    ("width", "parts"),
    [
        (80, ("step 40/80  ━", "score 0.412  length 5.2", "0.50 s/step  left 1:15")),
        (40, ("step 40/80  score 0.412", "left 1:15")),
    ],
)
def test_the_live_line_keeps_step_score_and_time_left(width: int, parts: tuple[str, ...]) -> None:
    text = io.StringIO()
    made = Console(file=text, width=width, force_terminal=True, color_system=None, highlight=False)
    console = RunConsole(made)
    with console.steps(80):
        console.step(dataclasses.replace(report(40), metrics=METRICS | {"critic/vf_loss": 0.25}))
    line = text.getvalue().split("\x1b[2K")[-1].splitlines()[0].rstrip()
    assert len(line) < width
    assert all(part in line for part in parts)


@pytest.mark.parametrize("width", [80, 40])
def test_tables_are_no_wider_than_the_terminal_and_lose_no_word(width: int) -> None:
    table = Table(title="Topology")
    names = ("model", "worker", "cluster", "pool", "nodes", "devices", "ranks", "device", "colocated with")
    for name in names:
        table.add_column(name)
    table.add_row("actor", "actor", "default", "train", "0", "0", "1", "cpu", "rollout, critic")
    table.add_row("rollout", "rollout", "default", "train", "0", "0", "1", "cpu", "actor, critic")
    for one in (table, result_table(RESULT, {"preparing the model (made once)": 3.0})):
        text = io.StringIO()
        RunConsole(Console(file=text, width=width, soft_wrap=True, highlight=False)).table(one)
        lines = text.getvalue().splitlines()
        assert max(map(len, lines)) <= width
        said = " ".join(text.getvalue().replace("│", " ").split())
        words = [word for column in one.columns for cell in column.cells for word in str(cell).split()]
        assert all(word in said for word in words)


def test_a_table_of_one_row_becomes_a_line() -> None:
    table = Table(title="Topology")
    for name in ("model", "pool"):
        table.add_column(name)
    table.add_row("rollout " * 8, "[0]")
    text = io.StringIO()
    RunConsole(Console(file=text, width=60, soft_wrap=True, highlight=False)).table(table)
    assert "pool [0]" in " ".join(text.getvalue().split())


def test_stages_are_lines_where_there_is_no_terminal() -> None:
    console, text = plain()
    with console.stage("starting workers"):
        assert text.getvalue() == "starting workers …\n"


def test_validation_is_one_line() -> None:
    console, text = plain()
    console.validation(0, RESULT.last_validation | {"timing_s/testing": 3.0})
    assert text.getvalue() == "validation at step 0: words greedy 0.900  words mean@1 0.750\n"


def test_the_final_table_says_before_and_after_steps_tokens_and_seconds_by_phase() -> None:
    console, text = plain()
    with console.stage("starting workers"):
        pass
    console.finish(RESULT, Path("/runs/x"), Path("/runs/x/model"))
    rows = [[cell.strip() for cell in line.strip("│").split("│")] for line in text.getvalue().splitlines()]
    for row in (
        ["words greedy accuracy", "0.500", "0.900"],
        ["words mean@1 accuracy", "–", "0.750"],
        ["steps", "", "80"],
        ["samples", "", "20,480"],
        ["tokens", "", "1,234,567"],
        ["training, seconds", "", "61.3"],
        ["starting workers, seconds", "", "0.0"],
    ):
        assert row in rows
    phases = [row[0] for row in rows if row[0] in ("gen", "update_actor")]
    assert phases == ["update_actor", "gen"], "the longest first"
    assert OVERLAP in " ".join(" ".join(row) for row in rows).replace("  ", " ")
    assert text.getvalue().endswith("run folder: /runs/x\ntrained model: /runs/x/model\n")


def test_a_run_without_validation_has_a_table_too() -> None:
    empty = TrainingResult(
        steps=1, samples=1, tokens=1, training_seconds=1, seconds={}, first_validation={}, last_validation={}
    )
    assert result_table(empty, {}).row_count == 4


@pytest.mark.parametrize("make", [plain, terminal])
def test_square_brackets_in_a_path_are_no_markup(make: type) -> None:
    console, text = make()
    console.say("run folder: /runs/[bold]x[/bold]/[0]")
    console.finish(RESULT, Path("/runs/[red]x"), Path("/runs/[red]x/model"))
    for path in ("/runs/[bold]x[/bold]/[0]", "/runs/[red]x", "/runs/[red]x/model"):
        assert path in text.getvalue()


def test_square_brackets_in_a_data_source_are_no_markup() -> None:
    console, text = plain()
    scores = {"val-core/[bold]/acc/greedy": 0.5}
    console.validation(1, scores)
    console.finish(dataclasses.replace(RESULT, last_validation=scores), Path("a"), Path("b"))
    assert text.getvalue().count("[bold] greedy") == 2


def test_a_long_line_is_not_folded_where_there_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    """So that a path can be copied from a log."""
    path = "/runs/" + "x" * 300
    RunConsole().say(path)
    assert capsys.readouterr().out == f"{path}\n"


def test_a_table_keeps_its_words_where_there_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    table = Table()
    for number in range(9):
        table.add_column(f"column {number}")
    table.add_row(*(f"default {number}" for number in range(9)))
    RunConsole().table(table)
    shown = capsys.readouterr().out
    assert all(f"default {number}" in shown for number in range(9))


def test_a_quiet_console_says_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    console = RunConsole(quiet=True)
    with console.stage("starting"), console.steps(80):
        console.step(report())
    console.finish(RESULT, Path("a"), Path("b"))
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("seconds", "shown"), [(0, "0:00"), (59.6, "1:00"), (75, "1:15"), (3599, "59:59"), (3661, "1:01:01")]
)
def test_time_is_shown_as_on_a_clock(seconds: float, shown: str) -> None:
    assert clock_time(seconds) == shown


PIPED = """
import sys
from neoproto.run.console import RunConsole

console = RunConsole()
console.say("one")
sys.stdin.readline()
console.say("two")
"""


def test_a_reader_that_goes_ends_the_run_as_a_signal_would() -> None:
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", PIPED], stdin=pipe, stdout=pipe, stderr=pipe) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline() == b"one\n"
        process.stdout.close()
        process.stdin.write(b"\n")
        process.stdin.close()
        assert process.wait(60) == 128 + 13
        assert process.stderr.read() == b""
