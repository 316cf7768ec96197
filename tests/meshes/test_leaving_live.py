"""However a controller ends, nothing of its run is left."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.meshes.leftovers import traces, wait_until_clean

pytestmark = pytest.mark.live

BOUND_S = 15.0


@contextmanager
def controller(mode: str, run_dir: Path) -> Iterator[tuple[subprocess.Popen[str], dict[str, Any]]]:
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.meshes.controller_program", mode, str(run_dir)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line, process.communicate()[1]
        yield process, json.loads(line)
    finally:
        process.kill()
        process.communicate()


@pytest.mark.core
def test_a_normal_end_is_clean_and_quiet(tmp_path: Path) -> None:
    shm, tmp = set(os.listdir("/dev/shm")), tmp_path / "run"
    with controller("close", tmp) as (process, told):
        found = traces(told["run_id"])
        for kind in ("process", "folder", "shm", "socket"):
            assert any(one.startswith(kind) for one in found), "the mark is where the traces are looked for"
        folder = f"{tempfile.gettempdir()}/np-{told['run_id']}-"
        assert all(path.startswith(folder) for path in [*told["files"], *told["temporary"]])
        assert not any(path.startswith(folder) for path in told["cache"]), "what was compiled is kept"
        assert wait_until_clean(told["run_id"], None, BOUND_S) == []
        rest, errors = process.communicate(timeout=60)
    assert process.returncode == 0
    assert (rest, errors) == ("", ""), "the terminal stays clean"
    assert traces(told["run_id"], told["pid"]) == []
    assert {name for name in os.listdir("/dev/shm") if told["run_id"] in name} - shm == set()


@pytest.mark.parametrize("mode", ["raise", "exit"])
def test_an_exception_and_a_forgotten_close_leave_nothing(mode: str, tmp_path: Path) -> None:
    with controller(mode, tmp_path / "run") as (process, told):
        _, errors = process.communicate(timeout=60)
    assert process.returncode == (1 if mode == "raise" else 0)
    assert ("on purpose" in errors) == (mode == "raise")
    assert traces(told["run_id"], told["pid"]) == []


@pytest.mark.parametrize("mode", ["wait", "stuck"])
@pytest.mark.parametrize("name", ["SIGINT", pytest.param("SIGTERM", marks=pytest.mark.core), "SIGHUP"])
def test_a_signal_closes_everything(name: str, mode: str, tmp_path: Path) -> None:
    signum = signal.Signals[name]
    with controller(mode, tmp_path / "run") as (process, told):
        process.send_signal(signum)
        assert wait_until_clean(told["run_id"], None, BOUND_S) == []
        process.communicate(timeout=60)
    expected = -signal.SIGINT if signum is signal.SIGINT else 128 + signum
    assert process.returncode == expected
    assert traces(told["run_id"], told["pid"]) == []


@pytest.mark.parametrize("delay", [1.5, 3.0])
def test_a_signal_while_hosts_and_store_start_ends_that(delay: float, tmp_path: Path) -> None:
    """Monarch waits without looking for signals, and later reports on the terminal what died under it."""
    with controller("start", tmp_path / "run") as (process, told):
        time.sleep(delay)
        started = time.monotonic()
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=60)
        assert time.monotonic() - started < BOUND_S
    assert (process.returncode, errors) == (128 + signal.SIGTERM, "")
    assert traces(told["run_id"], told["pid"]) == []


def test_more_signals_do_not_cut_closing_short(tmp_path: Path) -> None:
    with controller("stuck", tmp_path / "run") as (process, told):
        for signum in (signal.SIGINT, signal.SIGINT, signal.SIGTERM, signal.SIGINT):
            process.send_signal(signum)
            time.sleep(0.3)
        assert wait_until_clean(told["run_id"], None, BOUND_S) == []
        process.communicate(timeout=60)
    assert process.returncode == -signal.SIGINT
    assert traces(told["run_id"], told["pid"]) == []


@pytest.mark.parametrize("mode", ["wait", pytest.param("stuck", marks=pytest.mark.core)])
def test_a_killed_controller_leaves_nothing(mode: str, tmp_path: Path) -> None:
    with controller(mode, tmp_path / "run") as (process, told):
        process.kill()
        process.wait(60)
        assert wait_until_clean(told["run_id"], told["pid"], BOUND_S) == []
        assert not any(os.path.exists(path) for path in told["files"])


@pytest.mark.parametrize("folder", ["np-", "np-client-"])
def test_a_controller_killed_as_it_makes_a_folder_leaves_nothing(folder: str, tmp_path: Path) -> None:
    with controller(f"killed {folder}", tmp_path / "run") as (process, told):
        assert process.wait(60) == -signal.SIGKILL
        assert wait_until_clean(told["run_id"], told["pid"], BOUND_S) == []


def test_a_controller_killed_between_its_runs_leaves_nothing(tmp_path: Path) -> None:
    """As a notebook's kernel is."""
    with controller("closed", tmp_path / "run") as (process, told):
        assert process.stdout is not None
        assert process.stdout.readline() == "closed\n"
        assert traces(told["run_id"]) == []
        assert traces(told["run_id"], told["pid"]) != [], "Monarch's client"
        process.kill()
        process.wait(60)
        assert wait_until_clean(told["run_id"], told["pid"], BOUND_S) == []
