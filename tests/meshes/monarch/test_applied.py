"""What of an applied job is judged without connecting to it."""

from __future__ import annotations

import sysconfig
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from monarch.job import ProcessJob

from meshes.monarch.applied import (
    AppliedHosts,
    _declared_sizes,
    _import_path,
    check_applied_job,
    check_meshes,
    compare_versions,
    missing_gpus,
)
from meshes.monarch.probe import HostReport
from meshes.monarch.workers_job import WorkersJob
from neoproto.errors import ConfigError
from neoproto.runtime.backend import BackendOptions


def report(**versions: str) -> HostReport:
    return HostReport(
        node=1,
        host="node7",
        machine="m",
        versions=versions,
        gpus=(),
        tmp_dir="/tmp/x",
        cache_dir="/tmp/c",
        sees_run_dir=True,
        unguarded=None,
    )


def test_clusters_are_meshes_of_the_job_and_no_larger() -> None:
    check_meshes({"a": 2, "b": 1}, {"a": 2, "b": 4, "c": 1})
    with pytest.raises(ConfigError) as raised:
        check_meshes({"a": 3, "x": 1}, {"a": 2, "b": 4})
    assert raised.value.problems == (
        "topology.clusters: 'a' wants 3 host(s), the job's mesh has 2",
        "topology.clusters: 'x' is no mesh of the applied job, which has 'a' (2), 'b' (4); "
        "a cluster is named as its mesh",
    )


def test_every_difference_of_versions_names_host_package_and_both() -> None:
    here = {"torch": "2.13.0", "torchstore": "0.1.2"}
    reports = [("d[0]", report(**here)), ("d[1]", report(torch="2.12.0"))]
    assert compare_versions(reports, here) == [
        "runtime.monarch.job_mode=current: host node7 (d[1]) has torch 2.12.0, this process has 2.13.0",
        "runtime.monarch.job_mode=current: host node7 (d[1]) has torchstore None, this process has 0.1.2",
    ]


def test_a_host_with_fewer_gpus_than_the_topology_says_is_named() -> None:
    found = {"a": [report(), report()], "b": [report()]}
    assert missing_gpus(found, {}) == []
    assert missing_gpus(found, {"b": 8}) == [
        "topology.clusters: 'b' has 8 GPUs a node, host node7 (b[1]) has 0"
    ]


def test_a_host_without_a_guardian_has_no_warm_parent(tmp_path: Path) -> None:
    """The host lives on, Monarch ends only what it has started, and the parent would stay."""
    options = BackendOptions(run_id="r", run_dir=tmp_path, clusters={"a": 1}, env={})
    hosts = AppliedHosts(options, str(tmp_path), Future())
    assert hosts._node("a", report()).warm
    assert not hosts._node("a", replace(report(), unguarded="10.0.0.1:5: Connection refused")).warm


def test_sizes_of_every_kind_of_job() -> None:
    assert _declared_sizes(ProcessJob({"a": 2})) == {"a": 2}
    assert _declared_sizes(WorkersJob({"a": ["tcp://h:1", "tcp://h:2"]})) == {"a": 2}
    assert _declared_sizes(SimpleNamespace(_meshes={"a": {"num_replicas": 3}})) == {"a": 3}
    assert _declared_sizes(SimpleNamespace()) is None


def test_a_folder_without_a_readable_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=f"no job is applied in {tmp_path}; type `monarch apply"):
        check_applied_job({"default": 1})
    folder = tmp_path / ".monarch"
    folder.mkdir()
    (folder / "job_state.pkl").write_bytes(b"not a pickle")
    with pytest.raises(ConfigError, match=r"job_state\.pkl cannot be read"):
        check_applied_job({"default": 1})
    ProcessJob({"default": 1}).dump(str(folder / "job_state.pkl"))
    with pytest.raises(ConfigError, match="is no longer running"):
        check_applied_job({"default": 1})


def test_a_scheduler_that_cannot_be_asked_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    job = WorkersJob({"default": ["tcp://127.0.0.1:1"]})
    job._status = "running"
    job.dump(".monarch/job_state.pkl")
    with pytest.raises(ConfigError, match="is no longer running"):
        check_applied_job({"default": 1})

    def broken(self: WorkersJob) -> bool:
        raise FileNotFoundError("squeue")

    monkeypatch.setattr(WorkersJob, "_is_running", broken)
    with pytest.raises(ConfigError, match=r"cannot tell if the job in .* is alive: squeue"):
        check_applied_job({"default": 1})
    monkeypatch.setattr(WorkersJob, "_is_running", lambda self: True)
    check_applied_job({"default": 1})
    with pytest.raises(ConfigError, match="wants 2 host"):
        check_applied_job({"default": 2})


def test_workers_do_not_import_from_this_interpreters_own_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.path", ["/mine", sysconfig.get_path("stdlib"), "/usr/lib/python311.zip"])
    assert _import_path() == "/mine"
