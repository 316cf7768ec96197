"""The comparison of starts with another checkout: what it reads of processes and lines, and its figures."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"

COMMAND = """
import json, os, pathlib, signal, subprocess, sys, time
word = next(word for word in sys.argv if word.startswith("runtime.run_dir="))
folder = pathlib.Path(word.partition("=")[2])
folder.mkdir()
long = any("100000" in word for word in sys.argv)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"])
def write(group, process):
    rows = [{"group": "controller", "pid": os.getpid()}, {"group": group, "pid": process.pid}]
    (folder / "processes.json").write_text(json.dumps(rows))
write("rollout-0", child)
sum(range(3_000_000))
print("step 1/3  score 0.1", flush=True)
while not folder.with_suffix(".looked").exists():
    time.sleep(0.01)
if long:
    killed = child.wait()
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"])
    write("rollout-0-2", child)
    signal.signal(signal.SIGTERM, lambda *_: (child.kill(), child.wait(), os._exit(128 + signal.SIGTERM)))
    print(f"replica rollout-0 is up again on weights 1.2, after 0.1 s ({killed})", flush=True)
    signal.pause()
print("closing …", flush=True)
child.kill()
child.wait()
sys.exit(int(os.environ.get("CODE", "0")))
"""
"""A run as far as the benchmark sees it."""


@pytest.fixture(scope="module")
def scripts() -> Iterator[SimpleNamespace]:
    """The scripts' modules, imported as a script imports its neighbours."""
    sys.path.insert(0, str(SCRIPTS))
    try:
        import _bench
        import bench_start

        yield SimpleNamespace(start=bench_start, bench=_bench)
    finally:
        sys.path.remove(str(SCRIPTS))


