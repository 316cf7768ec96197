from __future__ import annotations

import faulthandler
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from meshes.common.stacks import STACKS_SIGNAL
from neoproto.runtime import Runtime
from tests.neoproto.run.command import FakeRuntime
from tests.neoproto.run.inputs import json_lines, model_folder, words


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_folder(tmp_path_factory.mktemp("inputs") / "model")


@pytest.fixture(scope="session")
def train_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eight prompts of six tokens each (the letters, and the template's three)."""
    return json_lines(tmp_path_factory.mktemp("inputs") / "train.jsonl", words(8))


@pytest.fixture
def run_log() -> Iterator[None]:
    """Closes the log that a run opens for the life of its process."""
    root = logging.getLogger("neoproto")
    before, level = list(root.handlers), root.level
    yield
    for handler in list(root.handlers):
        if handler not in before:
            root.removeHandler(handler)
            faulthandler.unregister(STACKS_SIGNAL)
            handler.close()
    root.setLevel(level)


@pytest.fixture
def no_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run_log: None) -> None:
    """Nothing is started, whatever the input; the working folder is an empty one."""
    monkeypatch.setattr(FakeRuntime, "made", 0)
    monkeypatch.setattr(FakeRuntime, "open", 0)
    monkeypatch.setattr(Runtime, "from_config", FakeRuntime)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
