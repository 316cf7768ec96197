"""`processes.json`: what is in it at each moment, and that a run goes on without it."""

from __future__ import annotations

import json
import logging
import os
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from neoproto.runtime.backend import ProcessInfo
from neoproto.runtime.processes import ProcessFile


def infos(*pids: int) -> list[ProcessInfo]:
    return [ProcessInfo(rank=rank, pid=pid, host="here", rendezvous=None) for rank, pid in enumerate(pids)]


def read(folder: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads((folder / "processes.json").read_text())
    return rows


def names(folder: Path) -> list[tuple[str, int, int]]:
    return [(row["group"], row["rank"], row["pid"]) for row in read(folder)]


def test_the_file_follows_what_comes_and_goes(tmp_path: Path) -> None:
    file = ProcessFile(tmp_path)
    file.clear()
    assert list(tmp_path.iterdir()) == [], "not before it is opened"
    file.open()
    controller = ("controller", 0, os.getpid())
    assert names(tmp_path) == [controller]
    file.add("actor", infos(11, 12))
    file.add("reward", infos(13))
    assert names(tmp_path) == [controller, ("actor", 0, 11), ("actor", 1, 12), ("reward", 0, 13)]
    file.remove("actor", 1)
    assert names(tmp_path) == [controller, ("actor", 0, 11), ("reward", 0, 13)]
    file.remove("actor")
    file.remove("unknown")
    assert names(tmp_path) == [controller, ("reward", 0, 13)]
    file.add("reward", infos(14))
    assert names(tmp_path) == [controller, ("reward", 0, 14)], "a place has one process"
    file.clear()
    assert read(tmp_path) == []
    assert [path.name for path in tmp_path.iterdir()] == ["processes.json"]


def test_a_row_says_where_and_since_when_and_is_a_line(tmp_path: Path) -> None:
    file = ProcessFile(tmp_path)
    file.open()
    file.add("actor", infos(11))
    row = read(tmp_path)[1]
    assert sorted(row) == ["group", "host", "pid", "rank", "started"]
    assert row["host"] == "here"
    started = datetime.fromisoformat(row["started"])
    assert abs((datetime.now().astimezone() - started).total_seconds()) < 5
    lines = (tmp_path / "processes.json").read_text().splitlines()
    # With what follows the number: the controller's own, in the first line, may begin with it.
    assert [('"pid": 11,' in line, '"actor"' in line) for line in lines] == [(False, False), (True, True)]


def test_a_file_that_cannot_be_written_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = ProcessFile(tmp_path)
    file.open()
    (tmp_path / "processes.json").unlink()
    (tmp_path / "processes.json").mkdir()
    with caplog.at_level(logging.WARNING):
        file.add("actor", infos(11))
    assert f"{tmp_path}/processes.json was not written" in caplog.text
    assert [path.name for path in tmp_path.iterdir()] == ["processes.json"]
