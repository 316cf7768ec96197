from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from neoproto.errors import ConfigError
from neoproto.report.cli import main, write_page
from tests.neoproto.report.runs import write_run


def test_the_page_lies_in_the_runs_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_run(tmp_path / "a")
    assert main([str(folder)]) == 0
    page = folder / "report.html"
    assert page.read_text(encoding="utf-8").startswith("<!doctype html>")
    assert capsys.readouterr().out == f"{page} ({page.stat().st_size / 1e6:.1f} MB)\n"
    assert main([str(folder)]) == 0  # again, over the old one
    assert [path.name for path in folder.iterdir() if path.name.startswith(".")] == []


def test_of_several_runs_it_lies_where_the_command_is_typed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "a")
    write_run(tmp_path / "b", complete=False)
    assert main(["a", "b"]) == 0
    assert (tmp_path / "report.html").is_file()
    assert main(["a", "b", "--out", "new/folder/x.html", "--png", "pictures"]) == 0
    assert (tmp_path / "new" / "folder" / "x.html").is_file()
    assert (tmp_path / "pictures" / "score.png").is_file()


def test_a_lone_surrogate_does_not_end_it(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "a", answer="\ud800 lone")
    assert main([str(folder)]) == 0
    assert b"? lone" in (folder / "report.html").read_bytes()


def test_wrong_inputs_are_lines_and_code_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_run(tmp_path / "a")
    assert main([str(tmp_path / "absent"), str(tmp_path), str(folder)]) == 2
    assert capsys.readouterr().err.splitlines() == [
        "error: 2 problems:",
        f"- {tmp_path / 'absent'}: no such folder",
        f"- {tmp_path}: not the folder of a run that trains: it has no config.yaml and no metrics.jsonl",
    ]
    assert main(["x" * 300]) == 2
    assert capsys.readouterr().err == f"error: {'x' * 300}: cannot be read: File name too long\n"
    with pytest.raises(SystemExit, match="2"):
        main([])


@pytest.mark.parametrize(
    ("option", "target", "said"),
    [
        ("--out", "", "--out: . is a folder; wanted the file to write"),
        ("--out", "/", "--out: / is a folder; wanted the file to write"),
        ("--out", "model", "--out: model is a folder; wanted the file to write"),
        ("--out", "config.yaml", "--out: config.yaml is there and is no HTML page; wanted another file"),
        ("--out", "x" * 300, f"{'x' * 300}: cannot be written: File name too long"),
        ("--out", "config.yaml/x.html", "config.yaml/x.html: cannot be written: File exists"),
        ("--png", "config.yaml", "--png: config.yaml is a file; wanted a folder"),
    ],
)
def test_an_output_that_cannot_be_is_one_line_and_nothing_is_written(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    option: str,
    target: str,
    said: str,
) -> None:
    folder = write_run(tmp_path / "a")
    monkeypatch.chdir(folder)
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    assert main([str(folder), option, target]) == 2
    assert capsys.readouterr() == ("", f"error: {said}\n")
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


def test_a_page_that_cannot_be_put_in_place_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "x.html").mkdir()
    with pytest.raises(ConfigError, match=r"x\.html: cannot be written: Is a directory"):
        write_page(tmp_path / "x.html", b"page")
    assert [path.name for path in tmp_path.iterdir()] == ["x.html"]


EVENT = '{"name": "x", "cat": "y", "ts": 5, "dur": 1}\n'


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("[1]", "wanted a JSON object, got list"),
        ("null", "wanted a JSON object, got NoneType"),
        ('{"a": 1}', "an event without a time in ts and dur"),
        ('{"ts": 1, "dur": "b"}', "an event without a time in dur"),
        ('{"ts": NaN, "dur": true}', "an event without a time in ts and dur"),
        (f'{{"ts": {"1" * 400}, "dur": 1.5}}', "an event without a time in ts"),
        ("[" * 100_000, "not JSON (maximum recursion depth"),
        ('{"name": "x", "ts{"lane": "a"}', "not JSON (Expecting ':' delimiter"),  # killed, then started again
    ],
)
def test_a_damaged_line_of_a_trace_is_left_out_and_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], line: str, said: str
) -> None:
    folder = write_run(tmp_path / "a")
    part = folder / "trace" / "a.jsonl"
    part.parent.mkdir()
    part.write_text(f'{{"lane": "a", "pid": 3}}\n{line}\n{EVENT}')
    assert main([str(folder)]) == 0
    note, merged = capsys.readouterr().out.splitlines()[-2:]
    assert note.startswith(f"note: left out: {part}:2: {said}")
    assert merged == f"{folder / 'trace.json'} (1 events of 1 processes)"


def test_a_trace_that_cannot_be_merged_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_run(tmp_path / "a")
    (folder / "trace").mkdir()
    (folder / "trace" / "a.jsonl").symlink_to("nowhere")
    assert main([str(folder)]) == 0
    said = capsys.readouterr().out.splitlines()[-1]
    assert (
        said == f"note: {folder / 'trace' / 'a.jsonl'}: the trace was not merged: No such file or directory"
    )


def test_it_runs_as_a_module_without_the_training_stack(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "a")
    code = (
        "import sys; from neoproto.report.cli import main; code = main(sys.argv[1:]);"
        "heavy = ('torch', 'monarch', 'vllm', 'matplotlib');"
        "print(*(name for name in heavy if name in sys.modules)); sys.exit(code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(folder)], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == ""
    helped = subprocess.run(
        [sys.executable, "-m", "neoproto.report", "--help"],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert "RUN_DIR" in helped.stdout
