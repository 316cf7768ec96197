"""The command line: reads run folders, writes the page, and ends with one clear line and an exit code.

0 written · 2 the input is wrong, or the output cannot be written
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from neoproto import trace
from neoproto.errors import ConfigError

EPILOG = """\
examples:
  python -m neoproto.report outputs/neoproto/ppo/2026-01-31_12-00-00
  python -m neoproto.report runs/a runs/b --out compare.html
  python -m neoproto.report runs/a --png pictures

The page needs no network and no server. A run that is still going can be reported on too.
"""


def parser() -> argparse.ArgumentParser:
    arguments = argparse.ArgumentParser(
        prog="python -m neoproto.report",
        description="Write one HTML page with the curves, samples and configuration of one or several runs.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    arguments.add_argument("runs", nargs="+", type=Path, metavar="RUN_DIR", help="the folder of a run")
    arguments.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        help="the page to write (report.html in the run's folder; of several runs, in this folder)",
    )
    arguments.add_argument(
        "--png", type=Path, metavar="DIR", help="also write the main curves as pictures there"
    )
    return arguments


def main(argv: Sequence[str]) -> int:
    """Run the command; returns the exit code."""
    options = parser().parse_args(argv)
    try:
        for line in report(options.runs, options.out, options.png):
            print(line, flush=True)
    except ConfigError as error:
        for problem in error.problems:
            print(f"error: {problem}", file=sys.stderr, flush=True)
        return 2
    return 0


def report(folders: Sequence[Path], out: Path | None, pictures: Path | None) -> list[str]:
    """Write the page, and the pictures if they are wanted; returns what to say of it.

    Raises:
        ConfigError: a folder is none of a run or holds something broken, or a file cannot be written.
    """
    from neoproto.report.page import html_page
    from neoproto.report.reading import read_runs

    runs = read_runs(folders)
    traces = [merged for folder in folders if (merged := merged_trace(folder)) is not None]
    path = out or (folders[0] / "report.html" if len(runs) == 1 else Path("report.html"))
    page = html_page(runs).encode("utf-8", errors="replace")  # a lone surrogate in a text becomes "?"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # Renamed into place: a browser that reloads never sees half a page.
        half = path.with_name(f".{path.name}.part")
        half.write_bytes(page)
        os.replace(half, path)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written: {error.strerror or error}") from error
    said = [f"note: {run.name}: {note}" for run in runs for note in run.notes]
    said.append(f"{path} ({len(page) / 1e6:.1f} MB)")
    said += traces
    if pictures is not None:
        from neoproto.report.pictures import write_pictures

        said += [str(one) for one in write_pictures(runs, pictures)]
    return said


def merged_trace(folder: Path) -> str | None:
    """What to say of a run's trace. One that nobody merged (of a killed run), or that has grown, is merged.

    Raises:
        ConfigError: a part of it is broken, or it cannot be written.
    """
    parts, merged = list((folder / trace.PARTS).glob("*.jsonl")), folder / trace.MERGED
    newest = max((part.stat().st_mtime for part in parts), default=0.0)
    if not parts or (merged.is_file() and merged.stat().st_mtime >= newest):
        return None
    try:
        done = trace.merge_parts(folder)
    except (OSError, ValueError) as error:
        raise ConfigError(str(error)) from error
    return None if done is None else f"{done.path} ({done.events} events of {done.lanes} processes)"
