"""The Monarch backend: hosts, processes, containers, one reply port per process, deaths."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshes.common import procs
from meshes.common.core import ContainerSpec
from meshes.common.deaths import DeathWatch
from meshes.common.guardian import end_process, is_marked, sweep
from meshes.common.guards import Guardian
from meshes.common.machine import LOOPBACK_ONLY, machine_id, unmade_folder
from meshes.common.stacks import read_stacks
from meshes.monarch import ports, sdk
from meshes.monarch.commands import WarmCommands, fresh_command
from meshes.monarch.faults import FaultHook, parse_fault
from meshes.monarch.jobs import MESH_PREFIX, HostProcess, Hosts, Node, Nodes, PrivateHosts
from meshes.monarch.stores import GlobalStore, StoreAccess, host_id
from neoproto.errors import NeoProtoError, RuntimeClosed, WorkerDied
from neoproto.private_api import monarch as private
from neoproto.private_api.monarch import ensure_context
from neoproto.private_api.monarch_ports import Address
from neoproto.runtime.backend import (
    STORE_KEY,
    BackendOptions,
    GroupRequest,
    OnDeath,
    OnReply,
    OnRequest,
    Preload,
    ProcessInfo,
    store_death,
)
from neoproto.runtime.executor import CallStatus
from neoproto.runtime.wire import LAST, CallHeader

if TYPE_CHECKING:
    from neoproto.config import RuntimeConfig
    from neoproto.runtime.relay import Origin, Request
    from neoproto.store import ObjectStore

logger = logging.getLogger(__name__)

HOST_KEY = "/hosts"
"""What the hosts of this machine are watched as; no group's key has a slash."""
PARENT_KEY = "/warm"
"""The same of the warm parents of this machine."""
STORE_ACTORS = "neoproto.store.torchstore.actors."
SOCKETS_S = 2.0
"""How long the kernel may take to give up the sockets of killed processes."""
KILLED_STOP_S = 2.0
"""How long Monarch is waited for to let go of processes that have been killed."""


