from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.command import Command, Start


@pytest.fixture
def built_in_model(cache: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The model that runs of `+smoke=tiny` start from; made here if no run was first."""
    from neoproto.run.compose import compose_run
    from neoproto.run.prepare import load_rows, model_folder

    monkeypatch.setenv("NEOPROTO_CACHE", str(cache))
    config = compose_run("ppo_monarch", ["+smoke=tiny"])
    return model_folder(config, load_rows(config), contextlib.nullcontext)


@pytest.fixture
def start(tmp_path: Path, cache: Path, user_env: dict[str, str]) -> Iterator[Start]:
    """Starts runs in the test's folder, and ends whatever is left of them; `folder` is one that has a run."""
    commands: list[Command] = []

    def make(*words: str, folder: Path | None = None, **more: Any) -> Command:
        cwd = tmp_path / f"run{len(commands)}"
        cwd.mkdir()
        env = user_env | {"NEOPROTO_CACHE": str(cache)}
        commands.append(Command(cwd, env, *words, folder=folder, **more))
        return commands[-1]

    yield make
    for command in commands:
        command.discard()
