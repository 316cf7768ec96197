"""Which faults are this run's own, and never Monarch's to end the program for."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from meshes import sdk
from meshes.backend import MonarchBackend, MonarchGroup
from neoproto.errors import RuntimeClosed


@pytest.mark.parametrize(
    ("mesh", "report", "ours"),
    [
        (
            "index",
            "The actor <root>.<neoproto.store.engine.Index index{'hosts': 0/1, 'index': 0/1}> and all its "
            "descendants have failed:\n  the process this actor was running on failed: Killed(sig=9)",
            True,
        ),
        ("np-actor-1", "The actor <root>.<meshes.container.Container np-actor-1> failed", True),
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

    monkeypatch.setattr("meshes.backend.MonarchGroup", lambda *_: Slow(given_up=False))
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
