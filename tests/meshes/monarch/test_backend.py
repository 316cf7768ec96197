"""Which faults are this run's own, and never Monarch's to end the program for."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from meshes.common.topology import compile_here
from meshes.monarch import sdk
from meshes.monarch.backend import HOST_KEY, PARENT_KEY, MonarchBackend, MonarchGroup
from meshes.monarch.commands import WarmCommands
from meshes.monarch.jobs import HostProcess, Node, host_processes
from neoproto.config import RuntimeConfig
from neoproto.config.load import load_runtime
from neoproto.errors import ConfigError, NeoProtoError, RuntimeClosed, WorkerDied
from neoproto.private_api import monarch as private
from neoproto.runtime.backend import Preload, ProcessInfo, check_hosts
from neoproto.runtime.placement import Block


@pytest.mark.parametrize(
    ("mesh", "report", "ours"),
    [
        (
            "index",
            "The actor <root>.<neoproto.store.torchstore.actors.Index index{'hosts': 0/1, 'index': 0/1}> and "
            "all its descendants have failed:\n  the process this actor was running on failed: Killed(sig=9)",
            True,
        ),
        ("np-actor-1", "The actor <root>.<meshes.monarch.container.Container np-actor-1> failed", True),
        ("logger-1", "The actor <root>.<logger-1> failed", True),
        ("theirs", "The actor <root>.<somebody.Else theirs> failed", False),
    ],
)
def test_faults_of_the_run_are_kept_from_monarchs_hook(mesh: str, report: str, ours: bool) -> None:
    assert MonarchBackend()._on_fault(mesh, report) is ours


@pytest.mark.parametrize("end", ["complete", "failed", "given up"])
def test_a_start_that_comes_to_nothing_is_stopped_again(end: str, monkeypatch: pytest.MonkeyPatch) -> None:
    stopped: list[object] = []
    monkeypatch.setattr(sdk, "stop_procs", lambda procs, _: stopped.append(procs) or True)
    group = MonarchGroup.__new__(MonarchGroup)
    group.given_up = False

    def start(_: float) -> None:
        group._procs = "processes"
        group.given_up = end == "given up"
        if end == "failed":
            raise TimeoutError

    monkeypatch.setattr(group, "_start", start)
    if end == "failed":
        with pytest.raises(TimeoutError):
            group.start(1.0)
    else:
        group.start(1.0)
    assert stopped == ([] if end == "complete" else ["processes"])


def test_whoever_waits_for_a_start_is_told_when_the_runtime_closes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    begun, go = threading.Event(), threading.Event()
    groups: list[Any] = []

    class Slow(SimpleNamespace):
        def start(self, _: float) -> None:
            groups.append(self)
            begun.set()
            go.wait(20)

    monkeypatch.setattr("meshes.monarch.backend.MonarchGroup", lambda *_: Slow(given_up=False))
    block = SimpleNamespace(first_node=0, nnodes=1, nodes=range(1))
    pool = SimpleNamespace(block=block, beside_controller=True, cluster="")
    backend: Any = MonarchBackend()
    backend._hosts = SimpleNamespace(beside_controller=lambda: None, kill=lambda *_: None)
    backend._deaths, backend._options = object(), SimpleNamespace(clusters={"c": 1}, run_id="r")
    threading.Thread(target=lambda: (begun.wait(20), backend.stop_spawning())).start()
    with pytest.raises(RuntimeClosed):
        backend.spawn_group(SimpleNamespace(pool=pool, key="k", name="g"), 20.0)
    assert groups[0].given_up, "its own thread then stops what it has started"
    assert sdk.helpers_left()
    go.set()
    with pytest.raises(RuntimeClosed):
        backend.spawn_group(SimpleNamespace(pool=pool, key="l", name="g"), 20.0)


def test_hosts_of_this_machine_are_found_by_their_job() -> None:
    pids = {"np-hosts0_0": SimpleNamespace(pid=7), "np-hosts0_1": SimpleNamespace(pid=8)}
    pids |= {"np-hosts0_x": SimpleNamespace(pid=9), "np-hosts01_0": SimpleNamespace(pid=10)}
    found = host_processes(SimpleNamespace(_host_to_pid=pids), {"a": "np-hosts0"}, ours=True)
    assert [(one.name, one.pid) for one in found] == [
        ("host a[0] (process 7)", 7),
        ("host a[1] (process 8)", 8),
    ]
    assert host_processes(object(), {"a": "np-hosts0"}, ours=True) == []


@pytest.mark.parametrize("ours", [True, False])
def test_workers_are_lost_with_their_host_and_say_so(
    ours: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Whoever is seen to end first; what is on another host is not concerned."""
    monkeypatch.setattr("meshes.common.procs.lives", lambda pid: pid != 70)
    backend: Any = MonarchBackend()
    backend._watched_hosts = [
        HostProcess(cluster="c", node=node, pid=70 + node, ours=ours) for node in (0, 1)
    ]
    backend._sessions = {("g", 0): 70, ("g", 1): 71, ("h", 0): 70}
    backend._options = SimpleNamespace(clusters={"c": 2})
    seen: list[tuple[str, int, str | None]] = []
    backend._report_death = lambda *report: seen.append(report)
    backend._on_death("g", 0, "signal 9 (SIGKILL)")
    assert seen == [], "its host has ended too, and that is the cause"
    backend._on_death(HOST_KEY, 0, None)
    assert seen == [("g", 0, None), ("h", 0, None)]
    pool = SimpleNamespace(
        cluster="c",
        beside_controller=False,
        block=Block(first_node=0, nnodes=1, first_device=0, devices_per_node=2),
    )
    request: Any = SimpleNamespace(name="new", pool=pool)
    with pytest.raises(WorkerDied, match=r"new\[0\] on .* died: its host c\[0\] \(process 70\) died"):
        backend._check_hosts(request)
    seen.clear()
    backend._on_death(HOST_KEY, 0, "stopped by a signal for 10.0 s")
    word = "died:" if ours else "is"
    cause = f"its host c[0] (process 70) {word} stopped by a signal for 10.0 s"
    assert seen == [("g", 0, cause), ("h", 0, cause)]
    assert cause in caplog.text
    backend._on_death("h", 0, "exit code 1")
    backend._on_death("g", 1, "exit code 1")
    assert seen[2:] == [("h", 0, cause), ("g", 1, "exit code 1")]
    pool.block = Block(first_node=1, nnodes=1, first_device=0, devices_per_node=2)
    backend._check_hosts(request)


