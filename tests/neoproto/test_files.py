from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from neoproto.errors import ConfigError
from neoproto.files import is_full, named_errors, user_path, wrong_kind


def test_a_tilde_is_a_home_folder() -> None:
    assert user_path("~/rows.jsonl", field="f") == Path.home() / "rows.jsonl"
    assert user_path("rows~.jsonl", field="f") == Path("rows~.jsonl")


def test_somebody_who_is_not_there_is_named_with_the_field() -> None:
    with pytest.raises(ConfigError, match=r"^data\.val_files: ~no-body/x\.jsonl: no home .* for ~no-body$"):
        user_path("~no-body/x.jsonl", field="data.val_files")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("x" * 300, "f: x{300}: File name too long$"),
        ("loop/x", "f: loop/x: Too many levels of symbolic links$"),
        ("a\0b", r"f: 'a\\x00b': embedded null byte$"),
    ],
)
def test_what_no_file_can_be_called_is_named_with_the_field(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    os.symlink("loop", "loop")
    with pytest.raises(ConfigError, match=said):
        user_path(text, field="f")
    (tmp_path / "file").touch()
    assert user_path("file/none", field="f") == Path("file/none")


def test_what_is_there_and_of_another_kind_is_called_by_its_own(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    os.mkfifo(tmp_path / "pipe")
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(tmp_path / "socket"))
    assert wrong_kind(tmp_path, "folder") is wrong_kind(tmp_path / "file", "file") is None
    assert wrong_kind(tmp_path / "none", "file") is None
    for path, found in (
        (tmp_path, "folder"),
        (tmp_path / "pipe", "named pipe"),
        (tmp_path / "socket", "socket"),
        (Path("/dev/null"), "device"),
    ):
        assert wrong_kind(path, "file") == f"{path} is a {found}, a file is needed"
    assert wrong_kind(tmp_path / "file", "folder") == f"{tmp_path}/file is a file, a folder is needed"


def test_an_error_of_writing_names_the_file() -> None:
    path = Path("/dev/full")
    with pytest.raises(OSError, match=r"No space left on device: '/dev/full'$"), named_errors(path):
        path.write_text("x")


def test_an_error_that_names_a_file_keeps_it(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="other"), named_errors(tmp_path / "this"):
        (tmp_path / "other").read_text()


def test_a_disk_with_room_is_not_full_and_a_folder_that_is_gone_neither(tmp_path: Path) -> None:
    assert not is_full(tmp_path)
    assert not is_full(tmp_path / "gone")
    assert is_full(Path("/proc")), "it has no blocks at all"
