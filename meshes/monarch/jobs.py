"""Hosts: which Monarch job they come from, who owns it, and how it ends."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol

from meshes.common.guardian import MARK
from meshes.common.machine import CACHE_VARIABLE, inductor_cache, visible_gpus
from meshes.monarch import sdk
from neoproto.private_api.monarch import host_pids, private_api

MESH_PREFIX = "np-"
"""How the names of all meshes of a run begin, so that its faults are known by them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Node:
    """What processes on one host are started with.

    Attributes:
        env: environment they do not inherit from the host.
        gpus: what `CUDA_VISIBLE_DEVICES` calls its GPUs; empty if it has none, or they are not known.
        name: what its guardian is called; None where the controller's own sees to it.
        machine: its `machine_id`; "" is the controller's.
        warm: it may have a warm parent: something there ends that with the run.
    """

    env: Mapping[str, str]
    gpus: tuple[str, ...] = ()
    name: str | None = None
    machine: str = ""
    warm: bool = True

    def gpu(self, device: int) -> str:
        """The `CUDA_VISIBLE_DEVICES` of one device."""
        return self.gpus[device] if device < len(self.gpus) else str(device)


@dataclass(kw_only=True, slots=True)
class HostProcess:
    """A host that is a process of this machine. Those of its workers are in its session.

    Attributes:
        cluster, node: which host.
        pid: its process, and its session.
        ours: the run made it, and may end it.
        lost: it has died, or stays stopped; its cause may be known later.
        cause: of that, in words.
    """

    cluster: str
    node: int
    pid: int
    ours: bool
    lost: bool = False
    cause: str = ""

    @property
    def name(self) -> str:
        """For people."""
        return f"host {self.cluster}[{self.node}] (process {self.pid})"


def host_processes(job: Any, keys: Mapping[str, str], *, ours: bool) -> list[HostProcess]:
    """The hosts of a job that are processes of this machine; [] if the job is of another kind.

    Args:
        keys: cluster -> the job's name for its mesh.
    """
    pids = host_pids(job)
    return [
        HostProcess(cluster=cluster, node=int(number), pid=pid, ours=ours)
        for cluster, key in keys.items()
        for name, pid in pids.items()
        if (number := name.removeprefix(f"{key}_")).isdigit() and name.startswith(f"{key}_")
    ]


@dataclass(frozen=True, kw_only=True, slots=True)
class Nodes:
    """Some hosts.

    Attributes:
        mesh: a HostMesh.
        nodes: what is known of each, in order.
        counted: the mesh has the dimension "hosts"; Monarch's own of one machine has none.
    """

    mesh: Any
    nodes: tuple[Node, ...]
    counted: bool = True

    @property
    def one_machine(self) -> bool:
        """Whether they are all on the same machine."""
        return len({node.machine for node in self.nodes}) == 1


class Hosts(Protocol):
    """Where a run's processes are started."""

    def prepare_client(self) -> None:
        """Say how this process is reached, before its Monarch client is made."""
        ...

    def add_clusters(self, clusters: Mapping[str, int]) -> None:
        """Get the hosts of several clusters: name -> number of nodes."""
        ...

    def add_cluster(self, name: str, nnodes: int) -> None:
        """Get the hosts of one more cluster."""
        ...

    def hosts(self, cluster: str, first: int, count: int) -> Nodes:
        """Nodes of a cluster."""
        ...

    def beside_controller(self) -> Nodes:
        """One host on the controller's machine."""
        ...

    @property
    def on_this_machine(self) -> Sequence[HostProcess]:
        """Hosts that are processes of this machine."""
        ...

    def guard_shm(self, prefix: str) -> None:
        """Have shared-memory files whose names begin so removed with the run, on every host."""
        ...

    def kill(self, node: Node, pid: int) -> None:
        """End a process of the run on a host that is another machine. Does not wait."""
        ...

    def close(self, timeout_s: float) -> None:
        """Release the hosts; nothing of the run is left there."""
        ...