def test_only_a_process_of_the_run_is_watched_as_a_warm_parent(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker whose parent has just died has another one, which would be killed while it is stopped."""
    monkeypatch.setattr("meshes.monarch.backend.is_marked", lambda pid, run_id: (pid, run_id) != (1, "r"))
    watched: list[tuple[str, int, int]] = []
    backend: Any = MonarchBackend()
    backend._options = SimpleNamespace(run_id="r")
    backend._deaths = SimpleNamespace(watch=lambda *of: watched.append(of))
    processes = [
        ProcessInfo(rank=rank, pid=10 + rank, host="h", rendezvous=None, parent=parent)
        for rank, parent in enumerate([7, 1, 7, 0])
    ]
    backend._watch_parents(SimpleNamespace(processes=processes))
    assert watched == [(PARENT_KEY, 7, 7)]


@pytest.mark.parametrize("warm", [True, False])
def test_processes_are_forked_only_where_a_parent_may_be(
    warm: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(private, "bootstrap_command", lambda _, arguments, env: arguments)
    backend: Any = MonarchBackend()
    backend._warm = WarmCommands(tmp_path, {}, [Preload(modules=("json",), env={})])
    host = Node(env={}, warm=warm)
    group: Any = MonarchGroup.__new__(MonarchGroup)
    group._warm, group._hosts = backend._warm, SimpleNamespace(nodes=[host], one_machine=True)
    block = Block(first_node=0, nnodes=1, first_device=0, devices_per_node=1)
    pool = SimpleNamespace(block=block, device_type="cpu")
    group.request = SimpleNamespace(pool=pool, env={}, preload=("json",), log_dir=tmp_path)
    commands = [backend._store_command(tmp_path / "index.log", host), group._command(SimpleNamespace(rank=0))]
    assert [any("warm_stub" in word for word in command) for command in commands] == [warm, warm]


def test_a_start_is_given_up_when_its_host_is_lost() -> None:
    backend: Any = MonarchBackend()
    backend._watched_hosts = [HostProcess(cluster="c", node=0, pid=70, ours=True)]
    lose = threading.Thread(target=backend._on_death, args=(HOST_KEY, 0, "signal 9 (SIGKILL)"))
    said = r"the run did not start: its host c\[0\] .* died: signal 9"
    with pytest.raises(NeoProtoError, match=said), backend._start_of_hosts():
        sdk.run_blocking(lambda: (lose.start(), threading.Event().wait(20)), backend._closing)
    lose.join()
    other: Any = MonarchBackend()
    with pytest.raises(RuntimeClosed), other._start_of_hosts():
        raise RuntimeClosed("by a signal")
    assert not other._starting


def test_hosts_that_a_run_does_not_make_are_looked_for_before_it_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    placement = compile_here(
        {"clusters": [{"name": "c", "nnodes": 1, "n_gpus_per_node": 1, "device_type": "cpu"}]},
        hosts_are_here=True,
    )
    check_hosts(RuntimeConfig(), placement)
    applied = load_runtime({"runtime": {"monarch": {"job_mode": "current"}}}).runtime
    assert not applied.hosts_are_here
    with pytest.raises(ConfigError, match=r"job_mode=current: no job is applied in"):
        check_hosts(applied, placement)
