from __future__ import annotations

from pathlib import Path

import pytest

from neoproto.data.paths import is_full, named_errors, user_path
from neoproto.errors import ConfigError


def test_a_tilde_is_a_home_folder() -> None:
    assert user_path("~/rows.jsonl", field="f") == Path.home() / "rows.jsonl"
    assert user_path("rows~.jsonl", field="f") == Path("rows~.jsonl")


def test_somebody_who_is_not_there_is_named_with_the_field() -> None:
    with pytest.raises(ConfigError, match=r"^data\.val_files: ~no-body/x\.jsonl: no home .* for ~no-body$"):
        user_path("~no-body/x.jsonl", field="data.val_files")


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
