"""The command line: reads run folders, writes the page, and ends with one clear line and an exit code.

0 written · 2 the input is wrong, or the output cannot be written; the others as of `neoproto.run`
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from neoproto import trace
from neoproto.errors import ConfigError
from neoproto.files import replace_file, unwritable
from neoproto.report.reading import note_of, read_runs
from neoproto.run.cli import guarded
from neoproto.runtime.signals import raised_signals

EPILOG = """\
examples:
  python -m neoproto.report outputs/neoproto/ppo/2026-01-31_12-00-00
  python -m neoproto.report runs/a runs/b --out compare.html
  python -m neoproto.report runs/a --png pictures

The page needs no network and no server. A run that is still going can be reported on too.
"""


PAGE_START = b"<!doctype html>"


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

    def execute() -> int:
        with raised_signals():
            for line in report(options.runs, options.out, options.png):
                print(line, flush=True)
        return 0

    return guarded(execute)


def report(folders: Sequence[Path], out: Path | None, pictures: Path | None) -> list[str]:
    """Write the page, and the pictures if they are wanted; returns the lines to print.

    Raises:
        ConfigError: a folder is none of a run or its configuration is broken, or a file cannot be written.
    """
    from neoproto.report.page import html_page

    runs = read_runs(folders)
    path = out or (folders[0] / "report.html" if len(runs) == 1 else Path("report.html"))
    check_outputs(path, pictures)
    said = [f"note: {run.name}: {note}" for run in runs for note in run.notes]
    traces = [line for run in runs for line in merged_trace(run.folder)]
    page = html_page(runs).encode("utf-8", errors="replace")  # a lone surrogate in a text becomes "?"
    write_page(path, page)
    said += [f"{path} ({len(page) / 1e6:.1f} MB)", *traces]
    if pictures is not None:
        from neoproto.report.pictures import write_pictures

        said += [str(one) for one in write_pictures(runs, pictures)]
    return said


def check_outputs(page: Path, pictures: Path | None) -> None:
    """Before the page is built.

    Raises:
        ConfigError: a folder stands where the page should, a file where the folder of pictures should, or the
            page would take the place of another file.
    """
    try:
        if page.is_dir():
            raise ConfigError(f"--out: {page} is a folder; wanted the file to write")
        if page.exists() and not is_page(page):
            raise ConfigError(f"--out: {page} is there and is no HTML page; wanted another file")
        if pictures is not None and pictures.exists() and not pictures.is_dir():
            raise ConfigError(f"--png: {pictures} is a file; wanted a folder")
    except OSError as error:
        raise ConfigError(
            f"{error.filename or page}: cannot be written: {error.strerror or error}"
        ) from error


def is_page(path: Path) -> bool:
    """Whether a file may be replaced: it is a page, or empty."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(len(PAGE_START)).lower() in (b"", PAGE_START)


def write_page(path: Path, page: bytes) -> None:
    """Raises ConfigError if it cannot be written; nothing of it is left then."""
    with unwritable(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, page)  # a browser that reloads never sees half a page


def merged_trace(folder: Path) -> list[str]:
    """The lines to print of a run's trace. It is merged if it is not yet (a killed run), or has grown.

    A report does not need it: where it cannot be merged, a note is printed.
    """
    merged = folder / trace.MERGED
    damage: list[str] = []
    try:
        parts = list((folder / trace.PARTS).glob("*.jsonl"))
        newest = max((part.stat().st_mtime for part in parts), default=0.0)
        if not parts or (merged.is_file() and merged.stat().st_mtime >= newest):
            return []
        done = trace.merge_parts(folder, damage)
    except OSError as error:
        return [f"note: {error.filename or merged}: the trace was not merged: {error.strerror or error}"]
    said = [f"note: {note}" for note in note_of(damage)]
    return said if done is None else [*said, f"{done.path} ({done.events} events of {done.lanes} processes)"]
