"""Hosts: which Monarch job they come from, who owns it, and how it ends."""

from __future__ import annotations

import contextlib
import getpass
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from typing import Any

from meshes import sdk
from meshes.guardian import MARK

CACHE_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"
MESH_PREFIX = "np-"
"""How the names of all meshes of a run begin, so that its faults are known by them."""


class PrivateHosts:
    """A private `ProcessJob`: each node of each cluster is a process of its own session on this machine."""

    def __init__(self, run_id: str, tmp_dir: str, env: Mapping[str, str], closing: Future[None]) -> None:
        """Args:
        tmp_dir: the run's folder for sockets and temporary files, removed with the run.
        env: environment of the hosts, which worker processes inherit.
        closing: once it is done, no hosts are waited for.
        """
        self._tmp_dir = tmp_dir
        self._env = {
            CACHE_VARIABLE: os.environ.get(CACHE_VARIABLE) or _inductor_cache(),
            **env,
            MARK: run_id,
            # Workers import what the controller can import: a user's module lies on its path, not on ours.
            "PYTHONPATH": os.pathsep.join(dict.fromkeys(path or os.getcwd() for path in sys.path)),
            "TMPDIR": tmp_dir,
        }
        self._closing = closing
        self._jobs: list[Any] = []
        self._meshes: dict[str, Any] = {}

    def add_cluster(self, name: str, nnodes: int) -> None:
        """Start the hosts of a cluster."""
        if name not in self._meshes:
            self._meshes.update(self._start({name: nnodes}))

    def add_clusters(self, clusters: Mapping[str, int]) -> None:
        """Start the hosts of several clusters, as one job."""
        self._meshes.update(self._start(dict(clusters)))

    def hosts(self, cluster: str, first: int, count: int) -> Any:
        """Nodes of a cluster, as a HostMesh."""
        mesh = self._meshes[cluster]
        return mesh.slice(hosts=slice(first, first + count))

    def beside_controller(self) -> Any:
        """A HostMesh of one host on the controller's machine."""
        return self.hosts(next(iter(self._meshes)), 0, 1)

    def everywhere(self) -> list[Any]:
        """All hosts, a HostMesh for each cluster."""
        return list(self._meshes.values())

    def close(self) -> None:
        """Kill the hosts and everything in their sessions."""
        for job in self._jobs:
            job.kill()
        self._jobs.clear()

    def _start(self, clusters: dict[str, int]) -> dict[str, Any]:
        from monarch.job import ProcessJob

        keys = {name: f"{MESH_PREFIX}hosts{len(self._meshes) + index}" for index, name in enumerate(clusters)}
        job = ProcessJob({keys[name]: nnodes for name, nnodes in clusters.items()}, env=self._env)
        self._jobs.append(job)

        def start() -> dict[str, Any]:
            with _temporary_folder(self._tmp_dir):
                state = job.state(cached_path=None)
            return {name: getattr(state, keys[name]) for name in clusters}

        return sdk.run_blocking(start, self._closing)


def _inductor_cache() -> str:
    """Where torch keeps what it compiled: among the temporary files, by default, which go with the run."""
    return os.path.join(tempfile.gettempdir(), f"torchinductor_{getpass.getuser()}")


@contextlib.contextmanager
def _temporary_folder(path: str) -> Iterator[None]:
    """Make `tempfile` use a folder within the block: a job has no option for where its sockets go."""
    before = tempfile.tempdir
    tempfile.tempdir = path
    try:
        yield
    finally:
        tempfile.tempdir = before
