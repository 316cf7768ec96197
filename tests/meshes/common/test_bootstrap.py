"""A worker's output on a disk that is full, and on one that is not."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from meshes.common.bootstrap import LogFile, ensure_home, text_log


def test_a_full_disk_takes_lines_and_raises_nothing() -> None:
    with LogFile("/dev/full", "wb") as log:
        assert log.write(b"line\n") == 5


def test_other_errors_of_writing_are_raised() -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    with LogFile(write_end, "wb") as log, pytest.raises(BrokenPipeError):
        log.write(b"line\n")


def test_what_is_printed_is_there_at_once(tmp_path: Path) -> None:
    path = tmp_path / "rank0.log"
    number = os.open(path, os.O_WRONLY | os.O_CREAT)
    log = text_log(number)
    print("äöü \udc80", file=log, end="")
    assert path.read_bytes() == "äöü \\udc80".encode()
    assert log.fileno() == number
    log.close()
    os.fstat(number)  # it is the process's, and stays open
    os.close(number)


def test_a_user_without_a_home_gets_the_temporary_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/them")
    ensure_home()
    assert os.environ["HOME"] == "/home/them"
    monkeypatch.setattr(os.path, "expanduser", lambda text: text)  # as where nothing is known
    ensure_home()
    assert os.environ["HOME"] == tempfile.gettempdir()
