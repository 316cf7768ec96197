"""How a run begins: what is started when, and what stays of one that was refused."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from neoproto.run import session
from tests.neoproto.run.command import Capture, FakeRuntime, ended, refused
from tests.neoproto.run.inputs import overrides

pytestmark = pytest.mark.usefixtures("no_processes")

IMPORTS = """
import sys
import neoproto.run.cli, neoproto.run.launch
import meshes.monarch.backend, meshes.monarch.sdk, neoproto.store.torchstore.actors
import monarch.actor, monarch.job
import neoproto.data.tasks
print(sorted({"torch", "transformers", "vllm", "reasoning_gym"} & sys.modules.keys()))
"""


def test_the_controller_imports_nothing_heavy_before_its_processes_start() -> None:
    command = [sys.executable, "-c", IMPORTS]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout == "[]\n"


def test_processes_start_before_prompts_are_read(capsys: Capture, model: Path, train_file: Path) -> None:
    _, out, _ = ended(capsys, *overrides(model, train_file))
    stages = [line for line in out.splitlines() if line.endswith("…")]
    assert stages == [
        "starting hosts and store …",
        "reading prompts …",
        "tokenising prompts …",
        "starting workers …",
    ]
    assert (FakeRuntime.made, FakeRuntime.open) == (1, 0)


def test_what_can_be_told_at_once_is_told_before(
    capsys: Capture, tmp_path: Path, model: Path, train_file: Path
) -> None:
    typed = overrides(model, train_file)
    refused(capsys, *typed, f"actor_rollout_ref.model.path={tmp_path}/nowhere")
    refused(capsys, *typed, f"critic.model.path={tmp_path}/nowhere")
    refused(capsys, *typed, f"reward.custom_reward_function.path={tmp_path}/nowhere.py")
    refused(capsys, *typed, "runtime.backend=ray")
    assert FakeRuntime.made == 0
    refused(capsys, *typed, f"data.train_files={tmp_path}/nowhere.jsonl")
    assert FakeRuntime.made == 1


def test_a_refused_run_leaves_the_folders_that_were_there(
    capsys: Capture, tmp_path: Path, model: Path
) -> None:
    named = tmp_path / "named"
    named.mkdir()
    (named / "mine.txt").touch()
    wrong = overrides(model, tmp_path / "nowhere.jsonl")
    refused(capsys, *wrong, f"runtime.run_dir={named}")
    assert (named / "mine.txt").exists()
    refused(capsys, *wrong, f"runtime.run_dir={tmp_path}/new/below")
    assert not (tmp_path / "new").exists()


def test_what_writes_into_a_refused_runs_folder_ends_before_it_goes(
    capsys: Capture, tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "run"
    there: list[bool] = []

    class LastWords(FakeRuntime):
        def __exit__(self, *error: object) -> None:
            there.append((folder / "logs").is_dir())
            super().__exit__(*error)

    monkeypatch.setattr("neoproto.run.launch.Runtime.from_config", LastWords)
    refused(capsys, *overrides(model, tmp_path / "nowhere.jsonl", f"runtime.run_dir={folder}"))
    assert (there[0], folder.exists()) == (True, False)


def test_signals_wait_for_the_imports(
    capsys: Capture, model: Path, train_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a handler raises while native code is imported may be lost."""
    held: list[bool] = []

    @contextmanager
    def hold() -> Iterator[None]:
        monkeypatch.delitem(sys.modules, session.__name__)
        yield
        held.append(session.__name__ in sys.modules)

    monkeypatch.setattr("neoproto.run.launch.held_signals", hold)
    ended(capsys, *overrides(model, train_file))
    assert held == [True]


def test_an_unexpected_failure_closes_what_was_started_and_keeps_its_log(
    capsys: Capture, tmp_path: Path, model: Path, train_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise MemoryError("no more")

    monkeypatch.setattr("neoproto.run.prepare.load_rows", fail)
    code, _, errors = ended(capsys, *overrides(model, train_file, f"runtime.run_dir={tmp_path}/run"))
    assert (code, FakeRuntime.open) == (1, 0)
    assert errors == f"error: MemoryError: no more (details: {tmp_path}/run/run.log)\n", "the log is kept"
