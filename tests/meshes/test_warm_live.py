"""Workers that are forked from the warm parent of their host, on real Monarch processes."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from meshes.common import procs
from meshes.common.guardian import is_marked, marked_processes
from neoproto.errors import WorkerDied
from neoproto.runtime import ClassWithInitArgs, Runtime, WorkerGroup
from neoproto.runtime.backend import Preload
from tests.meshes.leftovers import wait_until_clean
from tests.meshes.waiting import wait_until
from tests.meshes.workers import Probe

pytestmark = pytest.mark.live

MODULES = ("colorsys",)


@pytest.fixture
def runtime(tmp_path: Path) -> Iterator[Runtime]:
    with Runtime.from_config({"runtime": {"run_dir": str(tmp_path)}}) as runtime:
        yield runtime
    assert wait_until_clean(runtime.run_id, None, 2.0) == []


def start(runtime: Runtime, name: str, count: int = 1, env: Mapping[str, str] | None = None) -> WorkerGroup:
    workers = ClassWithInitArgs(Probe, preload=MODULES, env=env)
    return runtime.create_worker_group(workers, on=runtime.create_resource_pool(1, count), name=name)


def parents(group: WorkerGroup) -> list[int]:
    """The warm parent of each process; 0 of a fresh one."""
    return [int(one or 0) for one in group.environment("NEOPROTO_WARM_PARENT")]


def pid(group: WorkerGroup) -> int:
    found: int = group.submit("where", timeout=30).result()[0]
    return found


@pytest.mark.core
def test_groups_of_a_host_come_from_one_parent_and_fail_as_others_do(
    runtime: Runtime, tmp_path: Path
) -> None:
    first = start(runtime, "first", 2)
    second = start(runtime, "second", env={"RANK": "5", "NEOPROTO_X": "y"})
    (parent,) = {*parents(first), *parents(second)}
    assert parent
    assert is_marked(parent, runtime.run_id)
    assert os.getsid(parent) == os.getsid(pid(second)), "a host's death takes along what is in its session"
    assert second.environment("NEOPROTO_X") == ["y"]
    assert first.all_reduce() == [3.0, 3.0]
    second.write("words")
    log = (tmp_path / "logs" / "second" / "rank0.log").read_text()
    assert "native words" in log
    call = second.submit("sleep", (60,))
    os.kill(pid(second), signal.SIGKILL)
    with pytest.raises(WorkerDied, match=r"signal 9 \(SIGKILL\)"):
        call.result(timeout=30)
    again = start(runtime, "second")
    assert parents(again) == [parent]
    again.close()
    assert "warm parent" not in (tmp_path / "logs" / "controller.log").read_text()
    others = start(runtime, "other", env={"ANYTHING": "else"})
    assert parents(others) == [0]
    assert others.environment("ANYTHING") == ["else"]


def test_workers_live_on_without_their_parent(runtime: Runtime, tmp_path: Path) -> None:
    group = start(runtime, "group")
    (parent,) = parents(group)
    os.kill(parent, signal.SIGKILL)
    log = tmp_path / "logs" / "controller.log"
    wait_until(lambda: f"warm parent {parent} died: signal 9" in log.read_text())
    assert group.add(1) == [1]
    assert parents(start(runtime, "later")) == [0]
    os.kill(pid(group), signal.SIGKILL)
    with pytest.raises(WorkerDied):
        group.submit("sleep", (60,)).result(timeout=30)


def test_a_worker_dies_with_its_stub(runtime: Runtime) -> None:
    group = start(runtime, "group")
    worker = pid(group)
    (stub,) = [one for one in marked_processes(runtime.run_id) if "warm_stub" in procs.command(one)]
    call = group.submit("hold_the_interpreter", (60,))
    os.kill(stub, signal.SIGKILL)
    with pytest.raises(WorkerDied):
        call.result(timeout=30)
    assert not procs.lives(worker)


def test_a_parent_that_takes_long_to_import_is_not_waited_for(runtime: Runtime) -> None:
    """Monarch would wait for the worker in vain."""
    workers = ClassWithInitArgs(Probe, preload=("tests.meshes.slow_import",))
    group = runtime.create_worker_group(workers, on=runtime.create_resource_pool(1, 1), name="group")
    assert parents(group) == [0]
    assert group.add(1) == [1]


def test_there_is_no_parent_where_none_is_wanted(tmp_path: Path) -> None:
    with Runtime.from_config({"runtime": {"run_dir": str(tmp_path), "warm_parent": False}}) as runtime:
        assert parents(start(runtime, "group")) == [0]
        assert not [
            one for one in marked_processes(runtime.run_id) if "meshes.common.warm" in procs.command(one)
        ]


def test_libraries_that_read_their_threads_early_have_those_of_the_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MKL_NUM_THREADS", raising=False)
    settings = {"run_dir": str(tmp_path), "env_vars": {"OMP_NUM_THREADS": "2"}}
    two, one = (
        ClassWithInitArgs(Probe, preload=("torch",), env={"OMP_NUM_THREADS": count}) for count in ("2", "1")
    )
    expected = [Preload(modules=each.preload, env=each.env) for each in (two, one)]
    with Runtime.from_config({"runtime": settings}, expected=expected) as runtime:
        pool = runtime.create_resource_pool()
        group = runtime.create_worker_group(two, on=pool, name="two")
        other = runtime.create_worker_group(one, on=pool, name="one")
        assert parents(group) == parents(other) != [0]
        assert group.environment("OMP_NUM_THREADS") == ["2"]
        assert other.environment("OMP_NUM_THREADS") == ["1"]
        assert other.threads() == [(1, 1)]
