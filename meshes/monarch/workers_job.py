"""A Monarch job of workers that were started at known addresses, and how job descriptions are read.

machine: run_worker_loop_forever(address) <──tcp── WorkersJob: `monarch apply`, then runs
"""

from __future__ import annotations

import logging
import os
import re
import socket
from collections.abc import Mapping, Sequence
from typing import Any

from monarch.actor import attach_to_workers, enable_transport
from monarch.job import JobState, JobTrait

from neoproto.packages import blank

logger = logging.getLogger(__name__)

CLIENT_VARIABLE = "NEOPROTO_CLIENT"
CONNECT_S = 3.0
_ADDRESS = re.compile(r"tcp://(\[[0-9a-fA-F:.]+\]|[^:/@\[\]\s]+):(\d+)")


def mesh_sizes(text: str) -> dict[str, int]:
    """Read "train=2,rollout=1".

    Raises:
        ValueError: it is not of this form.
    """
    sizes: dict[str, int] = {}
    for part in text.split(","):
        found = re.fullmatch(r"\s*([A-Za-z_]\w*)\s*=\s*([1-9]\d*)\s*", part)
        if found is None or found[1] in sizes:
            raise ValueError(f"meshes are given as name=hosts,…, each name once; got {text!r}")
        sizes[found[1]] = int(found[2])
    return sizes


def mesh_addresses(text: str) -> dict[str, list[str]]:
    """Read "default=tcp://10.0.0.1:26600 tcp://10.0.0.2:26600,…"; without a name it is "default".

    Raises:
        ValueError: it is not of this form.
    """
    meshes: dict[str, list[str]] = {}
    for part in text.split(","):
        name, equals, listed = part.partition("=")
        name, addresses = (name.strip(), listed.split()) if equals else ("default", part.split())
        wrong = [address for address in addresses if _ADDRESS.fullmatch(address) is None]
        if wrong or not addresses or not name.isidentifier() or name in meshes:
            raise ValueError(
                f"workers are given as name=tcp://HOST:PORT tcp://HOST:PORT,…, each name once; got {text!r}"
            )
        meshes[name] = addresses
    return meshes


def use_client_address() -> bool:
    """Have this process's Monarch client listen where NEOPROTO_CLIENT names; False if it is not set.

    Otherwise it listens at the address of this machine's name, which on some machines is loopback.
    """
    client = os.environ.get(CLIENT_VARIABLE)
    if client:
        enable_transport(client)
    return bool(client)


class WorkersJob(JobTrait):  # type: ignore[misc] # Monarch is not typed
    """Attaches to workers at their addresses. It neither starts nor ends them."""

    def __init__(self, meshes: Mapping[str, Sequence[str]]) -> None:
        """Attach to nothing yet.

        Args:
            meshes: name -> addresses of its hosts, `tcp://HOST:PORT`.
        """
        super().__init__()
        self._meshes = {name: list(addresses) for name, addresses in meshes.items()}

    def __reduce__(self) -> Any:
        """By way of `neoproto`: `monarch` reads the pickle where another package may be called meshes."""
        return blank, ("meshes.monarch.workers_job", "WorkersJob"), vars(self)

    def _prepare_client_gateway(self) -> None:
        """Listen where this machine is reached: workers answer by TCP. By default a free port, at the address
        from which this machine reaches the first worker."""
        first = next(iter(self._meshes.values()))[0]
        if not use_client_address():
            enable_transport(f"tcp://{_route_to(first)}:0")

    def _create(self, client_script: str | None) -> None:
        if client_script is not None:
            raise RuntimeError("a WorkersJob cannot run batch-mode scripts")
        silent = self._silent()
        if silent:
            raise RuntimeError(f"no worker listens at {', '.join(silent)}")

    def _state(self) -> JobState:
        self._prepare_client_gateway()
        return JobState(
            {
                name: attach_to_workers(name=name, ca="trust_all_connections", workers=addresses)
                for name, addresses in self._meshes.items()
            }
        )

    def can_run(self, spec: Any) -> bool:
        """Whether this job is `spec`, and all its workers listen."""
        return isinstance(spec, WorkersJob) and spec._meshes == self._meshes and not self._silent()

    def _silent(self) -> list[str]:
        """Addresses that take no connection."""
        silent = []
        for address in (one for addresses in self._meshes.values() for one in addresses):
            try:
                socket.create_connection(_host_port(address), timeout=CONNECT_S).close()
            except OSError:
                silent.append(address)
        return silent

    def _kill(self) -> None:
        logger.warning("the workers of this job run on; end them where they were started")


def _host_port(address: str) -> tuple[str, int]:
    found = _ADDRESS.fullmatch(address)
    assert found is not None, address
    return found[1].strip("[]"), int(found[2])


def _route_to(address: str) -> str:
    """The address of this machine from which `address` is reached. No packet is sent."""
    host, port = _host_port(address)
    family, kind, _, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(where)
        own = str(probe.getsockname()[0])
    return f"[{own}]" if family == socket.AF_INET6 else own
