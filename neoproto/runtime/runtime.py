"""`Runtime`: the process root. Owns the hosts, the worker groups and the store of one run."""

from __future__ import annotations

import atexit
import logging
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal

from neoproto.errors import (
    ConfigError,
    DeadlineExceeded,
    RuntimeClosed,
    StoreError,
    WorkerDied,
    WorkerInitError,
)
from neoproto.runtime.attached import AttachedRuntime, attached_runtime
from neoproto.runtime.backend import (
    STORE_KEY,
    BackendOptions,
    GroupRequest,
    Preload,
    compile_placement,
    load_backend,
    local_gpus,
    store_death,
)
from neoproto.runtime.base import RuntimeBase
from neoproto.runtime.call import RemoteCall
from neoproto.runtime.call_tracker import CallTracker
from neoproto.runtime.display import run_html
from neoproto.runtime.executor import InitArguments
from neoproto.runtime.failures import ProcessFailure, ProcessFailures
from neoproto.runtime.group import WorkerGroup, method_tables, roles_of, set_caller
from neoproto.runtime.group_state import GroupState
from neoproto.runtime.placement import Block, DeviceType, Placement, placement_table
from neoproto.runtime.pool import ResourcePool
from neoproto.runtime.processes import RESERVED_NAMES, ProcessFile
from neoproto.runtime.reaper import Reaper
from neoproto.runtime.relay import AttachSpec, Origin, RelayServer
from neoproto.runtime.settings import RuntimeSettings
from neoproto.runtime.signals import SignalHandlers, ignored_signals
from neoproto.runtime.wire import INIT, GroupRef, MethodCall, encode
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
LIVE_ALREADY = (
    "this process has a live Runtime already (run folder {folder}). neoproto.runtime.current_runtime() is "
    "it: use it, or close it first with current_runtime().close()"
)


