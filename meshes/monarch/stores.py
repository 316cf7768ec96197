"""The run's one global store: its processes, and this process's client of it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import pickle
import re
import socket
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import cloudpickle  # type: ignore[import-untyped]

from meshes.common import procs
from meshes.common.bootstrap import LOG_VARIABLE
from meshes.common.guardian import marked_processes
from meshes.monarch import sdk
from meshes.monarch.jobs import Node, Nodes
from neoproto.errors import RuntimeClosed
from neoproto.runtime.backend import ProcessInfo
from neoproto.runtime.worker import WorkerIdentity

if TYPE_CHECKING:
    from neoproto.store.torchstore.actors import StoreSpec
    from neoproto.store.torchstore.client import StoreClient

INDEX_LOG = "index.log"


class GlobalStore:
    """Volumes on the hosts of one cluster, an index beside the controller, and the controller's client."""

    def __init__(
        self,
        *,
        log_dir: Path,
        name: str,
        strategy: str,
        timeout_s: float,
        command: Callable[[Path, Node], Any],
        guard_shm: Callable[[str], None],
        closing: Future[None],
    ) -> None:
        """Start nothing yet.

        Args:
            log_dir: folder of the store processes' logs.
            name: unique to the run.
            strategy: "host" or "local_rank".
            timeout_s: of starting, and of one operation.
            command: how a process is started, by its log and its host.
            guard_shm: gets the prefix of the store's files in shared memory, before there are any.
            closing: once it is done, the start is not waited for.
        """
        self._log_dir, self._name, self._strategy, self._timeout_s = log_dir, name, strategy, timeout_s
        self._command, self._guard_shm, self._closing = command, guard_shm, closing
        self.unwatched = False
        self._server: Any = None
        self._procs: list[Any] = []
        self._client: StoreClient | None = None
        self.spec: bytes | None = None

    def start(self, hosts: Nodes, beside_controller: Nodes, ranks_per_host: int) -> StoreClient:
        """Start the processes and attach this one.

        Args:
            hosts: one volume on each, or one for each local rank of each.
            beside_controller: one host, for the index.
        """
        # Imported here, on a thread that can be interrupted: a helper still at it when the interpreter ends
        # takes the program down.

        client = sdk.run_blocking(
            lambda: asyncio.run(self._start(hosts, beside_controller, ranks_per_host)), self._closing
        )
        self._client = client
        return client

    async def _start(self, hosts: Nodes, beside_controller: Nodes, ranks_per_host: int) -> StoreClient:
        from neoproto.store import set_process_store
        from neoproto.store.shm import store_prefix
        from neoproto.store.torchstore.actors import StoreServer
        from neoproto.store.torchstore.client import StoreClient

        self._guard_shm(store_prefix(self._name))
        count = 1 if self._strategy == "host" else ranks_per_host
        volumes = hosts.mesh.spawn_procs(
            per_host={"volumes": count},
            name="np-volumes",
            bootstrap_command=lambda point: self._command(
                self._log_dir / f"volume{point.rank}.log", hosts.nodes[point.rank // count]
            ),
        )
        index = beside_controller.mesh.spawn_procs(
            per_host={"index": 1},
            name="np-index",
            bootstrap_command=lambda _: self._command(self._log_dir / INDEX_LOG, beside_controller.nodes[0]),
        )
        self._procs = [volumes, index]
        if self._closing.done():
            raise RuntimeClosed(sdk.CLOSED)
        self._server = await StoreServer.start(
            procs=volumes,
            name=self._name,
            strategy="host" if self._strategy == "host" else "local_rank",
            timeout_s=self._timeout_s,
            index_procs=index,
            spill=True,
        )
        spec: StoreSpec = self._server.spec()
        self.spec = cloudpickle.dumps(spec)
        client = StoreClient.attach(spec, host_id=host_id("", 0), local_rank=0)
        set_process_store(client)
        return client

    def processes(self, run_id: str) -> dict[str, list[ProcessInfo]]:
        """Those of this machine, by the logs they write."""
        logs = re.compile(
            os.fsencode(rf"{LOG_VARIABLE}={re.escape(str(self._log_dir))}/(volume|index)(\d*)\.log")
        )
        found: dict[str, list[ProcessInfo]] = {}
        for pid in marked_processes(run_id):
            with contextlib.suppress(OSError):
                for entry in procs.environ(pid):
                    if log := logs.fullmatch(entry):
                        name, rank = f"store-{log[1].decode()}", int(log[2] or 0)
                        info = ProcessInfo(rank=rank, pid=pid, host=socket.gethostname(), rendezvous=None)
                        found.setdefault(name, []).append(info)
        return found

    def fail(self, reason: str) -> None:
        """A process of the store has died: this process's operations fail from now on."""
        if self._client is not None:
            self._client.fail(reason)

    def close(self, timeout_s: float) -> None:
        """Close this process's client, then the server; its processes end with the hosts.

        One that has not started yet is left to go with the hosts.
        """
        from neoproto.store import set_process_store

        set_process_store(None)
        if self._client is None:
            return
        self._client.close()
        sdk.run_blocking(lambda: asyncio.run(self._server.close(timeout_s)))

        def stop(procs: Any) -> bool:
            return sdk.run_blocking(lambda: sdk.stop_procs(procs, timeout_s))

        with ThreadPoolExecutor(len(self._procs)) as threads:
            self.unwatched = all(threads.map(stop, self._procs))


@dataclass(frozen=True, kw_only=True, slots=True)
class StoreAccess:
    """What a group's processes attach to the store with.

    Attributes:
        spec: the store's, pickled: reading it takes TorchStore and torch, which not every worker needs.
        host_ids: what the store calls the group's nodes, in order.
    """

    spec: bytes | None
    host_ids: tuple[str, ...]

    def attach(self, identity: WorkerIdentity) -> StoreClient:
        """The client of one of these processes."""
        from neoproto.store.torchstore.client import StoreClient

        assert self.spec is not None
        return StoreClient.attach(
            pickle.loads(self.spec),
            host_id=self.host_ids[identity.node_rank],
            local_rank=identity.local_rank,
        )


def host_id(cluster: str, node: int, first_cluster: str = "") -> str:
    """What a host is called by the store: volumes are on the first cluster's hosts, which go by number."""
    return str(node) if cluster == first_cluster else f"{cluster}/{node}"
