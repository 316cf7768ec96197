"""`Runtime`: the process root. Owns the hosts, the worker groups and the store of one run."""

from __future__ import annotations

import atexit
import logging
import threading
import time
from collections.abc import Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal

from neoproto.errors import ConfigError, RuntimeClosed
from neoproto.runtime.backend import BackendOptions, GroupRequest, compile_placement, load_backend
from neoproto.runtime.center import CallCenter
from neoproto.runtime.group import Methods, WorkerGroup, build_workers, public_methods
from neoproto.runtime.members import Members
from neoproto.runtime.placement import Block, DeviceType, Placement
from neoproto.runtime.pool import ResourcePool
from neoproto.runtime.settings import RuntimeSettings
from neoproto.runtime.signals import SignalHandlers, deferred_signals
from neoproto.runtime.worker import ClassWithInitArgs

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

logger = logging.getLogger(__name__)

_root_lock = threading.Lock()
_root: Runtime | None = None

SPAWN_TIMEOUT_S = 120.0
INIT_TIMEOUT_S = 600.0
DRAIN_S = 5.0
STOP_S = 4.0
STORE_CLOSE_S = 2.0
RELEASE_S = 3.0


class Runtime:
    """The root of a run: hosts, worker groups, one object store. One live root a process.

    Use it as a context manager, or call `close`. Leaving on an exception, Ctrl-C, SIGTERM or SIGHUP closes it
    the same way, with less patience for calls under way.
    """

    def __init__(self, settings: RuntimeSettings, placement: Placement | None) -> None:
        self._settings, self._placement = settings, placement
        self._center = CallCenter()
        self._groups: dict[str, WorkerGroup] = {}
        self._members: dict[str, Members] = {}
        self._names: dict[str, int] = {}
        self._signals = SignalHandlers()
        self._close_lock = threading.RLock()
        self._closed = False
        self._backend = load_backend(settings.backend)

    @classmethod
    def from_config(cls, config: Any, *, placement: Placement | None = None) -> Runtime:
        """Check the topology, allocate hosts and start the store.

        Args:
            config: a mapping, or an object with `runtime` and `topology` attributes.
            placement: the compiled topology, if the caller has compiled it.

        Raises:
            TopologyError: with every violation; nothing has been started.
            RuntimeError: this process has a live root.
        """
        global _root
        settings = RuntimeSettings.from_config(config)
        if placement is None and settings.topology is not None:
            placement = compile_placement(settings.topology)
        runtime = cls(settings, placement)
        with _root_lock:
            if _root is not None:
                raise RuntimeError("this process has a live Runtime; close it before making another")
            _root = runtime
        try:
            runtime._start()
        except BaseException:
            runtime._close(failed=True)
            raise
        return runtime

    def _start(self) -> None:
        settings = self._settings
        self._signals.install()
        (settings.run_dir / "logs").mkdir(parents=True, exist_ok=True)
        placement = self._placement
        clusters = {} if placement is None else {one.name: one.nnodes for one in placement.clusters}
        ranks_per_host = 1 if placement is None else placement.clusters[0].devices_per_node
        options = BackendOptions(
            run_id=settings.run_id,
            run_dir=settings.run_dir,
            clusters=clusters or {"default": 1},
            env=settings.env_vars,
            options={**settings.options, "ranks_per_host": ranks_per_host},
        )
        self._backend.start(options, self._center.on_reply, self._on_death)
        atexit.register(self.close)
        self._backend.start_store()

    @property
    def run_dir(self) -> Any:
        """The run's folder (a `Path`); `logs/<group>/rank<k>.log` below it hold all worker output."""
        return self._settings.run_dir

    @property
    def run_id(self) -> str:
        """The run's mark, in the environment of all its processes as NEOPROTO_RUN_ID."""
        return self._settings.run_id

    @property
    def placement(self) -> Placement | None:
        """The compiled topology, if the configuration has one."""
        return self._placement

    def model_resource_pool(self, name: str) -> ResourcePool:
        """The pool, or view of a pool, of a model of the topology.

        Raises:
            ValueError: the topology has no such model.
        """
        models = {} if self._placement is None else {model.name: model for model in self._placement.models}
        if name not in models:
            raise ValueError(f"the topology has no model {name!r}; there is: {', '.join(models) or 'none'}")
        model = models[name]
        return ResourcePool(
            name=name, cluster=model.cluster, block=model.block, device_type=model.device_type
        )

    def create_resource_pool(
        self,
        nnodes: int = 1,
        processes_per_node: int = 1,
        device_type: DeviceType = "cpu",
        on: Literal["cluster", "controller"] = "cluster",
        name: str | None = None,
    ) -> ResourcePool:
        """A grid of `nnodes` × `processes_per_node` slots, beside what the topology declares.

        Args:
            on: "cluster" takes the first nodes of the first cluster; "controller" is one CPU node beside the
                controller, the place for a task runner.

        Raises:
            ValueError: sizes below 1, more nodes than the cluster has, or "controller" with several nodes.
        """
        self._check_open()
        if nnodes < 1 or processes_per_node < 1:
            raise ValueError(f"a pool has at least one process, got {nnodes} x {processes_per_node}")
        block = Block(first_node=0, nnodes=nnodes, first_device=0, devices_per_node=processes_per_node)
        if on == "controller":
            if nnodes != 1 or device_type != "cpu":
                raise ValueError(f"on='controller' is one cpu node, got {nnodes} of {device_type}")
            return ResourcePool(
                name=name or "controller",
                cluster="",
                block=block,
                device_type="cpu",
                beside_controller=True,
            )
        if on != "cluster":
            raise ValueError(f"on must be 'cluster' or 'controller', got {on!r}")
        cluster = self._cluster_with(nnodes)
        return ResourcePool(name=name or "pool", cluster=cluster, block=block, device_type=device_type)

    def _cluster_with(self, nnodes: int) -> str:
        if self._placement is not None:
            first = self._placement.clusters[0]
            if nnodes > first.nnodes:
                raise ValueError(
                    f"cluster {first.name!r} has {first.nnodes} node(s), the pool wants {nnodes}"
                )
            return first.name
        if nnodes == 1:
            return "default"
        name = f"default_{nnodes}"
        self._backend.add_cluster(name, nnodes)
        return name

    def create_worker_group(
        self,
        workers: ClassWithInitArgs | Mapping[str, ClassWithInitArgs],
        on: ResourcePool,
        name: str | None = None,
        timeout: float = INIT_TIMEOUT_S,
    ) -> WorkerGroup:
        """Start one process on each slot of a pool and build the worker(s) in it.

        Args:
            workers: one class; or role → class, fused: all roles in each process (`group.role(name)`).
            name: the folder of its logs; the class's name by default. A name in use gets a number.
            timeout: seconds for the workers' `__init__`.

        Raises:
            WorkerInitError: `__init__` raised on some rank; the exception is the cause.
            WorkerDied, DeadlineExceeded: a process died, or `__init__` did not end.
            RuntimeClosed: this runtime is closed.
        """
        self._check_open()
        roles = {"": workers} if isinstance(workers, ClassWithInitArgs) else dict(workers)
        if not roles:
            raise ValueError("a worker group has at least one role")
        tables = {role: public_methods(spec.cls) for role, spec in roles.items()}
        name = self._unique_name(name or next(iter(roles.values())).cls.__name__.lower())
        members = self._spawn(name, on, roles)
        try:
            build_workers(members, self._center, roles, timeout)
        except BaseException:
            members.mark_closed(f"worker group {name} could not be built")
            self._center.fail_all(members, f"worker group {name} could not be built")
            members.processes.kill()
            self._members.pop(members.key, None)
            raise
        methods: Methods = tables.get("", {})
        group = WorkerGroup(members, self._center, methods, on, tables, self._forget)
        self._groups[members.key] = group
        return group

    def _spawn(self, name: str, pool: ResourcePool, roles: Mapping[str, ClassWithInitArgs]) -> Members:
        env = dict(self._settings.env_vars)
        for spec in roles.values():
            env.update(spec.env)
        request = GroupRequest(
            key=f"{name}-{self.run_id}",
            name=name,
            pool=pool,
            env=env,
            log_dir=self.run_dir / "logs" / name,
        )
        processes = self._backend.spawn_group(request, SPAWN_TIMEOUT_S)
        members = Members(request.key, name, processes, request.log_dir)
        self._members[members.key] = members
        processes.watch()
        return members

    def placement_table(self) -> Table:
        """Where every model of the topology runs."""
        from rich.table import Table

        table = Table(title="Topology")
        columns = (
            "model",
            "worker",
            "cluster",
            "pool",
            "nodes",
            "devices",
            "ranks",
            "device",
            "colocated with",
        )
        for column in columns:
            table.add_column(column)
        for row in () if self._placement is None else self._placement.placement_rows():
            table.add_row(
                row.model,
                row.worker,
                row.cluster,
                row.pool,
                row.nodes,
                row.devices,
                str(row.ranks),
                row.device_type,
                row.colocated_with,
            )
        return table

    def print_placement(self, console: Console) -> None:
        """Print `placement_table`."""
        console.print(self.placement_table())

    def close(self) -> None:
        """Close everything: admission, groups, store client, store, hosts. Bounded; twice is a no-op."""
        self._close(failed=False)

    def __enter__(self) -> Runtime:
        self._check_open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close(failed=error is not None)

    def _close(self, *, failed: bool) -> None:
        global _root
        with self._close_lock, deferred_signals():
            if self._closed:
                return
            self._closed = True
            try:
                self._center.stop_admission("the runtime has been closed")
                self._close_groups(drain_s=0.5 if failed else DRAIN_S)
                self._center.close("the runtime has been closed")
                for step in (
                    lambda: self._backend.close_store(STORE_CLOSE_S),
                    lambda: self._backend.close(RELEASE_S),
                ):
                    _attempt(step)
            finally:
                self._signals.restore()
                atexit.unregister(self.close)
                with _root_lock:
                    if _root is self:
                        _root = None

    def _close_groups(self, drain_s: float) -> None:
        """All at once, each on its own thread: a stuck one must not use up the others' time."""
        threads = [
            threading.Thread(target=_attempt, args=(lambda group=group: group.close(drain_s),), daemon=True)
            for group in list(self._groups.values())
        ]
        for thread in threads:
            thread.start()
        until = time.monotonic() + drain_s + STOP_S
        for thread in threads:
            thread.join(max(0.0, until - time.monotonic()))

    def _on_death(self, key: str, rank: int, cause: str | None) -> None:
        members = self._members.get(key)
        if members is None:
            return
        if cause is None:
            members.mark_dying(rank)
            return
        if members.closed is not None:
            return
        members.mark_dead(rank, cause)
        self._center.on_death(members, rank)

    def _forget(self, group: WorkerGroup) -> None:
        self._groups.pop(group._members.key, None)
        self._members.pop(group._members.key, None)

    def _unique_name(self, name: str) -> str:
        if not name or "/" in name or name.startswith("."):
            raise ConfigError(f"a group's name is a folder's name, got {name!r}")
        count = self._names[name] = self._names.get(name, 0) + 1
        return name if count == 1 else f"{name}-{count}"

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeClosed("the runtime has been closed")


def current_runtime() -> Runtime:
    """This process's live runtime.

    Raises:
        RuntimeClosed: there is none.
    """
    if _root is None:
        raise RuntimeClosed("no Runtime is open in this process")
    return _root


def _attempt(step: Any) -> None:
    try:
        step()
    except Exception:
        logger.warning("a step of closing the runtime failed", exc_info=True)
