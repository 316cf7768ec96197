"""`scripts/chaos`: a series of runs with a fault each, a table at the end, and JSON for those who compare."""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NoReturn

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from tests.chaos.harness import QUIET_S, Result, play
from tests.chaos.plan import KINDS, MODES, draw
from tests.chaos.verdict import CAUSE_S, GONE_S, OPEN, PASSED

PLAIN_WIDTH = 200
EPILOG = f"""\
Each run is `python -m neoproto.run --config-name ppo_monarch +smoke=tiny` in a fresh process, with one fault
at a moment drawn by the seed: the same seed, runs, modes and kinds give the same faults and moments again.

kinds: {", ".join(KINDS)}

verdicts:
  survived              it went on to its end
  ended with its cause  at most {CAUSE_S:.0f} s after the fault, with one line that names the cause
  HANG                  it printed nothing for --quiet seconds after the fault, and was ended from outside
  LEFTOVER              {GONE_S:.0f} s after its end there are processes, shared memory, sockets, files of it
  WRONG VERSION         it trained on samples of weights that the mode does not allow, or a sample's log-probs
                        are not those of the weights it names, computed again from that step's checkpoint
  LATE                  it ended with its cause, but later than that
  UNCLEAR               the exit code is another one, or its last line does not name the cause
  GAVE UP               it ended by a fault that every run has to survive
  over before the fault, not possible here: say nothing; full-shm and full-disk need mount namespaces

The exit code is 0 if no run has a verdict in capitals, 1 if one has, 2 if the arguments are wrong. Folders of
runs that went wrong are kept in any case.
"""


def parser() -> argparse.ArgumentParser:
    """The command line."""
    arguments = argparse.ArgumentParser(
        prog="scripts/chaos",
        description="Break training runs in many ways, and see that each goes on or ends well.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    arguments.add_argument("--runs", type=int, default=20, help="how many (%(default)s)")
    arguments.add_argument("--seed", type=int, default=1, help="of kinds, moments and modes (%(default)s)")
    arguments.add_argument("--mode", action="append", choices=MODES, help="only this mode; may be repeated")
    arguments.add_argument(
        "--kind", action="append", choices=list(KINDS), metavar="KIND", help="only this kind; may be repeated"
    )
    arguments.add_argument(
        "--first", type=int, default=0, metavar="I", help="leave out those before this one of the series"
    )
    arguments.add_argument("--json", type=Path, metavar="FILE", help="write all results there as well")
    arguments.add_argument("--keep", type=Path, metavar="DIR", help="keep the folders of all runs there")
    arguments.add_argument(
        "--quiet", type=float, default=QUIET_S, help="seconds without a line that are a hang (%(default)g)"
    )
    arguments.add_argument("overrides", nargs="*", metavar="key=value", help="given to every run")
    return arguments


def main(argv: Sequence[str]) -> int:
    """Run the series; returns the exit code."""
    options = parser().parse_intermixed_args(argv)
    if options.runs < 1:
        parser().error(f"--runs is at least 1, got {options.runs}")
    if not 0 <= options.first < options.runs:
        parser().error(
            f"--first is one of the {options.runs} runs, 0 to {options.runs - 1}; got {options.first}"
        )
    plans = draw(options.runs, options.seed, options.mode or MODES, options.kind)[options.first :]
    folder = options.keep or Path(tempfile.mkdtemp(prefix="neoproto-chaos-"))
    folder.mkdir(parents=True, exist_ok=True)
    width = None if sys.stdout.isatty() else PLAIN_WIDTH
    console = Console(highlight=False, soft_wrap=True, width=width)
    results: list[Result] = []
    before = signal.signal(signal.SIGTERM, leave)  # the run that goes on must not be left behind
    try:
        for plan in plans:
            name = f"{options.seed}-{plan.index:03d}-{plan.mode}-{plan.kind}"
            result = play(
                plan,
                folder / name,
                keep=options.keep is not None,
                overrides=options.overrides,
                quiet_s=options.quiet,
            )
            results.append(result)
            console.print(line(result), markup=False)
            if options.json is not None:  # after every run: a series that is cut short is not lost
                options.json.write_text(json.dumps(as_json(options.seed, results), indent=1) + "\n")
    except KeyboardInterrupt:
        return 130
    finally:
        signal.signal(signal.SIGTERM, before)
        console.print(table(results))
        if not any(folder.iterdir()):
            folder.rmdir()
        else:
            console.print(f"folders: {folder}", markup=False)
    console.print(summary(results), markup=False)
    return exit_code(results)


def leave(signum: int, _: object) -> NoReturn:
    """Leave by a signal the way an exception does."""
    raise SystemExit(128 + signum)


def exit_code(results: Sequence[Result]) -> int:
    """0 if nothing went wrong."""
    return 0 if all(result.verdict in PASSED | OPEN for result in results) else 1


def line(result: Result) -> str:
    """One result, while the series goes on."""
    plan = result.plan
    head = f"{plan.index:3d}  {plan.mode}  {plan.kind}  {plan.moment}  {result.fault or 'no fault'}"
    detail = f" ({result.detail})" if result.detail else ""
    return f"{head}: {result.verdict.value}{detail}, {result.total_seconds:.0f} s"


def table(results: Sequence[Result]) -> Table:
    """All results."""
    found = Table(title="chaos", title_justify="left")
    for column in ("run", "mode", "kind", "moment", "verdict", "code", "fault to end", "last line"):
        found.add_column(column, overflow="fold" if column == "last line" else "ellipsis")
    for result in results:
        plan = result.plan
        bad = result.verdict not in PASSED | OPEN
        found.add_row(
            str(plan.index),
            plan.mode,
            plan.kind,
            plan.moment,
            f"[bold]{result.verdict.value}[/bold]" if bad else result.verdict.value,
            "–" if result.code is None else str(result.code),
            "–" if result.seconds is None else f"{result.seconds:.1f} s",
            escape(result.last_line),
        )
    return found


def summary(results: Sequence[Result]) -> str:
    """How many of each verdict."""
    counts = Counter(result.verdict.value for result in results)
    verdicts = ", ".join(f"{count} {name}" for name, count in counts.most_common())
    versions, tokens = sum(one.versions for one in results), sum(one.tokens for one in results)
    return f"{len(results)} runs: {verdicts}; {tokens:,} tokens of {versions} versions computed again"


def as_json(seed: int, results: Sequence[Result]) -> dict[str, Any]:
    """The results as plain data."""
    rows = [asdict(result) | {"verdict": result.verdict.value} for result in results]
    return {"seed": seed, "results": rows, "counts": Counter(row["verdict"] for row in rows)}
