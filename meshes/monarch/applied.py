"""Hosts of the job that was applied in this folder (`monarch apply`): checked, used, and left as they were.

.monarch/job_state.pkl ──load──> alive? ──state──> HostMesh by name ──probe──> versions, guardians
                                                             │
run: processes spawned, stopped <────────────────────────────┘     the hosts are never shut down
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import sys
import sysconfig
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshes.common import procs
from meshes.common.bootstrap import FOLDER_VARIABLE
from meshes.common.guardian import MARK, path_word
from meshes.common.guards import HostGuards
from meshes.common.machine import CACHE_VARIABLE, versions
from meshes.monarch import sdk
from meshes.monarch.commands import fresh_command
from meshes.monarch.jobs import MESH_PREFIX, HostProcess, Node, Nodes, host_processes, python_path
from neoproto.errors import ConfigError
from neoproto.private_api import monarch as private
from neoproto.runtime.backend import BackendOptions
from neoproto.text import one_line

if TYPE_CHECKING:
    from meshes.monarch.probe import HostReport

logger = logging.getLogger(__name__)

FIELD = "runtime.monarch.job_mode=current"
PROBE_S = 90.0
"""How long hosts may take to answer; some seconds, of which most is the start of Python."""
PROBE_STOP_S = 10.0


def check_applied_job(clusters: Mapping[str, int]) -> None:
    """See that the folder's applied job is alive and fits, without connecting to it.

    Args:
        clusters: name -> number of hosts that the topology wants.

    Raises:
        ConfigError: with everything that is wrong.
    """
    with _quiet():
        sizes = _declared_sizes(load_applied_job())
    if sizes is not None:
        check_meshes(clusters, sizes)


def load_applied_job() -> Any:
    """The job as `monarch apply` left it in this folder. Nothing is submitted, started or ended.

    Monarch's `load_current_job().state()` would submit a job again where the old one is dead, and end one
    that no longer matches its description.

    Raises:
        ConfigError: there is none, it cannot be read, or it is no longer alive.
    """
    from monarch.job import DEFAULT_JOB_PATH, job_load

    path = Path(DEFAULT_JOB_PATH).absolute()
    if not path.exists():
        raise ConfigError(f"{FIELD}: no job is applied in {Path.cwd()}; type `monarch apply MODULE.job` here")
    try:
        job = job_load(str(path))
    except Exception as error:
        raise ConfigError(
            f"{FIELD}: {path} cannot be read ({one_line(error)}); apply the job again"
        ) from error
    try:
        running = private.applied_job(job)
        alive = running is not None and not _ended_hosts(running)
    except Exception as error:
        raise ConfigError(f"{FIELD}: cannot tell if the job in {path} is alive: {one_line(error)}") from error
    if not alive:
        raise ConfigError(
            f"{FIELD}: the job in {path} is no longer running; `monarch kill`, then `monarch apply` renew it"
        )
    return running


def check_meshes(clusters: Mapping[str, int], sizes: Mapping[str, int]) -> None:
    """Compare what a topology wants with the meshes of a job, name -> number of hosts.

    Raises:
        ConfigError: one sentence for each cluster that is not there or too large.
    """
    there = ", ".join(f"{name!r} ({size})" for name, size in sizes.items())
    problems = []
    for name, nnodes in clusters.items():
        if name not in sizes:
            problems.append(
                f"topology.clusters: {name!r} is no mesh of the applied job, which has {there}; "
                "a cluster is named as its mesh"
            )
        elif nnodes > sizes[name]:
            problems.append(
                f"topology.clusters: {name!r} wants {nnodes} host(s), the job's mesh has {sizes[name]}"
            )
    if problems:
        raise ConfigError(*problems)


def compare_versions(reports: Sequence[tuple[str, HostReport]], here: Mapping[str, str]) -> list[str]:
    """One sentence for each package of a host that is not what this process has."""
    return [
        f"{FIELD}: host {report.host} ({name}) has {package} {report.versions.get(package)}, "
        f"this process has {version}"
        for name, report in reports
        for package, version in here.items()
        if report.versions.get(package) != version
    ]


def missing_gpus(found: Mapping[str, Sequence[HostReport]], wanted: Mapping[str, int]) -> list[str]:
    """One sentence for each host with fewer GPUs than its cluster has by the topology."""
    return [
        f"topology.clusters: {mesh!r} has {wanted[mesh]} GPUs a node, "
        f"host {one.host} ({mesh}[{one.node}]) has {len(one.gpus)}"
        for mesh, reports in found.items()
        for one in reports
        if len(one.gpus) < wanted.get(mesh, 0)
    ]


class AppliedHosts:
    """The meshes of the applied job, by the clusters' names."""

    def __init__(self, options: BackendOptions, tmp_dir: str, closing: Future[None]) -> None:
        """Look for nothing yet.

        Args:
            tmp_dir: the run's folder for temporary files on the controller's machine.
            closing: once it is done, no hosts are waited for.
        """
        self._options, self._tmp_dir, self._closing = options, tmp_dir, closing
        self._job: Any = None
        self.on_this_machine: list[HostProcess] = []
        self._meshes: dict[str, Any] = {}
        self._nodes: dict[str, tuple[Node, ...]] = {}
        self._first = ""
        self._beside: Nodes | None = None
        self._guards: HostGuards | None = None
        self._env = {
            **private.settings(),
            **options.env,
            MARK: options.run_id,
            "PYTHONPATH": _import_path(),
            FOLDER_VARIABLE: os.getcwd(),
        }

    def prepare_client(self) -> None:
        """Load the job, which names the transport and the gateway by which its hosts are reached.

        Raises:
            ConfigError: there is no job, or it is dead.
        """
        from meshes.monarch.workers_job import use_client_address

        self._job = load_applied_job()
        try:
            private.prepare_client(self._job)
            use_client_address()
        except Exception as error:
            raise ConfigError(f"{FIELD}: the job's hosts cannot be reached: {one_line(error)}") from error

    def add_clusters(self, clusters: Mapping[str, int]) -> None:
        """Find the meshes of these clusters and look at their hosts.

        Raises:
            ConfigError: the meshes do not fit, or a host cannot be used.
        """
        self._first = next(iter(clusters))
        sdk.run_blocking(lambda: self._attach(dict(clusters)), self._closing)

    def add_cluster(self, name: str, nnodes: int) -> None:
        """More hosts of the first cluster's mesh: an applied job does not grow.

        Raises:
            ConfigError: it has fewer.
        """
        if name not in self._nodes:
            check_meshes({self._first: nnodes}, _sizes(self._meshes))
            mesh = self._meshes[self._first].slice(hosts=slice(0, nnodes))
            self._nodes[name] = sdk.run_blocking(lambda: self._look({name: mesh}), self._closing)[name]
            self._meshes[name] = mesh

    def hosts(self, cluster: str, first: int, count: int) -> Nodes:
        """Nodes of a cluster."""
        mesh = self._meshes[cluster].slice(hosts=slice(first, first + count))
        return Nodes(mesh=mesh, nodes=self._nodes[cluster][first : first + count])

    def beside_controller(self) -> Nodes:
        """This machine, which need not be one of the job's."""
        if self._beside is None:
            from monarch.actor import this_host

            env = {**self._env, "TMPDIR": self._tmp_dir}
            self._beside = Nodes(mesh=this_host(), nodes=(Node(env=env),), counted=False)
        return self._beside

    def guard_shm(self, prefix: str) -> None:
        """Have every host's guardian remove such files."""
        if self._guards is not None:
            self._guards.tell("shm", prefix)

    def kill(self, node: Node, pid: int) -> None:
        """Have the host's guardian end a process of the run."""
        if self._guards is not None and node.name is not None:
            self._guards.tell("kill", pid, name=node.name)

    def close(self, timeout_s: float) -> None:
        """Have the guardians end what is left of the run on the hosts, which live on."""
        if self._guards is None:
            return
        for name, wrong in self._guards.sweep(timeout_s, again=sdk.helpers_left()).items():
            logger.warning("host %s: %s", name, wrong)
        self._guards.close()

    def _attach(self, clusters: dict[str, int]) -> None:
        try:
            self._meshes = private.host_meshes(self._job, clusters)
        except Exception as error:
            raise ConfigError(f"{FIELD}: the job cannot be attached to: {one_line(error)}") from error
        check_meshes(clusters, _sizes(self._meshes))
        self._guards = HostGuards(_own_address(), sum(clusters.values()))
        wanted = {name: self._meshes[name].slice(hosts=slice(0, nnodes)) for name, nnodes in clusters.items()}
        self._nodes = self._look(wanted)
        found = host_processes(self._job, {name: name for name in clusters}, ours=False)
        self.on_this_machine = [one for one in found if one.node < clusters[one.cluster]]

    def _look(self, meshes: Mapping[str, Any]) -> dict[str, tuple[Node, ...]]:
        """Look at every host at once, and have a guardian on each.

        Raises:
            ConfigError: hosts do not answer, have other versions, or do not see the run's folder.
        """
        from meshes.monarch.probe import PACKAGES, guard_name

        assert self._guards is not None
        found = self._reports(meshes)
        reports = [(guard_name(name, one.node), one) for name, some in found.items() for one in some]
        self._guards.accept(sum(report.unguarded is None for _, report in reports))
        for name, report in reports:
            self._guards.tell("made", path_word(report.tmp_dir), name=name)
            if report.unguarded is not None:
                logger.warning(
                    "host %s (%s) does not reach this process at %s: the run's temporary folder stays there, "
                    "and whatever is left there if this process is killed",
                    report.host,
                    name,
                    report.unguarded,
                )
        problems = compare_versions(reports, versions(PACKAGES))
        problems += missing_gpus(found, self._options.options.get("gpus_per_host", {}))
        problems += [
            f"runtime.run_dir: {self._options.run_dir} is not there on host {report.host} ({name}); "
            "all hosts need the same file system for it"
            for name, report in reports
            if not report.sees_run_dir
        ]
        if problems:
            raise ConfigError(*problems)
        return {name: tuple(self._node(name, one) for one in some) for name, some in found.items()}

    def _node(self, mesh: str, report: HostReport) -> Node:
        from meshes.monarch.probe import guard_name

        env = {CACHE_VARIABLE: report.cache_dir, **self._env, "TMPDIR": report.tmp_dir}
        return Node(
            env=env,
            gpus=report.gpus,
            name=guard_name(mesh, report.node),
            machine=report.machine,
            # Monarch knows of no warm parent, and so does not end it with the processes that it has started.
            warm=report.unguarded is None,
        )

    def _reports(self, meshes: Mapping[str, Any]) -> dict[str, list[HostReport]]:
        """The probes' answers, by mesh and in the order of hosts. Call it in `run_blocking`."""
        from meshes.monarch.probe import HostProbe, ProbeSpec

        assert self._guards is not None
        options, until = self._options, time.monotonic() + PROBE_S
        logs = options.run_dir / "logs" / "hosts"
        procs: dict[str, Any] = {}
        asked: dict[str, Any] = {}
        try:
            for name, mesh in meshes.items():
                procs[name] = mesh.spawn_procs(
                    per_host={"probes": 1},
                    name=f"{MESH_PREFIX}probes",
                    bootstrap_command=lambda point, name=name: fresh_command(
                        logs / f"{name}{point.rank}.log", self._env
                    ),
                )
                spec = ProbeSpec(
                    run_id=options.run_id, mesh=name, run_dir=str(options.run_dir), guard=self._guards.address
                )
                asked[name] = procs[name].spawn(f"{MESH_PREFIX}probe", HostProbe).look.call(spec)
            return {name: self._answers(name, future, until) for name, future in asked.items()}
        finally:
            for one in procs.values():
                sdk.stop_procs(one, PROBE_STOP_S)

    def _answers(self, name: str, future: Any, until: float) -> list[HostReport]:
        try:
            found: list[HostReport] = [
                one for _, one in future.get(timeout=max(0.0, until - time.monotonic())).items()
            ]
        except Exception as error:
            raise ConfigError(
                f"{FIELD}: hosts of mesh {name!r} do not answer ({one_line(error)}); they need "
                f"{sys.executable} with the same torchmonarch, and what they said is in "
                f"{self._options.run_dir}/logs/hosts"
            ) from error
        return sorted(found, key=lambda one: one.node)


