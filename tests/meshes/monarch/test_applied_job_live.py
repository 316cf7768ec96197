"""Runs on a job of `monarch apply`: they leave nothing of theirs, and the job's hosts as they were."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.meshes.applied import ROOT, AppliedJob, applied
from tests.meshes.leftovers import traces, wait_until_clean

pytestmark = pytest.mark.live

BOUND_S = 15.0


@pytest.fixture
def job(tmp_path: Path) -> Iterator[AppliedJob]:
    with applied(tmp_path / "job", NEOPROTO_MESHES="default=1") as one:
        yield one


@contextmanager
def controller(
    job: AppliedJob, mode: str, name: str
) -> Iterator[tuple[subprocess.Popen[str], dict[str, Any]]]:
    run_dir = job.folder / name
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.meshes.controller_program", mode, str(run_dir), "current"],
        cwd=job.folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line, process.communicate()[1]
        yield process, json.loads(line)
    finally:
        process.kill()
        process.communicate()


def run_once(job: AppliedJob, name: str) -> None:
    with controller(job, "close", name) as (process, told):
        assert len(told["pids"]) == 2
        folder = f"/np-{told['run_id']}-"
        assert all(folder in path for path in [*told["files"], *told["temporary"]])
        rest, errors = process.communicate(timeout=90)
    assert (process.returncode, rest, errors) == (0, "", "")
    assert traces(told["run_id"], told["pid"]) == []
    assert job.living() == job.hosts
    assert "rank 1 of 2 starts\n" in (job.folder / name / "logs" / "w" / "rank1.log").read_text()


@pytest.mark.core
def test_two_runs_after_each_other_leave_the_hosts_as_they_were(job: AppliedJob) -> None:
    for pid in job.hosts:
        assert b"NEOPROTO_RUN_ID" not in Path(f"/proc/{pid}/environ").read_bytes()
    run_once(job, "first")
    run_once(job, "second")


@pytest.mark.parametrize(
    ("mode", "ended_by", "code"),
    [
        ("raise", None, 1),
        ("stuck", "SIGINT", -signal.SIGINT),
        ("wait", "SIGTERM", 128 + signal.SIGTERM),
        ("stuck", "SIGKILL", -signal.SIGKILL),
        ("start", "SIGKILL", -signal.SIGKILL),
    ],
)
def test_however_a_run_ends_its_hosts_take_the_next(
    job: AppliedJob, mode: str, ended_by: str | None, code: int
) -> None:
    with controller(job, mode, "first") as (process, told):
        if ended_by is not None:
            process.send_signal(signal.Signals[ended_by])
        process.wait(60)
        left = wait_until_clean(told["run_id"], told["pid"], BOUND_S)
    assert (process.returncode, left) == (code, [])
    assert job.living() == job.hosts
    run_once(job, "second")


def command(folder: Path, *words: str) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, "-m", "neoproto.run", "+smoke=tiny", "runtime.monarch.job_mode=current", *words],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    return done.returncode, done.stderr


def test_a_job_that_is_not_there_or_does_not_fit_is_one_line(tmp_path: Path) -> None:
    code, said = command(tmp_path, "dry_run=true")
    assert code == 2
    assert said == (
        f"error: runtime.monarch.job_mode=current: no job is applied in {tmp_path}; "
        "type `monarch apply MODULE.job` here\n"
    )
    with applied(tmp_path, NEOPROTO_MESHES="train=1,default=1") as job:
        assert command(tmp_path, "trainer.nnodes=2") == (
            2,
            "error: topology.clusters: 'default' wants 2 host(s), the job's mesh has 1\n",
        )
        job.monarch("kill")
        assert job.living() == []
        code, said = command(tmp_path)
        assert code == 2
        assert said.startswith("error: runtime.monarch.job_mode=current: no job is applied in ")


def test_a_dead_job_and_a_mesh_of_another_name_are_one_line(tmp_path: Path) -> None:
    with applied(tmp_path, NEOPROTO_MESHES="train=1") as job:
        code, said = command(tmp_path)
        assert (code, said) == (
            2,
            "error: topology.clusters: 'default' is no mesh of the applied job, which has 'train' (1); "
            "a cluster is named as its mesh\n",
        )
        for pid in job.hosts:
            os.kill(pid, signal.SIGKILL)
        code, said = command(tmp_path)
        assert code == 2
        assert said.startswith("error: runtime.monarch.job_mode=current: the job in ")
        assert said.endswith("is no longer running; `monarch kill`, then `monarch apply` renew it\n")
        assert not (tmp_path / "outputs").exists()


STORY = """
import sys
from meshes.monarch import applied
from neoproto.errors import ConfigError
from neoproto.runtime import ClassWithInitArgs, Runtime
from told import Told

config = {"runtime": {"run_dir": sys.argv[1], "monarch": {"job_mode": "current"}}}
with Runtime.from_config(config) as runtime:
    group = runtime.create_worker_group(ClassWithInitArgs(Told), on=runtime.create_resource_pool(), name="w")
    print(*group.tell()[0])
found = applied.versions
applied.versions = lambda packages: {**found(packages), "torch": "1.0"}
try:
    Runtime.from_config({"runtime": {**config["runtime"], "run_dir": sys.argv[1] + "2"}})
except ConfigError as error:
    print(error)
"""
TOLD = """
import os
from neoproto.runtime import Worker

class Told(Worker):
    def tell(self):
        return {word!r}, os.getcwd()
"""


def test_workers_import_what_the_run_does_and_hosts_of_other_versions_are_refused(tmp_path: Path) -> None:
    """The module of the same name on the path of whoever applied the job is not seen."""
    folders = {word: tmp_path / word for word in ("applied", "run")}
    for word, folder in folders.items():
        folder.mkdir()
        (folder / "told.py").write_text(TOLD.format(word=word))
    path = os.pathsep.join([str(folders["applied"]), str(ROOT)])
    with applied(folders["applied"], PYTHONPATH=path) as job:
        (folders["run"] / ".monarch").symlink_to(job.folder / ".monarch")
        done = subprocess.run(
            [sys.executable, "-c", STORY, str(tmp_path / "out")],
            cwd=folders["run"],
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(folders["run"]), str(ROOT)])},
            capture_output=True,
            text=True,
            timeout=150,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        first, second = done.stdout.splitlines()
        assert first == f"run {folders['run']}"
        assert second.startswith("runtime.monarch.job_mode=current: host ")
        assert " (default[0]) has torch 2." in second
        assert second.endswith(", this process has 1.0")
        assert job.living() == job.hosts
