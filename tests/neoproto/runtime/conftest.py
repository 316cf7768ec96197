"""A runtime whose workers are in this process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from neoproto.runtime import Runtime
from neoproto.runtime.backend import BACKENDS
from tests.neoproto.runtime.in_process import WHERE, InProcessBackend


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Runtime]:
    """An open runtime on an `InProcessBackend`."""
    monkeypatch.setitem(BACKENDS, "in-process", WHERE)
    with Runtime.from_config({"backend": "in-process", "run_dir": str(tmp_path / "run")}) as made:
        yield made


@pytest.fixture
def backend(runtime: Runtime) -> InProcessBackend:
    """The backend of `runtime`."""
    return InProcessBackend.latest