class MonarchBackend:
    """One run on Monarch."""

    def __init__(self) -> None:
        self._guardian: Guardian | None = None
        self._hosts: Hosts | None = None
        self._warm: WarmCommands | None = None
        self._parents: set[int] = set()
        self._logs: sdk.LogFile | None = None
        self._deaths: DeathWatch | None = None
        self._hook: FaultHook | None = None
        self._groups: dict[str, MonarchGroup] = {}
        self._store: GlobalStore | None = None
        self._store_processes: Mapping[str, Sequence[ProcessInfo]] = {}
        self._watched_hosts: list[HostProcess] = []
        self._sessions: dict[tuple[str, int], int] = {}
        self._starting = False
        self._tmp_dir = ""
        self._closing: Future[None] = Future()

    def check(self, config: RuntimeConfig, clusters: Mapping[str, int]) -> None:
        """See that the job which is applied in this folder is alive, and has hosts for these clusters."""
        from meshes.monarch.applied import check_applied_job

        private.use_private_api(config.monarch.private_api)
        check_applied_job(clusters)

    def start(
        self, options: BackendOptions, on_reply: OnReply, on_death: OnDeath, on_request: OnRequest
    ) -> None:
        """Start the guardian, then the client, then the hosts."""
        private_api = options.options.get("private_api", True)
        private.use_private_api(private_api)
        if not private_api:
            options = replace(options, env={**options.env, private.PRIVATE_API_VARIABLE: "0"})
        self._options = options
        if options.warm_parent:
            logs = options.run_dir / "logs" / "hosts"
            self._warm = WarmCommands(logs, options.env, options.expected)
        self._guardian = Guardian(options.run_id)
        self._tmp_dir = unmade_folder(f"np-{options.run_id}-")
        self._guardian.make_folder(self._tmp_dir)
        log = options.run_dir / "logs" / "controller.log"
        self._logs = sdk.LogFile(log)
        self._hosts = self._make_hosts(options)
        sdk.start_client(log, self._hosts.prepare_client)
        self._report_death = on_death
        self._deaths = DeathWatch(self._on_death, stopped_timeout_s=options.options["stopped_timeout_s"])
        self._hook = FaultHook(self._on_fault)
        ports.replies().set_sink(on_reply)
        self._serve(on_request)
        with self._start_of_hosts():
            self._hosts.add_clusters(options.clusters)
            self._watch_hosts()

    def _make_hosts(self, options: BackendOptions) -> Hosts:
        if options.options.get("job_mode") != "current":
            return PrivateHosts(options.run_id, self._tmp_dir, options.env, self._closing, self._watch_hosts)
        from meshes.monarch.applied import AppliedHosts

        return AppliedHosts(options, self._tmp_dir, self._closing)

    def _guard_shm(self, prefix: str) -> None:
        assert self._guardian is not None
        assert self._hosts is not None
        self._guardian.guard_shm(prefix)
        self._hosts.guard_shm(prefix)

    def _serve(self, on_request: OnRequest) -> None:
        def take(run_id: str, back: Any, origin: Origin, request: Request) -> None:
            if run_id == self._options.run_id:  # the port outlives runs
                number = request.number
                on_request(origin, request, lambda outcome: ports.send((number, 0, outcome), back))

        ports.requests().set_sink(take)

    def add_cluster(self, name: str, nnodes: int) -> None:
        """Start the hosts of one more cluster."""
        assert self._hosts is not None
        self._hosts.add_cluster(name, nnodes)
        self._watch_hosts()

    @contextlib.contextmanager
    def _start_of_hosts(self) -> Iterator[None]:
        """Within the block a host that is lost ends the start, which would wait for it.

        Raises:
            NeoProtoError: that was so.
        """
        self._starting = True
        try:
            yield
        except RuntimeClosed as error:
            lost = next((host.cause for host in self._watched_hosts if host.cause), None)
            if lost is None:
                raise
            raise NeoProtoError(f"the run did not start: {lost}") from error
        finally:
            self._starting = False

    def _watch_hosts(self) -> None:
        """Watch the hosts that are new. Messages to workers pass through them, and they start processes."""
        assert self._hosts is not None
        assert self._deaths is not None
        for host in self._hosts.on_this_machine:
            if host not in self._watched_hosts:
                self._watched_hosts.append(host)
                self._deaths.watch(HOST_KEY, len(self._watched_hosts) - 1, host.pid, may_kill=host.ours)

    def _watch(self, key: str, rank: int, pid: int) -> None:
        """Watch a process of this machine, and note the session that its host has made."""
        assert self._deaths is not None
        with contextlib.suppress(ProcessLookupError):
            self._sessions[key, rank] = os.getsid(pid)
        self._deaths.watch(key, rank, pid)

    def start_store(self) -> ObjectStore:
        """Start the global store, volumes on the first cluster's hosts."""
        assert self._hosts is not None
        options = self._options
        self._store = GlobalStore(
            log_dir=options.run_dir / "logs" / "store",
            name=f"{options.options['store_name_prefix']}_{options.run_id}",
            strategy=options.options["store_strategy"],
            timeout_s=options.options["store_timeout_s"],
            command=self._store_command,
            guard_shm=self._guard_shm,
            closing=self._closing,
        )
        first = next(iter(options.clusters))
        hosts = self._hosts.hosts(first, 0, options.clusters[first])
        with self._start_of_hosts():
            beside = self._hosts.beside_controller()
            client = self._store.start(hosts, beside, options.options["ranks_per_host"])
        self._store_processes = self._store.processes(options.run_id)
        everybody = [info for some in self._store_processes.values() for info in some]
        for number, info in enumerate(everybody):
            self._watch(STORE_KEY, number, info.pid)
        return client

    def store_processes(self) -> Mapping[str, Sequence[ProcessInfo]]:
        """The store's processes on this machine."""
        return self._store_processes

    def _store_command(self, log_path: Path, host: Node) -> Any:
        """How to start a process of the store."""
        if self._warm is None or not host.warm:
            return fresh_command(log_path, host.env)
        return self._warm.starting(log_path, host.env)

    def close_store(self, timeout_s: float) -> None:
        """Close the global store."""
        if self._deaths is not None:
            self._deaths.forget(STORE_KEY)
        if self._store is not None:
            self._store.close(timeout_s)

    def _on_death(self, key: str, rank: int, cause: str | None) -> None:
        if key == PARENT_KEY:
            if cause is not None:
                more = "what it forked lives on; what would be forked is started afresh"
                logger.warning("warm parent %d died: %s; %s", rank, cause, more)
            return
        if key == HOST_KEY:
            self._on_host_death(self._watched_hosts[rank], cause)
            return
        host = self._host_of(key, rank)
        if cause is not None and host is not None and (host.lost or not procs.lives(host.pid)):
            if not host.cause:
                return  # it went with its host, whose cause comes in a moment
            cause = host.cause
        if key != STORE_KEY:
            self._report_death(key, rank, cause)
            return
        if cause is None or self._store is None:
            return
        self._report_death(key, rank, cause)
        reason = store_death(cause)
        self._store.fail(reason)
        for group in list(self._groups.values()):
            if not group.released:
                group.fail_store(reason)

    def _host_of(self, key: str, rank: int) -> HostProcess | None:
        session = self._sessions.get((key, rank))
        return next((host for host in self._watched_hosts if host.pid == session), None)

    def _on_host_death(self, host: HostProcess, cause: str | None) -> None:
        """With a host all its workers are lost: they die with it, or nothing reaches them any more."""
        host.lost = True
        if cause is not None:
            host.cause = f"its {host.name} died: {cause}" if host.ours else f"its {host.name} is {cause}"
            logger.warning("%s", host.cause)
            if self._starting:
                self.stop_spawning()
        for (key, rank), session in list(self._sessions.items()):
            if session == host.pid and (cause is not None or key != STORE_KEY):
                self._on_death(key, rank, None if cause is None else host.cause)

    def _check_hosts(self, request: GroupRequest) -> None:
        """Raises WorkerDied: a host that the group is to be on is lost; Monarch would wait for it."""
        pool = request.pool
        cluster = next(iter(self._options.clusters)) if pool.beside_controller else pool.cluster
        for host in self._watched_hosts:
            if host.lost and host.cluster == cluster and host.node in pool.block.nodes:
                rank = (host.node - pool.block.first_node) * pool.block.devices_per_node
                cause = host.cause or f"its {host.name} died"
                raise WorkerDied(request.name, rank, socket.gethostname(), cause)

    def spawn_group(self, request: GroupRequest, timeout_s: float) -> MonarchGroup:
        """Start the processes of a group, one container in each."""
        assert self._hosts is not None
        assert self._deaths is not None
        self._check_hosts(request)
        block = request.pool.block
        if request.pool.beside_controller:
            hosts = self._hosts.beside_controller()
        else:
            hosts = self._hosts.hosts(request.pool.cluster, block.first_node, block.nnodes)
        first_cluster = next(iter(self._options.clusters))
        cluster = first_cluster if request.pool.beside_controller else request.pool.cluster
        store = StoreAccess(
            spec=None if self._store is None else self._store.spec,
            host_ids=tuple(host_id(cluster, node, first_cluster) for node in block.nodes),
        )
        group = MonarchGroup(
            request,
            hosts,
            store,
            self._options.run_id,
            self._deaths,
            self._hosts.kill,
            self._watch,
            self._warm,
        )
        self._groups[request.key] = group
        try:
            sdk.run_blocking(lambda: group.start(timeout_s), self._closing)
        except BaseException:
            group.given_up = True
            raise
        self._watch_parents(group)
        return group

    def _watch_parents(self, group: MonarchGroup) -> None:
        """Watch the warm parents that are new. One that is stopped is killed: it would be waited for."""
        assert self._deaths is not None
        run_id = self._options.run_id
        for info in group.processes:
            if not info.parent or info.parent in self._parents or not is_local(info, run_id):
                continue
            # A worker whose parent has just died names what has adopted it, which is not ours to kill.
            if is_marked(info.parent, run_id):
                self._parents.add(info.parent)
                self._deaths.watch(PARENT_KEY, info.parent, info.parent)

    def stop_spawning(self) -> None:
        """End every wait for processes to start, now and later."""
        if not self._closing.done():
            self._closing.set_result(None)

    def close(self, timeout_s: float) -> None:
        """Kill the hosts, end what is left of the run, remove its folders, put everything back."""
        if self._deaths is not None:
            self._deaths.forget(HOST_KEY)
            self._deaths.forget(PARENT_KEY)
        with contextlib.ExitStack() as stack:
            if self._guardian is not None:
                stack.callback(self._dismiss, self._guardian)
            if self._logs is not None:
                stack.callback(self._logs.close)
            if self._deaths is not None:
                stack.callback(self._deaths.close)
            all_stopped = all(group.unwatched for group in self._groups.values())
            if self._hook is not None and all_stopped and (self._store is None or self._store.unwatched):
                # Otherwise Monarch may yet report what was killed, and its own hook would end the program.
                stack.callback(self._hook.restore)
            stack.callback(self._sweep, timeout_s)
            if self._hook is not None:
                stack.callback(ports.replies().set_sink, None)
                stack.callback(ports.requests().set_sink, None)
            if self._hosts is not None:
                stack.callback(self._hosts.close, timeout_s)

    def _dismiss(self, guardian: Guardian) -> None:
        if not sdk.helpers_left():
            guardian.dismiss()
            return
        # A start that was given up may yet make a process: the guardian stays as long as this one. Python
        # would also complain, at its end, of what Monarch never came to do.
        never = r"coroutine '(Host|Proc|Actor)Mesh\..*' was never awaited"
        warnings.filterwarnings("ignore", never, RuntimeWarning)

    def _sweep(self, timeout_s: float) -> None:
        if self._guardian is None:
            return
        guarded = self._guardian
        left, kept = sweep(self._options.run_id, guarded.folders, guarded.shm_prefixes, timeout_s)
        if left:
            logger.warning("processes of the run could not be ended: %s", left)
        for path, reason in kept.items():
            logger.warning("%s was left there: %s", path, reason)
        until = time.monotonic() + SOCKETS_S
        while procs.unix_sockets(self._tmp_dir) and time.monotonic() < until:
            time.sleep(0.02)  # killed, but the kernel is not done with it yet

    def _on_fault(self, mesh_name: str, report: str) -> bool:
        """Supervision's word on a fault; True if it is about one of this run's meshes."""
        logger.info("fault of %s: %s", mesh_name, report)
        rank, cause = parse_fault(report)
        for key, group in self._groups.items():
            if mesh_name.startswith(group.mesh_name):
                if rank is not None and self._deaths is not None and not group.released:
                    self._deaths.report_cause(key, rank, cause)
                return True
        # The store's actors, and Monarch's own helpers in a process ("logger-…", "setup-…"), fail with it.
        ours = any(name in report for name in (MESH_PREFIX, STORE_ACTORS))
        return ours or mesh_name.startswith(("logger-", "setup-"))


