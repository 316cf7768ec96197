"""A host process that dies or stays stopped is known soon, by its name, and is not waited for."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from neoproto.errors import StoreError, WorkerDied
from neoproto.runtime import ClassWithInitArgs, Runtime
from tests.chaos.faults import helpers
from tests.meshes.leftovers import wait_until_clean
from tests.meshes.workers import Probe

pytestmark = pytest.mark.live

BOUND_S = 15.0


@pytest.mark.parametrize(
    ("name", "cause"),
    [pytest.param("SIGKILL", "signal 9", marks=pytest.mark.core), ("SIGSTOP", "stopped by a signal")],
)
def test_a_host_that_is_lost_takes_its_workers_along_by_name(name: str, cause: str, tmp_path: Path) -> None:
    with Runtime.from_config({"runtime": {"run_dir": str(tmp_path), "stopped_timeout": 2}}) as runtime:
        group = runtime.create_worker_group(
            ClassWithInitArgs(Probe), on=runtime.create_resource_pool(1, 2), name="w"
        )
        lost = runtime.watch_failures(["w"])
        found = helpers(os.getpid())
        (host,) = [pid for kind, _, pid in found if kind == "host"]
        (guardian,) = [pid for kind, _, pid in found if kind == "guardian"]
        os.kill(guardian, signal.SIGSTOP)  # it is replaced, and none stays behind
        call = group.submit("sleep", (60.0,), timeout=100)
        began = time.monotonic()
        os.kill(host, signal.Signals[name])
        said = rf"its host default\[0\] \(process {host}\) died: {cause}"
        with pytest.raises((StoreError, WorkerDied), match=said):
            lost.result(timeout=BOUND_S)
        with pytest.raises(WorkerDied, match=said):
            call.result()
        with pytest.raises(WorkerDied, match=said):
            group.whoami()
        with pytest.raises(WorkerDied, match=rf"v\[0\] on .*{said}"):
            runtime.create_worker_group(
                ClassWithInitArgs(Probe), on=runtime.create_resource_pool(1, 1), name="v"
            )
        assert time.monotonic() - began < BOUND_S
    assert wait_until_clean(runtime.run_id, None, 2.0) == []
    assert not Path(f"/proc/{guardian}").exists()
