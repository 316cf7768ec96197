"""The actor in every worker process: hands what arrives on the process's port for calls to the core."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

from monarch.actor import Actor, concurrent_endpoint, context

from meshes.common.core import ContainerCore, ContainerSpec
from meshes.monarch import ports
from meshes.monarch.stores import StoreAccess
from neoproto.private_api.monarch import pin_context
from neoproto.private_api.monarch_ports import Address
from neoproto.runtime.backend import ProcessInfo
from neoproto.runtime.executor import CallStatus
from neoproto.runtime.relay import Origin, Request
from neoproto.runtime.wire import CallHeader

F = TypeVar("F", bound=Callable[..., Any])


def _endpoint(method: F) -> F:
    return cast(F, concurrent_endpoint(method))


class Container(Actor):  # type: ignore[misc] # Monarch is not typed
    """Hosts one process's worker(s). Names of endpoints keep clear of those of `ActorMesh`."""

    def __init__(self, spec: ContainerSpec, store: StoreAccess, requests: Address) -> None:
        """Make this process a part of the run.

        Args:
            requests: where the root's `ports.requests()` is.
        """
        rank = context().actor_instance.rank.rank
        pin_context()

        def send(origin: Origin, request: Request) -> None:
            ports.send((spec.attach.run_id, ports.replies().address, origin, request), requests)

        self._core = ContainerCore(spec, rank, None if store.spec is None else store.attach, send)
        # Answers first: the first call may ask the root for something.
        ports.replies().set_sink(self._core.runtime.on_answer)
        ports.calls().set_sink(self._take)

    def _take(self, back: Address, header: CallHeader, payload: bytes) -> None:
        """Take a call off the port, on its thread."""
        rank = self._core.identity.rank
        self._core.take(header, payload, lambda outcome: ports.send((header.call_id, rank, outcome), back))

    @_endpoint
    async def hello(self) -> tuple[ProcessInfo, Address]:
        """Who and where this process is, and where it takes calls."""
        return self._core.info(), ports.calls().address

    @_endpoint
    async def call_status(self, call_id: int) -> CallStatus:
        """What this process does with a call."""
        return self._core.call_status(call_id)

    @_endpoint
    async def mesh_places(self, role: str) -> dict[str, tuple[int, bool]]:
        """What the worker has said by `Worker.register_mesh`."""
        return self._core.mesh_places(role)

    @_endpoint
    async def break_off(self, reason: str) -> None:
        """Refuse everything from now on."""
        self._core.break_off(reason)

    @_endpoint
    async def store_failed(self, reason: str) -> None:
        """A process of the store has died."""
        self._core.fail_store(reason)

    @_endpoint
    async def drain(self, timeout_s: float) -> bool:
        """Wait for the calls before the last one."""
        return await self._core.drain(timeout_s)

    async def __cleanup__(self, exc: Exception | None) -> None:
        self._core.close()

    def _handle_undeliverable_message(self, message: Any) -> bool:
        # The other side is gone. What that means for its calls is judged where its process is watched.
        return True