def _import_path() -> str:
    """Where workers import from; not this interpreter's own library, so that another one can report it."""
    own = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib")}
    own |= {os.path.join(path, "lib-dynload") for path in own}
    paths = python_path().split(os.pathsep)
    return os.pathsep.join(path for path in paths if path not in own and not path.endswith(".zip"))


def _sizes(meshes: Mapping[str, Any]) -> dict[str, int]:
    return {name: int(mesh.region.slice().sizes[0]) for name, mesh in meshes.items()}


def _declared_sizes(job: Any) -> dict[str, int] | None:
    """Hosts of each mesh of a job that is not connected, where its class is one that is known."""
    declared = private.declared_meshes(job)
    if declared is None:
        return None
    sizes = {}
    for name, one in declared.items():
        count = one.get("num_replicas") if isinstance(one, Mapping) else one
        sizes[str(name)] = count if isinstance(count, int) else len(one)
    return sizes


def _ended_hosts(job: Any) -> bool:
    """Whether a process of a job on this machine has ended and waits to be reaped."""
    return any(procs.state(pid) in ("Z", "X") for pid in private.host_pids(job).values())


def _own_address() -> str:
    """Where hosts reach this process's Monarch client; loopback if that has a local socket."""
    from monarch.actor import context

    found = re.search(r"@tcp://\[?([^\]/@]+?)\]?:\d+$", str(context().actor_instance.proc_id))
    return found.group(1) if found else "127.0.0.1"


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep Monarch's loggers from printing what our own errors contain."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)
