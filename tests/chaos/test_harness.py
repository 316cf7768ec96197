"""Parts of the harness that need no run: what is hit, file systems that are filled, files that are read."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from meshes.common import procs
from tests.chaos import faults
from tests.chaos.harness import most_stale, play, whole_rows
from tests.chaos.plan import KINDS, Plan, draw
from tests.chaos.verdict import Verdict


def write_processes(folder: Path, *processes: tuple[str, int, int]) -> None:
    rows = [{"group": group, "rank": rank, "pid": pid} for group, rank, pid in processes]
    (folder / "processes.json").write_text(json.dumps(rows))


def test_targets_are_those_of_the_kind_in_a_fixed_order(tmp_path: Path) -> None:
    kind = KINDS["kill-rollout"]
    assert faults.targets(kind, tmp_path) == []
    write_processes(tmp_path, ("rollout-1", 0, 12), ("actor", 0, 10), ("rollout-0", 0, 11))
    found = faults.targets(kind, tmp_path)
    assert found == [("rollout-0", 0, 11), ("rollout-1", 0, 12)]
    (plan,) = draw(1, 1, kinds=["kill-rollout"])
    chosen = faults.choose(plan, found)
    assert chosen == faults.choose(plan, found)
    assert chosen in found


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as process:
        yield process
        process.kill()


def test_a_signal_and_a_pause(sleeper: subprocess.Popen[bytes]) -> None:
    pause = threading.Thread(target=faults.strike, args=(sleeper.pid, KINDS["delay"], 0.5))
    pause.start()
    time.sleep(0.2)
    assert procs.state(sleeper.pid) == "T"
    pause.join()
    assert procs.state(sleeper.pid) != "T"
    faults.strike(sleeper.pid, KINDS["kill-policy"], 0.0)
    assert sleeper.wait(10) == -signal.SIGKILL
    with pytest.raises(ProcessLookupError):
        faults.strike(sleeper.pid, KINDS["kill-policy"], 0.0)


def test_a_private_file_system_is_filled_and_seen_from_outside(tmp_path: Path) -> None:
    if not faults.namespaces_possible():
        pytest.skip("no namespaces can be made here")
    folder = tmp_path / "run"
    folder.mkdir()
    program = "import sys, time; print('up', flush=True); time.sleep(60)"
    command = [*faults.within(KINDS["full-disk"], folder), sys.executable, "-c", program]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        view = faults.View(process.pid, folder)
        (view.path / "early").write_text("x")
        assert faults.fill(view.path) > (faults.DISK_MIB - 1) << 20
        with pytest.raises(OSError, match="No space left"):
            (view.path / "late").write_text("x")
        process.kill()
    assert (view.path / "early").read_text() == "x", "seen although the process is gone"
    view.close()
    assert list(folder.iterdir()) == [], "nothing of it is outside"
    assert faults.within(KINDS["kill-policy"], folder) == []


def test_where_no_file_system_can_be_made_the_verdict_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(faults, "namespaces_possible", lambda: False)
    (plan,) = draw(1, 1, kinds=["full-shm"])
    result = play(plan, tmp_path / "run")
    assert result.verdict is Verdict.NOT_POSSIBLE
    assert not (tmp_path / "run").exists()


def test_a_row_that_is_cut_off_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    assert whole_rows(path) == []
    path.write_text('{"step": 1}\n{"step": 2}\n{"st')
    assert whole_rows(path) == [{"step": 1}, {"step": 2}]


@pytest.mark.parametrize(
    ("mode", "strategy", "bound"),
    [("sync", "drop", None), ("separate_async", "wait", None), ("x", "drop", 2)],
)
def test_what_bounds_staleness(tmp_path: Path, mode: str, strategy: str, bound: float | None) -> None:
    path = tmp_path / "config.yaml"
    assert most_stale(path) is None
    buffer = f"{{max_off_policy_strategy: {strategy}, max_off_policy_threshold: 2}}"
    path.write_text(f"trainer: {{mode: {mode}, replay_buffer: {buffer}}}\n")
    assert most_stale(path) == bound


PROGRAM = """\
import json, os, sys, time
folder = next(word.partition("=")[2] for word in sys.argv if word.startswith("runtime.run_dir="))
rows = [{"group": group, "rank": 0, "pid": os.getpid()} for group in ("actor", "controller")]
with open(f"{folder}/processes.json", "w") as file:
    json.dump(rows, file)
print("starting hosts and store …", flush=True)
for step in range(1, 13):
    print(f"step {step}/12  score", flush=True)
    time.sleep(STEP_S)
print("trained model: x")
"""


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[float], None]:
    """A program in place of a run: it prints its lines and does nothing."""
    package = tmp_path / "python" / "neoproto" / "run"

    def make(step_s: float) -> None:
        package.mkdir(parents=True)
        for folder in (package, package.parent):
            (folder / "__init__.py").touch()
        (package / "__main__.py").write_text(PROGRAM.replace("STEP_S", str(step_s)))
        monkeypatch.setattr("tests.e2e.command.ROOT", package.parents[1])

    return make


def plan_of(kind: str, seed: int = 1) -> Plan:
    return next(plan for plan in draw(60, seed, kinds=[kind]) if plan.phase == "step" and plan.step < 3)


def test_a_fault_is_brought_about_and_its_end_is_seen(
    stand_in: Callable[[float], None], tmp_path: Path
) -> None:
    stand_in(0.5)
    result = play(plan_of("kill-controller"), tmp_path / "run", env=os.environ)
    assert (result.verdict, result.code, result.folder) == (Verdict.ENDED, -9, None), result
    assert result.fault == "SIGKILL to controller[0]"
    assert result.seconds is not None
    assert result.seconds < 10
    assert not (tmp_path / "run").exists()


def test_a_hang_is_ended_and_its_folder_kept(stand_in: Callable[[float], None], tmp_path: Path) -> None:
    stand_in(0.3)
    result = play(plan_of("stop-policy"), tmp_path / "run", quiet_s=2.0)
    assert (result.verdict, result.code) == (Verdict.HANG, None)
    assert result.folder == str(tmp_path / "run")
    assert result.last_line.startswith("step ")
    assert (tmp_path / "run" / "stdout").exists()


def test_a_pause_is_survived(stand_in: Callable[[float], None], tmp_path: Path) -> None:
    stand_in(0.2)
    result = play(plan_of("stop-controller"), tmp_path / "run", keep=True)
    assert (result.verdict, result.code) == (Verdict.SURVIVED, 0)
    assert result.folder is not None
