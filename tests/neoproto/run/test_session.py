"""A run's wiring, with a runtime that starts nothing."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest
from rich.table import Table

from neoproto.errors import DeadlineExceeded
from neoproto.run.cli import main
from neoproto.runtime import ResourcePool, Runtime
from neoproto.runtime.failures import ProcessFailure
from neoproto.runtime.placement import Block
from tests.neoproto.run.inputs import overrides

pytestmark = pytest.mark.usefixtures("run_log")


class SlowRuntime:
    """Its workers do not start in time."""

    closed = False

    def __enter__(self) -> SlowRuntime:
        return self

    def __exit__(self, *_: object) -> None:
        SlowRuntime.closed = True

    def placement_table(self) -> Table:
        return Table()

    def model_resource_pool(self, _: str) -> ResourcePool:
        block = Block(first_node=0, nnodes=1, first_device=0, devices_per_node=1)
        return ResourcePool(name="all", cluster="default", block=block, device_type="cpu")

    def create_resource_pool(self, **_: Any) -> str:
        return "pool"

    def watch_failures(self, _: Collection[str]) -> ProcessFailure:
        return ProcessFailure()

    def create_worker_group(self, *_: Any, name: str, timeout: float, **__: Any) -> None:
        raise DeadlineExceeded("__init__", name, [1], timeout, {1: "a stack\nof two lines"})


def test_workers_that_do_not_start_in_time_name_the_option(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    model: Path,
    train_file: Path,
) -> None:
    monkeypatch.setattr(Runtime, "from_config", lambda *_, **__: SlowRuntime())
    monkeypatch.chdir(tmp_path)
    assert main(overrides(model, train_file, "trainer.timeouts.start=7")) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert (
        "__init__ did not answer within 7.0 s; no answer from rank(s) 1; trainer.timeouts.start=7 is" in line
    )
    assert SlowRuntime.closed
