from __future__ import annotations

from types import SimpleNamespace

import monarch.actor
import pytest

from meshes.monarch.faults import FaultHook, parse_fault


def test_reports_name_rank_and_cause() -> None:
    killed = (
        "The actor <root>.<meshes.monarch.container.Container np-w{'hosts': 1/2, 'procs': 1/4}> and all its "
        "descendants have failed:\n  the process this actor was running on failed: Killed(sig=9)"
    )
    assert parse_fault(killed) == (5, "signal 9 (SIGKILL)")
    assert parse_fault("{'hosts': 0/1, 'procs': 2/4} failed: Stopped(exit_code=3)") == (2, "exit code 3")
    assert parse_fault("something else\n  broke") == (None, "broke")
    assert parse_fault("") == (None, "unknown")


def test_faults_of_others_go_to_the_hook_that_was_there(monkeypatch: pytest.MonkeyPatch) -> None:
    passed_on: list[str] = []
    before = lambda failure: passed_on.append(failure.mesh_name)  # noqa: E731
    monkeypatch.setattr(monarch.actor, "unhandled_fault_hook", before)
    hook = FaultHook(lambda mesh_name, report: mesh_name == "ours" and report == "broke")
    for name in ("ours", "another"):
        monarch.actor.unhandled_fault_hook(SimpleNamespace(mesh_name=name, report=lambda: "broke"))
    assert passed_on == ["another"]
    hook.restore()
    assert monarch.actor.unhandled_fault_hook is before


def test_a_hook_that_was_replaced_since_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(monarch.actor, "unhandled_fault_hook", print)
    hook = FaultHook(lambda *_: True)
    monkeypatch.setattr(monarch.actor, "unhandled_fault_hook", repr)
    hook.restore()
    assert monarch.actor.unhandled_fault_hook is repr
