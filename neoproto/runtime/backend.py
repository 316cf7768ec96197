"""The private protocol between the runtime and what actually starts processes and moves messages.

Nothing here knows a backend by more than its import string, which is imported when it is chosen.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from neoproto.errors import ConfigError
from neoproto.runtime.executor import CallStatus
from neoproto.runtime.wire import CallHeader, RemoteFailure

if TYPE_CHECKING:
    from neoproto.config import RuntimeConfig
    from neoproto.runtime.placement import Placement
    from neoproto.runtime.pool import ResourcePool
    from neoproto.runtime.relay import Answer, AttachSpec, Origin, Request
    from neoproto.store import ObjectStore

BACKENDS: dict[str, str] = {"monarch": "meshes.monarch.backend:MonarchBackend"}
"""Name → "module:class"."""
STORE_KEY = "/store"
"""What deaths of the store's processes are reported as; no group's key has a slash."""
TOPOLOGY_COMPILER = "meshes.common.topology:compile_here"
GPU_COUNTER = "meshes.common.machine:gpu_count"

OnReply = Callable[[int, int, RemoteFailure | bytes], None]
"""(call id, rank, outcome); must not block."""
OnDeath = Callable[[str, int, str | None], None]
"""(group key, rank, cause in words); first with None if the death is known before its cause. Of the
store: its key, and the place among all of `store_processes` in a row."""
OnRequest = Callable[["Origin", "Request", "Answer"], None]
"""A worker asks for something; must not block."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Preload:
    """What a group's processes have from the start, where they are forked from a warm parent.

    Attributes:
        modules: names of modules that have been imported.
        env: the group's environment.
    """

    modules: tuple[str, ...]
    env: Mapping[str, str]


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupRequest:
    """Processes to start.

    Attributes:
        key: unique within the run.
        name: its name in messages; the folder of its logs.
        pool: where; one process on each of its slots.
        env: environment, applied before any import.
        preload: modules that may have been imported in the processes, in this environment.
        log_dir: folder for `rank<k>.log`.
        attach: what the processes know of the run.
    """

    key: str
    name: str
    pool: ResourcePool
    env: Mapping[str, str]
    preload: tuple[str, ...]
    log_dir: Path
    attach: AttachSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessInfo:
    """What is known of a process once it is up.

    Attributes:
        rank: its rank in its group.
        pid, host: where it is.
        machine: what the pid means something on; "" if not known.
        parent: the warm parent that it was forked from; 0 if it was started afresh.
        rendezvous: where it listens for its group's `torch.distributed` store, if it is rank 0.
    """

    rank: int
    pid: int
    host: str
    rendezvous: tuple[str, int] | None
    machine: str = ""
    parent: int = 0


