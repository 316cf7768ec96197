"""The commands that hosts start processes by. No process is started."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from meshes.common.bootstrap import LOG_VARIABLE
from meshes.monarch.commands import WarmCommands
from neoproto.private_api import monarch as private
from neoproto.runtime.backend import Preload

Made = tuple[Sequence[str], Mapping[str, str]]


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> WarmCommands:
    """Commands come as (arguments, environment)."""
    monkeypatch.setattr(private, "bootstrap_command", lambda _, arguments, env: (arguments, env))
    expected = [Preload(modules=("json",), env={"OMP_NUM_THREADS": "1"})]
    return WarmCommands(tmp_path, {"OF_RUN": "1"}, expected)


def own(made: Made) -> list[str]:
    """The variables that a parent which this command starts is without."""
    at = 5  # behind -I -S, the stub, the modules and its patience
    return list(made[0][at + 1 : at + 1 + int(made[0][at])])


def test_a_parent_is_not_taken_for_the_process_that_it_was_started_with(commands: WarmCommands) -> None:
    """Processes of the store are known by the log that they write."""
    made = commands.starting(Path("/logs/store/index.log"), {"TMPDIR": "/tmp"})
    assert made[1][LOG_VARIABLE] == "/logs/store/index.log"
    assert own(made) == [LOG_VARIABLE]


def test_a_parent_has_nothing_that_is_a_workers_own(commands: WarmCommands) -> None:
    preload = Preload(modules=("json",), env={})
    of_worker = {"OF_RUN": "1", "CUDA_VISIBLE_DEVICES": "0"}
    made = commands.forked(Path("/logs/actor/rank0.log"), {"TMPDIR": "/tmp"}, of_worker, preload)
    assert own(made) == [LOG_VARIABLE, "CUDA_VISIBLE_DEVICES"]
