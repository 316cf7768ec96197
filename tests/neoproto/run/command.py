"""The command, in this process, and what it ends with."""

from __future__ import annotations

from concurrent.futures import Future
from pathlib import Path
from typing import Any, NoReturn

import pytest
from rich.table import Table

from neoproto.config import RuntimeConfig
from neoproto.run.cli import main

Capture = pytest.CaptureFixture[str]


class InputAcceptedError(Exception):
    """The input was accepted."""


class FakeRuntime:
    """Starts nothing, and has files in its run folder like a real one; no group of workers can be made."""

    made = open = 0
    """How many were made, and how many of them are open."""

    def __init__(self, settings: RuntimeConfig, **_: Any) -> None:
        (Path(settings.run_dir) / "logs").mkdir()
        FakeRuntime.made += 1
        FakeRuntime.open += 1
        self._closed = False

    def __enter__(self) -> FakeRuntime:
        return self

    def __exit__(self, *_: object) -> None:
        if not self._closed:
            self._closed = True
            FakeRuntime.open -= 1

    def placement_table(self) -> Table:
        return Table()

    def model_resource_pool(self, _: str) -> NoReturn:
        raise InputAcceptedError("workers were started")

    def watch_failures(self, _: object) -> Future[None]:
        return Future()


def ended(capsys: Capture, *argv: str) -> tuple[int, str, str]:
    code = main(argv)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def refused(capsys: Capture, *argv: str) -> str:
    """The one line that bad input ends with."""
    code, _, errors = ended(capsys, *argv)
    assert code == 2, errors
    assert errors.endswith("\n")
    assert errors.count("\n") == 1, errors
    assert errors.startswith("error: ")
    assert list(Path.cwd().iterdir()) == [], "bad input leaves no run folder"
    assert FakeRuntime.open == 0, "bad input leaves nothing running"
    return errors.removeprefix("error: ").rstrip("\n")