class ProcessGroup(Protocol):
    """A group's processes, as the process that called `spawn_group` sees them."""

    @property
    def processes(self) -> Sequence[ProcessInfo]: ...

    @property
    def native(self) -> Any:
        """The backend's own handle, for those who want it."""
        ...

    def watch(self) -> None:
        """Begin to report deaths."""
        ...

    def send(self, ranks: Sequence[int], header: CallHeader, payload: bytes) -> None:
        """Send one call to some ranks, behind all that was sent before. Does not wait."""
        ...

    def statuses(self, ranks: Sequence[int], call_id: int, timeout_s: float) -> dict[int, CallStatus]:
        """What these ranks do with a call; ranks that do not answer in time are left out."""
        ...

    def stacks(self, ranks: Sequence[int]) -> dict[int, str]:
        """Where processes are that do not answer `statuses`, as far as their machine can tell."""
        ...

    def meshes(self, role: str, timeout_s: float) -> list[dict[str, tuple[int, bool]]]:
        """What the workers have registered by `Worker.register_mesh`, by rank."""
        ...

    def break_group(self, ranks: Sequence[int], reason: str) -> None:
        """Make the containers refuse everything. Does not wait."""
        ...

    def drain(self, ranks: Sequence[int], timeout_s: float) -> bool:
        """Stop admission on these ranks and wait for what was admitted; False if it did not end in time."""
        ...

    def stop(self, timeout_s: float) -> None:
        """Release the processes; after `timeout_s` by force."""
        ...

    def kill(self) -> None:
        """Release the processes by force."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class BackendOptions:
    """What a backend is started with.

    Attributes:
        run_id: the run's mark, unique on the machine.
        run_dir: the run's folder.
        clusters: name → number of nodes.
        env: environment of every process.
        warm_parent: whether processes may be forked from one that has imported what they need.
        expected: what groups that will be started preload.
        options: the backend's own block of the configuration.
    """

    run_id: str
    run_dir: Path
    clusters: Mapping[str, int]
    env: Mapping[str, str]
    warm_parent: bool = False
    expected: tuple[Preload, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)


class RuntimeBackend(Protocol):
    """What a backend provides. One instance per live `Runtime`."""

    def check(self, config: RuntimeConfig, clusters: Mapping[str, int]) -> None:
        """See that hosts are there for these clusters, name → number of nodes, without connecting to them.

        Raises:
            ConfigError: with everything that is wrong.
        """
        ...

    def start(
        self, options: BackendOptions, on_reply: OnReply, on_death: OnDeath, on_request: OnRequest
    ) -> None:
        """Allocate hosts."""
        ...

    def add_cluster(self, name: str, nnodes: int) -> None:
        """Allocate the hosts of one more cluster."""
        ...

    def start_store(self) -> ObjectStore:
        """Start the run's one global store, and return this process's client of it."""
        ...

    def store_processes(self) -> Mapping[str, Sequence[ProcessInfo]]:
        """The store's processes on this machine, by what they are: "store-volume", "store-index"."""
        ...

    def spawn_group(self, request: GroupRequest, timeout_s: float) -> ProcessGroup:
        """Start processes, each with a container that waits for its `INIT` call and has a store client.

        Raises:
            RuntimeClosed: `stop_spawning` was called first.
        """
        ...

    def stop_spawning(self) -> None:
        """End every wait for something to start, now and later, with `RuntimeClosed`."""
        ...

    def close_store(self, timeout_s: float) -> None:
        """Close the global store; this process's client first."""
        ...

    def close(self, timeout_s: float) -> None:
        """Release everything that is left."""
        ...


def store_death(cause: str) -> str:
    """What is said of the death of one of the store's processes."""
    return f"a process of the object store died: {cause}"


def compile_placement(topology: Any, *, hosts_are_here: bool) -> Placement:
    """Compile the `topology` block.

    Args:
        hosts_are_here: see `RuntimeConfig`.

    Raises:
        TopologyError: with every violation found.
    """
    placement: Placement = _imported(TOPOLOGY_COMPILER)(topology, hosts_are_here=hosts_are_here)
    return placement


def check_hosts(config: RuntimeConfig, placement: Placement) -> None:
    """See that the hosts that a run does not make itself are there. Nothing is started.

    Raises:
        ConfigError: with everything that is wrong.
    """
    if not config.hosts_are_here:
        load_backend(config.backend).check(config, {one.name: one.nnodes for one in placement.clusters})


def local_gpus() -> int:
    """GPUs that torch can use on this machine."""
    count: int = _imported(GPU_COUNTER)()
    return count


def check_backend(name: str) -> None:
    """Raises ConfigError: no such backend."""
    if name not in BACKENDS:
        raise ConfigError(f"runtime.backend: no backend {name!r}; there is {', '.join(sorted(BACKENDS))}")


def load_backend(name: str) -> RuntimeBackend:
    """Import and make the backend called `name`.

    Raises:
        ConfigError: no such backend.
    """
    check_backend(name)
    backend: RuntimeBackend = _imported(BACKENDS[name])()
    return backend


def _imported(where: str) -> Any:
    module_name, _, attribute = where.partition(":")
    return getattr(importlib.import_module(module_name), attribute)
