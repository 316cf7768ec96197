"""A log file on a full disk says nothing on the terminal, and remembers."""

from __future__ import annotations

import errno
import logging
from pathlib import Path

import pytest

from neoproto.runtime.logfile import LogFileHandler


def record(text: str, *arguments: object) -> logging.LogRecord:
    return logging.LogRecord("neoproto.run", logging.INFO, __file__, 1, text, arguments, None)


def test_a_full_disk_is_noted_and_not_printed(capsys: pytest.CaptureFixture[str]) -> None:
    handler = LogFileHandler("/dev/full")
    for _ in range(2):
        handler.handle(record("line"))
    assert handler.failure is not None
    assert handler.failure.errno == errno.ENOSPC
    handler.close()
    assert capsys.readouterr().err == ""


def test_what_does_not_fit_when_it_is_closed_is_noted_too() -> None:
    handler = LogFileHandler("/dev/full")
    handler.stream.write("left to write")
    handler.close()
    assert handler.failure is not None


def test_other_mistakes_are_printed_as_ever(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    handler = LogFileHandler(tmp_path / "log")
    handler.handle(record("%d", "no number"))
    handler.handle(record("fine"))
    handler.close()
    assert handler.failure is None
    assert "--- Logging error ---" in capsys.readouterr().err
    assert (tmp_path / "log").read_text() == "fine\n"
