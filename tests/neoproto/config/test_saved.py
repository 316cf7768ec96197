"""What is written of a configuration composes to the same configuration, whatever texts are in it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from neoproto.config import load_config
from neoproto.config.saved import read, to_yaml, written
from neoproto.run.compose import compose

PIECES = [
    "$",
    "{",
    "}",
    "\\",
    "${",
    "\\${",
    "???",
    "#",
    "-",
    "+",
    "1",
    "e",
    "_",
    ".",
    ":",
    " ",
    "\n",
    "'",
    '"',
]
PIECES += [
    "é",
    "\x85",
    "\u2028",
    "\ufeff",
    "\udcff",
    "\0",
    "\r",
    "~",
    "null",
    "on",
    "inf",
    "2026-01-01",
    "=",
    "<<",
]
TEXTS = st.one_of(st.text(max_size=12), st.lists(st.sampled_from(PIECES), max_size=6).map("".join))
VALUES = st.one_of(TEXTS, st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False))
TREES = st.dictionaries(
    TEXTS,
    st.recursive(
        VALUES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3)
    ),
)
AWKWARD = {
    "interpolation": "${trainer.seed}",
    "nowhere": "a ${nowhere} b",
    "resolver": "${oc.env:HOME}",
    "escaped": "\\${x} \\\\${y} $${z}",
    "half": "${",
    "missing": "???",
    "number": "1e5",
    "infinity": "-.inf",
    "nothing": "null",
    "empty": "",
    "date": "2026-01-01",
    "time": "1:30",
    "truth": "on",
    "merge": "<<",
    "lines": "a\n\n b\n",
    "next line": "\x85",
    "no UTF-8": "\udcff",
    "nested": {1: ["${a}", {"b": 1.0}], "deep": {"1": None, "x": 1e-5, "y": float("inf")}},
}


@given(TREES)
@settings(deadline=None, max_examples=150)
def test_every_text_comes_back(tree: dict[str, Any]) -> None:
    text = to_yaml({"a": tree})
    assert OmegaConf.to_container(OmegaConf.create(text), resolve=True, throw_on_missing=True) == {"a": tree}
    assert read(yaml.safe_load(text)) == {"a": tree}, "to a reader without OmegaConf"


def test_a_configuration_of_awkward_texts_composes_to_itself(tmp_path: Path) -> None:
    config = load_config(
        {
            "data": {"system_prompt": AWKWARD["escaped"], "task": {"options": AWKWARD}},
            "runtime": {"env_vars": {"A": "${oc.env:HOME}", "B": "123", "C": "???"}},
            "trainer": {"experiment_name": "${trainer.seed}"},
        }
    )
    (tmp_path / "config.yaml").write_bytes(to_yaml(config.model_dump()).encode())
    again = load_config(compose("config", [], tmp_path))
    assert again.model_dump() == config.model_dump()


def test_what_was_typed_is_what_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An escaped interpolation, and a variable whose text looks like one."""
    monkeypatch.setenv("PROMPT", "Answer ${nowhere} \\${so}")
    typed = [r"data.system_prompt=${oc.env:PROMPT}", r"trainer.experiment_name='\${trainer.seed}'"]
    first = compose("ppo_monarch", typed)
    assert first["data"]["system_prompt"] == "Answer ${nowhere} \\${so}"
    assert first["trainer"]["experiment_name"] == "${trainer.seed}"
    (tmp_path / "printed.yaml").write_text(to_yaml(first))
    monkeypatch.delenv("PROMPT")
    assert compose("printed", [], tmp_path) == first


def test_an_interpolation_of_a_persons_own_is_left_to_a_reader() -> None:
    assert read({"seed": "${trainer.seed}", "path": "a\\b"}) == {"seed": "${trainer.seed}", "path": "a\\b"}
    assert written({"path": "a\\b"}) == {"path": "a\\b"}
