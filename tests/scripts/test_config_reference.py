"""The reference of all options is the schema's."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

from tests.neoproto.config.test_shipped import leaves

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("config_reference", ROOT / "scripts/config_reference.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_is_current(script: ModuleType) -> None:
    """After changing an option: python scripts/config_reference.py."""
    assert script.TARGET == ROOT / "docs/config.md"
    assert script.reference() == script.TARGET.read_text(encoding="utf-8")


def test_the_tables_of_columns_are_current(script: ModuleType) -> None:
    """After changing a column: python scripts/config_reference.py."""
    page = (ROOT / "docs/data.md").read_text(encoding="utf-8")
    assert script.with_columns(page) == page
    assert "| `old_log_probs` |" in page


def test_every_option_is_on_it_with_what_it_may_be(script: ModuleType) -> None:
    from neoproto.config import RunConfig

    found, section = set(), ""
    for line in script.reference().splitlines():
        if title := re.fullmatch(r"## `(.+)`", line):
            section = title[1] + "."
        elif option := re.match(r"\| `(\w+)` \|", line):
            found.add(section + option[1])
    wanted = {path for path in leaves(RunConfig) if path != "topology"}
    assert wanted <= found | {path.removeprefix(".") for path in found}


def test_types_limits_and_defaults_are_in_words(script: ModuleType) -> None:
    page = script.reference()
    assert "| `train_batch_size` | integer > 0 | `64` | Prompts a step. |" in page
    assert "| `max_failed_share` | number > 0, ≤ 1 | `0.5` |" in page
    assert "| `on_failure` | `fail`, `restart` | `fail` |" in page
    assert "| `resume_from_path` | text or null | `null` |" in page
    assert "| `trainer.mode` | the modes are sync, separate_async and decoupled_async |" in page


def test_an_option_without_a_default_is_required(script: ModuleType) -> None:
    page = script.reference()
    assert "Undefined" not in page
    assert "| `resource_pool` | text | required | The pool it runs on. |" in page
