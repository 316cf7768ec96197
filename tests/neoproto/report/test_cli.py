from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from neoproto.report.cli import main
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
    lines = capsys.readouterr().err.splitlines()
    assert lines == [
        f"error: {tmp_path / 'absent'}: no such folder",
        f"error: {tmp_path}: not the folder of a run that trains: it has no config.yaml and no metrics.jsonl",
    ]
    assert main([str(folder), "--out", str(folder)]) == 2
    assert capsys.readouterr().err == f"error: {folder}: cannot be written: Is a directory\n"
    with pytest.raises(SystemExit, match="2"):
        main([])


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
