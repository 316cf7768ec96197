from __future__ import annotations

from pathlib import Path

import pytest

from neoproto.data.paths import user_path
from neoproto.errors import ConfigError


def test_a_tilde_is_a_home_folder() -> None:
    assert user_path("~/rows.jsonl", field="f") == Path.home() / "rows.jsonl"
    assert user_path("rows~.jsonl", field="f") == Path("rows~.jsonl")


def test_somebody_who_is_not_there_is_named_with_the_field() -> None:
    with pytest.raises(ConfigError, match=r"^data\.val_files: ~no-body/x\.jsonl: no home .* for ~no-body$"):
        user_path("~no-body/x.jsonl", field="data.val_files")
