"""A run with Monarch's public API alone: in each of its processes, to ask for a private name is an error."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from neoproto.errors import DeadlineExceeded, WorkerDied
from neoproto.private_api import monarch as private
from neoproto.runtime import ClassWithInitArgs, Runtime, get, put
from tests.meshes.leftovers import wait_until_clean
from tests.meshes.workers import Caller, Probe

pytestmark = [pytest.mark.live, pytest.mark.core]


@pytest.fixture
def runtime(tmp_path: Path) -> Iterator[Runtime]:
    monarch = {"private_api": False}
    with Runtime.from_config({"runtime": {"run_dir": str(tmp_path), "monarch": monarch}}) as runtime:
        yield runtime
    assert wait_until_clean(runtime.run_id, None, 2.0) == []


def test_calls_the_store_and_deaths_work_through_the_public_api(runtime: Runtime) -> None:
    assert not private.private_api()
    pool = runtime.create_resource_pool(1, 2)
    group = runtime.create_worker_group(ClassWithInitArgs(Probe), on=pool, name="probe")
    assert group.environment(private.PRIVATE_API_VARIABLE) == ["0", "0"]
    callers = runtime.create_worker_group(
        ClassWithInitArgs(Caller), on=runtime.create_resource_pool(1, 2), name="caller"
    )
    # Two workers and the controller call collectives: ranks in different orders would hang.
    theirs = callers.submit("call_often", (group, 20), timeout=150)
    ours = [group.submit("all_reduce", timeout=150) for _ in range(20)]
    assert [call.result() for call in ours] == [[3.0, 3.0]] * 20
    assert theirs.result() == [[[3.0, 3.0]] * 20] * 2
    assert callers.root_clients() == [False, False], "no worker makes a root client"

    values = [torch.arange(1 << 20), {"a": 1}]
    refs = [put(value) for value in values]
    assert torch.equal(get(refs[0]), values[0])
    assert get(refs[1]) == values[1]
    assert group.through_the_store(5) == [5, 5]

    with pytest.raises(DeadlineExceeded):
        group.submit("doze", (60.0,), timeout=0.5).result()
    victim = group.whoami()[1]["pid"]
    waiting = group.submit("doze", (60.0,), timeout=100)
    os.kill(victim, signal.SIGKILL)
    with pytest.raises(WorkerDied, match="SIGKILL"):
        waiting.result()
