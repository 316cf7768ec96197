"""The command, in this process, and what it ends with."""

from __future__ import annotations

from pathlib import Path

import pytest

from neoproto.run.cli import main

Capture = pytest.CaptureFixture[str]


class InputAcceptedError(Exception):
    """The input was accepted."""


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
    return errors.removeprefix("error: ").rstrip("\n")