class Runtime(RuntimeBase):
    """The root of a run: hosts, worker groups, one object store. One live root a process.

    Use it as a context manager, or call `close`. Leaving on an exception, Ctrl-C, SIGTERM or SIGHUP closes it
    the same way, with less time for calls under way.
    """

    def __init__(self, settings: RuntimeSettings, placement: Placement | None) -> None:
        super().__init__(settings.run_id, settings.run_dir, placement)
        self._settings = settings
        self._tracker = CallTracker()
        self._processes = ProcessFile(settings.run_dir)
        self._failures = ProcessFailures()
        self._owners: dict[str, Origin] = {}
        self._names: set[str] = set(RESERVED_NAMES)
        self._names_lock = threading.Lock()
        self._reaper = Reaper(lambda key: self._close_group(key, DRAIN_S))
        self._relay_server = RelayServer(
            self._tracker,
            {
                "create_worker_group": self._create_for,
                "close_worker_group": self._close_for,
                "create_resource_pool": lambda _, *args: self.create_resource_pool(*args),
                "mesh_ranks": lambda _, *args: self._tracker.mesh_ranks(*args),
            },
        )
        self._signals = SignalHandlers()
        self._close_lock = threading.RLock()
        self._closed = False
        self._before_close: list[Callable[[], None]] = []
        self._expected: tuple[Preload, ...] = ()
        self._backend = load_backend(settings.backend)

    @classmethod
    def from_config(
        cls, config: Any, *, placement: Placement | None = None, expected: Sequence[Preload] = ()
    ) -> Runtime:
        """Check the topology, allocate hosts and start the store.

        Args:
            config: a mapping with `runtime` and `topology`, a composed configuration, or an object with such
                attributes; or what `runtime` holds alone: `{"backend": "monarch", "env_vars": {…}}`.
            placement: the compiled topology, if the caller has compiled it.
            expected: what groups to come preload: it is imported from now on.

        Raises:
            ConfigError: an option is unknown or has a wrong value; nothing has been started.
            TopologyError: with every violation; nothing has been started.
            RuntimeError: this process has a live root, or is a worker of one.
        """
        global _root
        if attached_runtime() is not None:
            raise RuntimeError("a worker cannot make a Runtime; current_runtime() is its part in the run")
        settings = RuntimeSettings.from_config(config)
        if placement is None and settings.topology is not None:
            placement = compile_placement(settings.topology, hosts_are_here=settings.hosts_are_here)
        runtime = cls(settings, placement)
        runtime._expected = tuple(expected)
        with _root_lock:
            if _root is not None:
                raise RuntimeError(LIVE_ALREADY.format(folder=_root.run_dir))
            _root = runtime
            set_caller(runtime._tracker)
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
        self._processes.open()
        placement = self._placement
        clusters = {} if placement is None else {one.name: one.nnodes for one in placement.clusters}
        ranks_per_host = 1 if placement is None else placement.clusters[0].devices_per_node
        gpus = {
            one.name: one.devices_per_node
            for one in (placement.clusters if placement is not None else ())
            if one.device_type == "gpu"
        }
        options = BackendOptions(
            run_id=settings.run_id,
            run_dir=settings.run_dir,
            clusters=clusters or {"default": 1},
            env=settings.env_vars,
            warm_parent=settings.warm_parent,
            expected=self._expected,
            options={**settings.options, "ranks_per_host": ranks_per_host, "gpus_per_host": gpus},
        )
        self._backend.start(options, self._tracker.on_reply, self._on_death, self._relay_server.on_request)
        self._reaper.start()
        atexit.register(self.close)
        self._backend.start_store()
        for group, processes in self._backend.store_processes().items():
            self._processes.add(group, processes)

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
            ValueError: sizes below 1, more nodes than the cluster has, more GPUs than this machine has, or
                "controller" with several nodes.
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
        here = device_type == "gpu" and self._settings.hosts_are_here
        if here and processes_per_node > (gpus := local_gpus()):
            raise ValueError(f"the pool wants {processes_per_node} GPUs a node, this machine has {gpus}")
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
        timeout: float | None = None,
    ) -> WorkerGroup:
        """Start one process on each slot of a pool and build the worker(s) in it.

        Args:
            workers: one class; or role → class, fused: all roles in each process (`group.role(name)`).
            name: the folder of its logs; the class's name by default. A name in use gets a number.
            timeout: seconds for the workers' `__init__`, 600 if None; the processes have as long to start,
                and at least two minutes.

        Raises:
            WorkerInitError: `__init__` raised on some rank; the exception is the cause.
            WorkerDied, DeadlineExceeded: a process died, did not start, or `__init__` did not end.
            RuntimeClosed: this runtime is closed.
        """
        tables = method_tables(workers)
        ref = self._create_group(workers, on, name, timeout, None).ref
        return WorkerGroup(self._tracker, ref, tables, on, self._close_group, self._reaper.enqueue)

    def _create_group(
        self,
        workers: ClassWithInitArgs | Mapping[str, ClassWithInitArgs],
        on: ResourcePool,
        name: str | None,
        timeout: float | None,
        owner: Origin | None,
    ) -> GroupState:
        self._check_open()
        roles = roles_of(workers)
        name = self._unique_name(name or next(iter(roles.values())).cls.__name__.lower())
        group = self._spawn(name, on, roles, owner, max(SPAWN_TIMEOUT_S, timeout or 0.0))
        try:
            self._build_workers(group, roles, INIT_TIMEOUT_S if timeout is None else timeout)
        except BaseException:
            group.mark_closed(f"worker group {name} could not be built")
            self._tracker.fail_all(group, f"worker group {name} could not be built")
            group.processes.kill()
            self._forget(group)
            raise
        return group

    def _spawn(
        self,
        name: str,
        pool: ResourcePool,
        roles: Mapping[str, ClassWithInitArgs],
        owner: Origin | None,
        timeout_s: float,
    ) -> GroupState:
        env = dict(self._settings.env_vars)
        preload: dict[str, None] = {}
        for spec in roles.values():
            env.update(spec.env)
            preload.update(dict.fromkeys(spec.preload))
        key = f"{name}-{self.run_id}"
        request = GroupRequest(
            key=key,
            name=name,
            pool=pool,
            env=env,
            preload=tuple(preload),
            log_dir=self.run_dir / "logs" / name,
            attach=AttachSpec(run_id=self.run_id, run_dir=self.run_dir, placement=self._placement, key=key),
        )
        try:
            processes = self._backend.spawn_group(request, timeout_s)
        except TimeoutError as error:  # the backend's own has no text
            raise DeadlineExceeded("start", name, range(pool.world_size), timeout_s) from error
        group = GroupState(key, name, processes, request.log_dir)
        if owner is not None:
            self._owners[key] = owner
        # Deaths are reported by key, so the group is known before they are watched for.
        self._tracker.groups[key] = group
        self._processes.add(name, processes.processes)
        processes.watch()
        return group

    def _build_workers(
        self, group: GroupState, roles: Mapping[str, ClassWithInitArgs], timeout_s: float
    ) -> None:
        """Run `__init__` of every role on every rank; the first failure ends the wait.

        Raises:
            WorkerInitError: it raised on a rank; the exception is the cause.
            WorkerDied, DeadlineExceeded: as for any call.
        """
        rendezvous = group.processes.processes[0].rendezvous
        assert rendezvous is not None, "rank 0 listens from its start"
        classes = {role: (spec.cls, spec.args, spec.kwargs) for role, spec in roles.items()}
        payload = encode(InitArguments(classes=classes, rendezvous=rendezvous))
        deadline = time.monotonic() + timeout_s
        # A call for each rank, so that a failure is known by its rank.
        calls: list[RemoteCall[Any]] = [
            self._tracker.start(
                group.ref,
                MethodCall(role="", method=INIT, sends=[((rank,), payload)], is_async=False),
                deadline,
            )
            for rank in range(group.world_size)
        ]
        try:
            RemoteCall.gather(calls).result()
        except (WorkerDied, DeadlineExceeded, RuntimeClosed):
            raise
        except Exception as error:
            rank = next(rank for rank, call in enumerate(calls) if call._error is error)
            host = group.processes.processes[rank].host
            failure = WorkerInitError(
                f"__init__ of {group.name}[{rank}] on {host} raised {type(error).__name__}: {error}"
            )
            tail = group.log_tail(rank)
            if tail:
                failure.add_note(f"--- its last output ---\n{tail}")
            raise failure from error

    def placement_table(self) -> Table:
        """Where every model of the topology runs."""
        return placement_table(self._placement)

    def print_placement(self, console: Console) -> None:
        """Print `placement_table`."""
        console.print(self.placement_table())

    def before_close(self, action: Callable[[], None]) -> None:
        """Have `action` run when this runtime begins to close: groups and store are still there.

        It is for what uses the runtime on a thread of its own, and takes seconds. The latest runs first.
        """
        self._check_open()
        self._before_close.append(action)

    def _repr_html_(self) -> str:
        """What a notebook shows, from what this process knows."""
        return run_html(self, "closed" if self._closed else "open", self._open_groups())

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
        with self._close_lock, ignored_signals():
            if self._closed:
                return
            self._closed = True
            try:
                for action in reversed(self._before_close):
                    _attempt(action)
                self._tracker.stop_admission("the runtime has been closed")
                self._backend.stop_spawning()
                self._close_groups(drain_s=0.5 if failed else DRAIN_S)
                self._tracker.close("the runtime has been closed")
                self._reaper.close(1.0)
                for step in (
                    lambda: self._backend.close_store(STORE_CLOSE_S),
                    lambda: self._backend.close(RELEASE_S),
                ):
                    _attempt(step)
                self._processes.clear()
            finally:
                self._signals.restore()
                atexit.unregister(self.close)
                with _root_lock:
                    if _root is self:
                        _root = None
                        set_caller(None)

    def _close_groups(self, drain_s: float) -> None:
        """All at once, each on its own thread: a stuck one must not use up the others' time."""
        threads = [
            threading.Thread(
                target=_attempt, args=(lambda key=key: self._close_group(key, drain_s),), daemon=True
            )
            for key, group in list(self._tracker.groups.items())
            # One that another thread is closing is waited for. Those of workers go with their workers.
            if key not in self._owners and (group.closed is None or group.closing.locked())
        ]
        for thread in threads:
            thread.start()
        until = time.monotonic() + drain_s + STOP_S
        for thread in threads:
            thread.join(max(0.0, until - time.monotonic()))

    def watch_failures(self, groups: Collection[str]) -> ProcessFailure:
        """A future that fails once a process of one of these groups, or of the store, has died.

        A call to a dead process fails by itself. This is for the time between calls.

        Args:
            groups: their names.
        """
        return self._failures.watch(groups)

    watch_losses = watch_failures  # the name of earlier releases

    def _on_death(self, key: str, rank: int, cause: str | None) -> None:
        """A process has died. Runs on the backend's threads; the order below is what calls rely on."""
        if key == STORE_KEY:
            self._on_store_death(rank, cause)
            return
        group = self._tracker.groups.get(key)
        if group is None or group.closed is not None:
            return
        if cause is None:
            group.mark_dying(rank)
            return
        # Marked before the pending calls are looked through: see `CallTracker.start`.
        group.mark_dead(rank, cause)
        self._tracker.on_death(group, rank)
        self._failures.report(group.name, group.death_of(rank))
        self._processes.remove(group.name, rank)
        for child in self._children_of(key, rank):
            self._reaper.enqueue(child)

    def _on_store_death(self, number: int, cause: str | None) -> None:
        if cause is None:
            return
        self._failures.report(None, StoreError(store_death(cause)))
        rows = [
            (group, info.rank)
            for group, processes in self._backend.store_processes().items()
            for info in processes
        ]
        self._processes.remove(*rows[number])

    def _close_group(self, key: str, drain_s: float) -> None:
        """Release a group, then those that its workers made. Closing twice is a no-op."""
        group = self._tracker.groups.get(key)
        if group is None:
            return
        with group.closing:  # a second caller returns when the first is done
            if not group.mark_closed(f"worker group {group.name} has been closed"):
                return
            living = group.living()
            drained = False
            # What is broken, or has lost a rank, may never end: it is not waited for.
            if group.broken is None and len(living) == group.world_size and drain_s > 0:
                drained = group.processes.drain(living, drain_s)
            self._tracker.fail_all(group, f"worker group {group.name} has been closed")
            if drained:
                group.processes.stop(STOP_S)
            else:
                group.processes.kill()
            # After their maker: it may use them while it drains.
            for child in self._children_of(key):
                self._close_group(child, 0.0)
            self._forget(group)

    def _open_groups(self) -> list[GroupState]:
        return [group for group in list(self._tracker.groups.values()) if group.closed is None]

    def _children_of(self, key: str, rank: int | None = None) -> list[str]:
        return [
            child
            for child, owner in list(self._owners.items())
            if owner.key == key and rank in (None, owner.rank)
        ]

    def _forget(self, group: GroupState) -> None:
        self._owners.pop(group.key, None)
        self._processes.remove(group.name)

    # What workers ask for, see relay.py

    def _create_for(
        self,
        origin: Origin,
        workers: ClassWithInitArgs | Mapping[str, ClassWithInitArgs],
        on: ResourcePool,
        name: str | None,
        timeout: float | None,
    ) -> GroupRef:
        group = self._create_group(workers, on, name, timeout, origin)
        parent = self._tracker.groups.get(origin.key)
        # The maker may have died while its group was made; from now on its death closes the group.
        if parent is None or parent.closed is not None or origin.rank not in parent.living():
            self._close_group(group.key, 0.0)
            raise RuntimeClosed("the worker that asked for the group is gone")
        return group.ref

    def _close_for(self, origin: Origin, key: str, drain_s: float) -> None:
        group = self._tracker.groups.get(key)
        if group is not None and group.closed is None and self._owners.get(key) != origin:
            raise ValueError(f"worker group {key} was not made by this worker")
        self._close_group(key, drain_s)

    def _unique_name(self, name: str) -> str:
        if not name or "/" in name or name.startswith("."):
            raise ConfigError(f"a group's name is a folder's name, got {name!r}")
        with self._names_lock:
            candidate, count = name, 1
            while candidate in self._names:
                count += 1
                candidate = f"{name}-{count}"
            self._names.add(candidate)
        return candidate

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeClosed("the runtime has been closed")


def current_runtime() -> Runtime | AttachedRuntime:
    """This process's live runtime; in a worker, its part in the run it belongs to.

    Raises:
        RuntimeClosed: there is none.
    """
    found = _root or attached_runtime()
    if found is None:
        raise RuntimeClosed("no Runtime is open in this process")
    return found


def _attempt(step: Any) -> None:
    try:
        step()
    except Exception:
        logger.warning("a step of closing the runtime failed", exc_info=True)
