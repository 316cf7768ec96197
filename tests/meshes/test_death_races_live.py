"""Calls submitted at the very moment of a death.

A try is a process killed while calls to it are being submitted. `NEOPROTO_DEATH_TRIES` says how many there
are: few by default, since each takes a process.
"""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from neoproto.errors import WorkerDied
from neoproto.runtime import ClassWithInitArgs, RemoteCall, RemoteWorkerGroup, Runtime
from tests.meshes.leftovers import wait_until_clean
from tests.meshes.workers import Probe

pytestmark = pytest.mark.live

TRIES = int(os.environ.get("NEOPROTO_DEATH_TRIES", "12"))
RANKS = 6
BOUND_S = 5.0


@pytest.fixture
def runtime(tmp_path: Path) -> Iterator[Runtime]:
    with Runtime.from_config({"runtime": {"run_dir": str(tmp_path)}}) as runtime:
        yield runtime
    assert wait_until_clean(runtime.run_id, None, 2.0) == []


def kill_after(pid: int, seconds: float) -> threading.Thread:
    def kill() -> None:
        time.sleep(seconds)
        os.kill(pid, signal.SIGKILL)

    thread = threading.Thread(target=kill)
    thread.start()
    return thread


def submit_through_a_death(rank: RemoteWorkerGroup, pid: int, delay: float, method: str) -> float:
    """Submit until a call is refused; the seconds from the kill until the last call had ended."""
    calls: list[RemoteCall[object]] = []
    killer = kill_after(pid, delay)
    killed = time.monotonic() + delay
    while True:
        try:
            calls.append(rank.submit(method, (1,)))
        except WorkerDied:
            break
        assert time.monotonic() < killed + BOUND_S, "calls to a dead worker are still accepted"
        time.sleep(random.choice((0.0, 0.0005, 0.02)))
    for call in calls:
        try:
            call.result(timeout=max(0.0, killed + BOUND_S - time.monotonic()))
        except WorkerDied as died:
            assert died.cause  # noqa: PT017 - either end is right
    killer.join()
    return time.monotonic() - killed


def test_no_call_hangs_however_close_to_the_death(runtime: Runtime) -> None:
    pool = runtime.create_resource_pool(1, RANKS)
    slowest, done = 0.0, 0
    while done < TRIES:
        group = runtime.create_worker_group(ClassWithInitArgs(Probe), on=pool, name="probe")
        pids = group.submit("where", blocking=True)
        for index in range(min(RANKS, TRIES - done)):
            rank = group.rank(index)
            delay = random.uniform(0.0, 0.01)
            method = ("add", "echo")[done % 2]
            slowest = max(slowest, submit_through_a_death(rank, pids[index], delay, method))
            with pytest.raises(WorkerDied):
                rank.submit("add", (1,))
            if index + 1 < RANKS:
                assert group.rank(RANKS - 1).submit("echo", ("on",), timeout=10).result() == ["on"]
            done += 1
        group.close()
        print(f"{done} tries, slowest {slowest:.2f} s", flush=True)
    assert slowest < BOUND_S