class MonarchGroup:
    """A group's processes: a ProcMesh of its own, an ActorMesh of containers on it."""

    def __init__(
        self,
        request: GroupRequest,
        hosts: Nodes,
        store: StoreAccess,
        run_id: str,
        deaths: DeathWatch,
        kill_far: Callable[[Node, int], None],
        watch: Callable[[str, int, int], None],
        warm: WarmCommands | None,
    ) -> None:
        """Start nothing yet.

        Args:
            kill_far: ends a process of the run on another machine.
            watch: begins to report the death of (key, rank, pid).
            warm: how processes are forked; None if none are.
        """
        self.request = request
        self.mesh_name = f"{MESH_PREFIX}{request.key}"
        self.released = self.unwatched = self.given_up = False
        self._hosts, self._store, self._run_id, self._deaths = hosts, store, run_id, deaths
        self._kill_far, self._watch, self._warm = kill_far, watch, warm
        self._procs: Any = None
        self._mesh: Any = None
        self._infos: list[ProcessInfo] = []
        self._addresses: list[Address] = []

    def start(self, timeout_s: float) -> None:
        """Spawn processes and containers, and wait until all have said hello. Call it in `run_blocking`.

        What was started in vain is stopped again: some of it failed, or the wait for it was given up.
        """
        complete = False
        try:
            self._start(timeout_s)
            complete = not self.given_up
        finally:
            if not complete and self._procs is not None:
                self.unwatched = sdk.stop_procs(self._procs, KILLED_STOP_S)

    def _start(self, timeout_s: float) -> None:
        from meshes.monarch.container import Container  # Monarch's environment is set by now

        request, block = self.request, self.request.pool.block
        self._procs = self._hosts.mesh.spawn_procs(
            per_host={"procs": block.devices_per_node},
            name=self.mesh_name,
            bootstrap_command=self._command,
        )
        spec = ContainerSpec(
            group_name=request.name,
            nnodes=block.nnodes,
            processes_per_node=block.devices_per_node,
            public=not self._hosts.one_machine,
            log_dir=str(request.log_dir),
            attach=request.attach,
        )
        root = ports.requests().address
        self._mesh = self._procs.spawn(self.mesh_name, Container, spec, self._store, root)
        hellos = [hello for _, hello in self._mesh.hello.call().get(timeout=timeout_s).items()]
        self._infos = [info for info, _ in hellos]
        self._addresses = [address for _, address in hellos]

    def _command(self, point: Any) -> Any:
        """How to start the process at a point of (hosts × procs)."""
        block = self.request.pool.block
        node, device = divmod(point.rank, block.devices_per_node)
        host = self._hosts.nodes[node]
        own = dict(LOOPBACK_ONLY if self._hosts.one_machine else {})
        on_gpu = self.request.pool.device_type == "gpu"
        if on_gpu:
            own["CUDA_VISIBLE_DEVICES"] = host.gpu(block.first_device + device)
        own |= self.request.env
        log_path = self.request.log_dir / f"rank{point.rank}.log"
        if self._warm is None or not self.request.preload or on_gpu or not host.warm:
            # What looks for GPUs when it is imported, as vLLM does, is not known to bear a fork after that.
            return fresh_command(log_path, {**host.env, **own})
        preload = Preload(modules=self.request.preload, env=self.request.env)
        return self._warm.forked(log_path, host.env, own, preload)

    def _slice(self, rank: int) -> Any:
        host, proc = divmod(rank, self.request.pool.block.devices_per_node)
        return self._mesh.slice(procs=proc, **({"hosts": host} if self._hosts.counted else {}))

    @property
    def processes(self) -> Sequence[ProcessInfo]:
        return self._infos

    @property
    def native(self) -> Any:
        return self._mesh

    def watch(self) -> None:
        """Begin to report deaths."""
        for info in self._infos:
            if is_local(info, self._run_id):
                self._watch(self.request.key, info.rank, info.pid)

    def send(self, ranks: Sequence[int], header: CallHeader, payload: bytes) -> None:
        """One message for all of them, pickled once."""
        addresses = self._addresses
        ports.send((ports.replies().address, header, payload), *(addresses[rank] for rank in ranks))

    def statuses(self, ranks: Sequence[int], call_id: int, timeout_s: float) -> dict[int, CallStatus]:
        """Ask each rank by itself: one that does not answer must not hide the others."""
        return self._ask_each(ranks, lambda mesh: mesh.call_status.call_one(call_id), timeout_s)

    def stacks(self, ranks: Sequence[int]) -> dict[int, str]:
        """Where processes of this machine are that do not answer."""
        return read_stacks(
            {
                info.rank: (info.pid, self.request.log_dir / f"rank{info.rank}.log")
                for info in self._infos
                if info.rank in ranks and is_local(info, self._run_id)
            }
        )

    def meshes(self, role: str, timeout_s: float) -> list[dict[str, tuple[int, bool]]]:
        """What the workers have said by `Worker.register_mesh`, by rank."""
        answers = self._ask_each(
            range(len(self._infos)), lambda mesh: mesh.mesh_places.call_one(role), timeout_s
        )
        return [answers.get(rank, {}) for rank in range(len(self._infos))]

    def break_group(self, ranks: Sequence[int], reason: str) -> None:
        """Make containers refuse everything. Does not wait."""
        ensure_context()
        for rank in ranks:
            self._slice(rank).break_off.broadcast(reason)

    def fail_store(self, reason: str) -> None:
        """Make store operations of these processes fail. Does not wait."""
        ensure_context()
        for info in self._infos:
            self._slice(info.rank).store_failed.broadcast(reason)

    def drain(self, ranks: Sequence[int], timeout_s: float) -> bool:
        """Wait for what was admitted; False if it did not end in time."""
        # By the way the calls went, and so behind them all.
        self.send(ranks, CallHeader(call_id=0, role="", method=LAST), b"")
        answers = self._ask_each(ranks, lambda mesh: mesh.drain.call_one(timeout_s), timeout_s + 1.0)
        return len(answers) == len(ranks) and all(answers.values())

    def stop(self, timeout_s: float) -> None:
        """Release the processes, by force what does not go in time."""
        self._release()
        self.unwatched = sdk.run_blocking(lambda: sdk.stop_procs(self._procs, timeout_s))
        if not self.unwatched:
            self._kill_processes()

    def kill(self) -> None:
        """Release the processes by force, and Monarch's watch over them."""
        self._release()
        self._kill_processes()
        if self._procs is not None:
            self.unwatched = sdk.run_blocking(lambda: sdk.stop_procs(self._procs, KILLED_STOP_S))

    def _release(self) -> None:
        self.released = True
        self._deaths.forget(self.request.key)

    def _kill_processes(self) -> None:
        for info in self._infos:
            if is_local(info, self._run_id):
                end_process(info.pid, self._run_id)
            else:
                node = self._hosts.nodes[info.rank // self.request.pool.block.devices_per_node]
                self._kill_far(node, info.pid)

    def _ask_each(self, ranks: Sequence[int], ask: Callable[[Any], Any], timeout_s: float) -> dict[int, Any]:
        def collect() -> dict[int, Any]:
            until = time.monotonic() + timeout_s
            asked = {rank: ask(self._slice(rank)) for rank in ranks}
            answers = {}
            for rank, future in asked.items():
                # A dead or silent rank is simply not among the answers.
                with contextlib.suppress(Exception):
                    answers[rank] = future.get(timeout=max(0.0, until - time.monotonic()))
            return answers

        return sdk.run_blocking(collect)


def is_local(info: ProcessInfo, run_id: str) -> bool:
    """Whether a process is on this machine: its pid here carries the run's mark."""
    return info.machine in ("", machine_id()) and is_marked(info.pid, run_id)
