"""Which faults are this run's own, and never Monarch's to end the program for."""

from __future__ import annotations

import pytest

from meshes.backend import MonarchBackend


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