@pytest.fixture
def side(scripts: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A checkout whose command is the one above, which waits after its first step until it is looked at."""

    class Processes(scripts.start.Processes):  # type: ignore[misc, name-defined]
        def look(self, *, memory: bool = False) -> None:
            super().look(memory=memory)
            if self._groups:
                self._file.parent.with_suffix(".looked").touch()

    monkeypatch.setattr(scripts.start, "Processes", Processes)
    package = tmp_path / "checkout" / "neoproto" / "run"
    package.mkdir(parents=True)
    for folder in (package.parent, package):
        (folder / "__init__.py").touch()
    (package / "__main__.py").write_text(COMMAND)
    return scripts.start.Side(name="here", root=package.parents[1], python=Path(sys.executable))


def test_a_run_is_watched_from_its_command_to_its_end(
    scripts: SimpleNamespace, side: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    turn = scripts.start.started(side, tmp_path / "start_0_here", tmp_path / "cache", ["+smoke=tiny"])
    assert turn.first_step > 0
    assert turn.closing >= 0
    assert {"controller", "rollout"} <= set(turn.cpu)
    assert turn.cpu["controller"] > 0
    assert turn.memory["controller"] > 1 << 20
    assert turn.memory["rollout"] > 1 << 20
    assert "start_0_here: first step" in capsys.readouterr().out


def test_a_killed_replica_serves_again_under_another_number(
    scripts: SimpleNamespace, side: Any, tmp_path: Path
) -> None:
    assert scripts.start.restarted(side, tmp_path / "restart_0_here", tmp_path / "cache", []) > 0
    said = (tmp_path / "restart_0_here.out").read_text()
    assert "(-9)" in said


def test_a_run_that_fails_is_shown(
    scripts: SimpleNamespace, side: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CODE", "3")
    with pytest.raises(scripts.bench.BenchError, match=r"ended with code 3:\nstep 1/3"):
        scripts.start.started(side, tmp_path / "start_0_here", tmp_path / "cache", [])


def test_a_run_that_says_nothing_of_its_first_step_is_no_turn(
    scripts: SimpleNamespace, side: Any, tmp_path: Path
) -> None:
    main = side.root / "neoproto" / "run" / "__main__.py"
    main.write_text(COMMAND.replace("step 1/3", "something else"))
    with pytest.raises(scripts.bench.BenchError, match="no line says where the first step ends"):
        scripts.start.started(side, tmp_path / "start_0_here", tmp_path / "cache", [])


def test_only_processes_with_the_mark_count_and_ended_ones_are_kept(
    scripts: SimpleNamespace, tmp_path: Path
) -> None:
    processes = scripts.start.Processes("a-run", tmp_path)
    body = "import sys; sum(range(6_000_000)); print(flush=True); sys.stdin.read()"
    marked, other = (
        subprocess.Popen(
            [sys.executable, "-c", body],
            env={**os.environ, scripts.start.MARK: mark},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        for mark in ("a-run", "another")
    )
    rows = [{"group": "reward", "pid": marked.pid}, {"group": "actor", "pid": other.pid}]
    (tmp_path / "processes.json").write_text(json.dumps(rows))
    try:
        for one in (marked, other):
            assert one.stdout is not None
            one.stdout.readline()
        processes.look(memory=True)
        before = processes.cpu()
    finally:
        for one in (marked, other):
            one.communicate()
    assert set(before) == {"reward"}
    assert before["reward"] > 0
    assert processes.highest["reward"] > 1 << 20
    processes.look()
    assert processes.cpu() == before


@pytest.mark.parametrize(
    ("command", "name"),
    [
        (["python", "-I", "-S", "/x/meshes/guardian.py", "d40d"], "guardians"),
        (["python", "-c", "from multiprocessing.resource_tracker import main;main(24)"], "resource trackers"),
        (["python", "-c", "from monarch.actor import run_worker_loop_forever; …"], "hosts"),
        (["python", "-P", "-m", "neoproto", "meshes.bootstrap"], "bootstrap"),
        (["python", "-P", "-m", "neoproto", "meshes.common.warm", "7"], "warm parent"),
        (["python", "-I", "-S", "/x/meshes/common/warm_stub.py", "-P"], "stubs of warm workers"),
        (["/usr/bin/cc", "-c", "x.c"], "cc"),
    ],
)
def test_what_no_run_folder_names_is_known_by_its_command_line(
    scripts: SimpleNamespace, command: list[str], name: str
) -> None:
    assert scripts.start.program("\0".join([*command, ""])) == name


def test_ratios_are_of_the_same_turn_and_a_lone_checkout_has_none(scripts: SimpleNamespace) -> None:
    values = {"here": [2.0, 9.0, 1.0], "beside": [4.0, 10.0, 4.0]}
    figure, ratio = scripts.start.compared("closing", "s", values, "<= 0.5")
    assert (figure.name, figure.value, figure.goal) == ("closing", 2.0, None)
    assert figure.detail == {"all": [2.0, 9.0, 1.0], "beside": [4.0, 10.0, 4.0]}
    assert (ratio.name, ratio.value, ratio.holds) == ("closing_vs_beside", 0.5, True)
    (alone,) = scripts.start.compared("closing", "s", {"here": [2.0]}, "<= 0.5")
    assert (alone.value, alone.detail) == (2.0, {"all": [2.0]})


def test_processes_come_by_size_and_one_that_only_the_other_checkout_has_is_there(
    scripts: SimpleNamespace,
) -> None:
    turns = {
        "here": [{"rollout": 3.0, "controller": 1.0}, {"rollout": 5.0}],
        "beside": [{"rollout": 9.0, "resource trackers": 4.0}],
    }
    figures = list(scripts.start.by_process("cpu", "s", turns))
    assert [(one.name, one.value, one.detail) for one in figures] == [
        ("cpu_rollout", 4.0, {"beside": 9.0}),
        ("cpu_resource_trackers", 0.0, {"beside": 4.0}),
        ("cpu_controller", 0.5, {"beside": 0.0}),
    ]


def test_the_other_checkout_is_one_with_an_environment(scripts: SimpleNamespace, tmp_path: Path) -> None:
    (tmp_path / "neoproto").mkdir()
    with pytest.raises(scripts.bench.BenchError, match="with its environment"):
        scripts.start.sides(tmp_path)
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    (tmp_path / ".venv" / "bin" / "python").touch()
    here, beside = scripts.start.sides(tmp_path)
    assert (here.name, here.root, here.python) == ("here", SCRIPTS.parent, Path(sys.executable))
    assert (beside.name, beside.root) == ("beside", tmp_path)
    assert [one.name for one in scripts.start.sides(None)] == ["here"]


def test_sides_take_turns_in_who_goes_first(
    scripts: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    went: list[str] = []

    def fake(result: Callable[[], Any]) -> Any:
        def go(side: Any, folder: Path, cache: Path, overrides: list[str]) -> Any:
            went.append(folder.name)
            return result()

        return go

    here, beside = (
        scripts.start.Side(name=name, root=tmp_path, python=tmp_path) for name in ("here", "beside")
    )
    turn = scripts.start.Turn(first_step=1.0, closing=1.0, cpu={"actor": 1.0}, memory={"actor": 1})
    monkeypatch.setattr(scripts.start, "sides", lambda _: [here, beside])
    monkeypatch.setattr(scripts.start, "started", fake(lambda: turn))
    monkeypatch.setattr(scripts.start, "restarted", fake(lambda: 1.0))
    scripts.start.main(["--beside", "x", "--repeats", "2", "--keep", str(tmp_path)])
    assert went == [
        "warm_here",
        "warm_beside",
        "start_0_here",
        "start_0_beside",
        "start_1_beside",
        "start_1_here",
        "restart_0_here",
        "restart_0_beside",
        "restart_1_beside",
        "restart_1_here",
    ]


def test_parts_are_names_that_are_known(scripts: SimpleNamespace) -> None:
    assert scripts.start.parts("restart,start") == ("restart", "start")
    with pytest.raises(argparse.ArgumentTypeError, match="known are start, restart"):
        scripts.start.parts("stop")
