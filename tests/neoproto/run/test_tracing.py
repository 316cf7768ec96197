from __future__ import annotations

import json
from pathlib import Path

import pytest

from neoproto import trace
from neoproto.config import RunConfig, load_config
from neoproto.errors import ConfigError
from neoproto.report.cli import main as report
from neoproto.run.tracing import tracing, worker_environment
from neoproto.trace import TraceWriter
from tests.neoproto.report.runs import write_run


def config(on: bool) -> RunConfig:
    return load_config(
        {"trainer": {"trace": on}, "runtime": {"env_vars": {"A": "b"}}, "data": {"train_files": ["x.jsonl"]}}
    )


def test_the_parts_are_merged_however_the_run_ends(tmp_path: Path) -> None:
    said: list[str] = []

    def run() -> None:
        with tracing(config(True), tmp_path, said.append):
            with trace.span("gen", "wait"):
                pass
            raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        run()
    assert said == [f"trace: {tmp_path / 'trace.json'} (1 events of 1 processes)"]
    assert [row["name"] for row in json.loads((tmp_path / "trace.json").read_text())["traceEvents"]][
        -1
    ] == "gen"
    with trace.span("later", "wait"):
        pass
    assert "later" not in (tmp_path / "trace" / "controller.jsonl").read_text()


def test_without_it_nothing_is_written(tmp_path: Path) -> None:
    with tracing(config(False), tmp_path, print), trace.span("gen", "wait"):
        pass
    assert list(tmp_path.iterdir()) == []
    assert worker_environment(config(False), tmp_path) == {"A": "b"}


def test_workers_are_told_where_to_write(tmp_path: Path) -> None:
    assert worker_environment(config(True), tmp_path) == {
        "A": "b",
        trace.FOLDER_VARIABLE: str(tmp_path / "trace"),
    }


def test_what_cannot_be_written_is_said(tmp_path: Path) -> None:
    (tmp_path / "trace").touch()
    with (
        pytest.raises(ConfigError, match=r"trainer\.trace: cannot write to"),
        tracing(config(True), tmp_path, print),
    ):
        pass
    (tmp_path / "trace").unlink()
    said: list[str] = []
    with tracing(config(True), tmp_path, said.append):
        (tmp_path / "trace" / "other.jsonl").write_text("{broken}\n")
    assert said[0].startswith("warning: the trace was not merged: ")


def test_a_report_merges_the_trace_of_a_killed_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_run(tmp_path / "a", complete=False)
    writer = TraceWriter(folder / "trace", "controller")
    writer.add("gen", "wait", 0)
    writer.close()
    assert report([str(folder)]) == 0
    assert f"{folder / 'trace.json'} (1 events of 1 processes)" in capsys.readouterr().out
    assert report([str(folder)]) == 0
    assert "trace.json" not in capsys.readouterr().out  # it is as new as its parts
    (folder / "trace" / "x.jsonl").write_text("{broken}\n{}\n")
    assert report([str(folder)]) == 0
    assert "x.jsonl:1: not JSON" in capsys.readouterr().out