def python_path() -> str:
    """What the controller can import, for workers: a user's module lies on its path, not on ours."""
    return os.pathsep.join(dict.fromkeys(path or os.getcwd() for path in sys.path))


class PrivateHosts:
    """A private `ProcessJob`: each node of each cluster is a process of its own session on this machine."""

    def __init__(
        self,
        run_id: str,
        tmp_dir: str,
        env: Mapping[str, str],
        closing: Future[None],
        on_hosts: Callable[[], None],
    ) -> None:
        """Start nothing yet.

        Args:
            tmp_dir: the run's folder for sockets and temporary files, removed with the run.
            env: environment of the hosts, which worker processes inherit.
            closing: once it is done, no hosts are waited for.
            on_hosts: called once there are new host processes, which are waited for then.
        """
        self._tmp_dir = tmp_dir
        self._env = {
            CACHE_VARIABLE: inductor_cache(),
            **env,
            MARK: run_id,
            "PYTHONPATH": python_path(),
            "TMPDIR": tmp_dir,
        }
        self._closing = closing
        self._jobs: list[Any] = []
        self._on_hosts = on_hosts
        self.on_this_machine: list[HostProcess] = []
        self._meshes: dict[str, Any] = {}

    def prepare_client(self) -> None:
        """Nothing: sockets of this machine are the default."""

    def add_cluster(self, name: str, nnodes: int) -> None:
        """Start the hosts of a cluster."""
        if name not in self._meshes:
            self._meshes.update(self._start({name: nnodes}))

    def add_clusters(self, clusters: Mapping[str, int]) -> None:
        """Start the hosts of several clusters, as one job."""
        self._meshes.update(self._start(dict(clusters)))

    def hosts(self, cluster: str, first: int, count: int) -> Nodes:
        """Nodes of a cluster."""
        mesh = self._meshes[cluster].slice(hosts=slice(first, first + count))
        return Nodes(mesh=mesh, nodes=(Node(env={}, gpus=visible_gpus()),) * count)

    def beside_controller(self) -> Nodes:
        """One host, since all are on the controller's machine."""
        return self.hosts(next(iter(self._meshes)), 0, 1)

    def guard_shm(self, prefix: str) -> None:
        """Nothing: the run's guardian does it."""

    def kill(self, node: Node, pid: int) -> None:
        """Nothing: there is no other machine."""

    def close(self, timeout_s: float) -> None:
        """Kill the hosts and everything in their sessions."""
        for job in self._jobs:
            job.kill()
        self._jobs.clear()

    def _start(self, clusters: dict[str, int]) -> dict[str, Any]:
        from monarch.job import ProcessJob

        keys = {name: f"{MESH_PREFIX}hosts{len(self._meshes) + index}" for index, name in enumerate(clusters)}
        this = self

        class WatchedJob(ProcessJob):  # type: ignore[misc] # Monarch is not typed
            def _state(self) -> Any:  # between the start of its processes and the wait for them
                this.on_this_machine += host_processes(self, keys, ours=True)
                this._on_hosts()
                return super()._state()

        kind = WatchedJob if private_api() else ProcessJob
        job = kind({keys[name]: nnodes for name, nnodes in clusters.items()}, env=self._env)
        self._jobs.append(job)

        def start() -> dict[str, Any]:
            with _temporary_folder(self._tmp_dir):
                state = job.state(cached_path=None)
            return {name: getattr(state, keys[name]) for name in clusters}

        return sdk.run_blocking(start, self._closing)


@contextlib.contextmanager
def _temporary_folder(path: str) -> Iterator[None]:
    """Make `tempfile` use a folder within the block: a job has no option for where its sockets go."""
    before = tempfile.tempdir
    tempfile.tempdir = path
    try:
        yield
    finally:
        tempfile.tempdir = before
