from __future__ import annotations

import os
import socket
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from neoproto import files
from neoproto.errors import ConfigError
from neoproto.files import (
    is_full,
    named_errors,
    new_folder,
    replace_file,
    unwritable,
    user_path,
    write_synced,
    wrong_kind,
)


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


def test_what_is_there_and_of_another_kind_is_called_by_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    os.mkfifo(tmp_path / "pipe")
    with socket.socket(socket.AF_UNIX) as made:
        # A relative path: a socket's name has at most 107 bytes.
        made.bind("socket")
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


class Killed(BaseException):
    """The process is gone."""


def test_a_file_has_its_old_content_or_the_new_one_wherever_its_writer_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"

    def kill(path: Path, *data: bytes) -> None:
        if data and isinstance(data[0], bytes):
            path.write_bytes(data[0][:1])
        raise Killed

    for step in ("_write", "sync", "_rename"):
        replace_file(path, b"old", synced=True)
        with monkeypatch.context() as patch:
            patch.setattr(files, step, kill)
            patch.setattr(files, "_unlink", kill)  # a killed process does not tidy up
            with pytest.raises(Killed):
                replace_file(path, b"new", synced=True)
        assert path.read_bytes() == b"old"
    replace_file(path, b"ne", memoryview(b"w"), synced=True)
    assert path.read_bytes() == b"new"


def test_content_is_on_the_disk_before_its_name_and_the_name_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[tuple[str, str]] = []
    for name in ("_write", "_rename", "sync"):
        real = getattr(files, name)

        def noted(path: Path, *more: object, name: str = name, real: Callable[..., None] = real) -> None:
            done.append((name, "folder" if path == tmp_path else path.suffix))
            real(path, *more)

        monkeypatch.setattr(files, name, noted)
    replace_file(tmp_path / "file", b"x", synced=True)
    assert done == [("_write", ".part"), ("sync", ".part"), ("_rename", ".part"), ("sync", "folder")]
    done.clear()
    replace_file(tmp_path / "file", b"x")
    assert done == [("_write", ".part"), ("_rename", ".part")]


def test_a_file_that_cannot_be_replaced_is_named_and_nothing_is_left_beside_it(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    with pytest.raises(OSError, match=r"Is a directory.*there"):
        replace_file(tmp_path / "there", b"x")
    assert [path.name for path in tmp_path.iterdir()] == ["there"]
    with (
        pytest.raises(
            ConfigError, match=rf"^--out: {tmp_path}/there/none/x: cannot be written: No such file"
        ),
        unwritable(f"--out: {tmp_path}/there/none/x"),
    ):
        replace_file(tmp_path / "there" / "none" / "x", b"x")


def test_a_folder_is_there_when_it_is_full_and_not_at_all_if_that_fails(tmp_path: Path) -> None:
    target = tmp_path / "parent" / "folder"
    with new_folder(target) as made:
        made.mkdir()
        write_synced(made / "file", b"x")
        assert not target.exists()
    assert (target / "file").read_bytes() == b"x"
    with suppress(RuntimeError), new_folder(tmp_path / "parent" / "other") as made:
        made.mkdir()
        raise RuntimeError("half full")
    assert [path.name for path in target.parent.iterdir()] == ["folder"]


def test_an_error_that_names_a_file_keeps_it(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="other"), named_errors(tmp_path / "this"):
        (tmp_path / "other").read_text()


def test_a_disk_with_room_is_not_full_and_a_folder_that_is_gone_neither(tmp_path: Path) -> None:
    assert not is_full(tmp_path)
    assert not is_full(tmp_path / "gone")
    assert is_full(Path("/proc")), "it has no blocks at all"
