"""The process that hosts a run's weight registry, and how other processes reach it.

RegistryWorker (own process): a WeightRegistry
      ▲ calls with a deadline
GroupRegistry: awaited by update agents and the controller; blocking in the threads of publishers

A worker's call goes by way of the root (`neoproto/runtime/attached.py`, `relay.py`). What an agent or a
puller names `WeightRegistry` is this proxy in a run, and the registry itself in its unit tests.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, Protocol

from neoproto.runtime import Dispatch, Worker, register
from neoproto.weights.manifest import Manifest
from neoproto.weights.registry import LeaseInfo, WeightRegistry
from neoproto.weights.version import WeightVersion

CALL_TIMEOUT_S = 30.0
"""What an answer of the registry may take, apart from what it was asked to wait for."""


_METHODS = {
    name: inspect.signature(method)
    for name, method in vars(WeightRegistry).items()
    if inspect.iscoroutinefunction(method) and not name.startswith("_")
}
"""All methods of a registry, with their parameters."""


class RegistryWorker(WeightRegistry, Worker):
    """The registry as a worker of one rank. Its process does nothing else, so that it can be lost alone.

    All methods of `WeightRegistry` are registered below: they answer for rank 0, and overlap.
    """

    def __init__(self) -> None:
        super().__init__()


class Group(Protocol):
    """The registry's worker group as seen from here; a `RemoteWorkerGroup` is one."""

    def submit(
        self,
        method: str,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        timeout: float | None = None,
    ) -> Any:
        """A `RemoteCall`."""
        ...


class GroupRegistry(WeightRegistry):
    """The registry of a worker group: each method of `WeightRegistry` is one call there.

    Every call has an absolute deadline. `announce` and `withdraw` are for publishers: they block a thread.

    Args:
        group: of one `RegistryWorker`.
        timeout: seconds an answer may take; what a method waits for on purpose is added.

    Raises (all methods):
        DeadlineExceeded, WorkerDied, RuntimeClosed: the registry did not answer, or is gone.
    """

    def __init__(self, group: Group, timeout: float = CALL_TIMEOUT_S) -> None:
        # Not `super().__init__()`: the state of the registry is in its own process.
        self._group, self._timeout = group, timeout

    def announce(self, manifest: Manifest) -> None:
        """`publish`, and wait for the answer."""
        self._submit("publish", manifest).result()

    def withdraw(self, version: WeightVersion, timeout: float) -> tuple[LeaseInfo, ...]:
        """`retire`, then `wait_reclaimed`."""
        self._submit("retire", version).result()
        left: tuple[LeaseInfo, ...] = self._submit("wait_reclaimed", version, timeout).result()
        return left

    def _submit(self, method: str, *args: Any, **kwargs: Any) -> Any:
        given = _METHODS[method].bind(self, *args, **kwargs).arguments
        return self._group.submit(method, args, kwargs, timeout=self._timeout + given.get("timeout", 0.0))


def _forwarding(name: str) -> Callable[..., Coroutine[Any, Any, Any]]:
    @functools.wraps(getattr(WeightRegistry, name))
    async def ask(self: GroupRegistry, *args: Any, **kwargs: Any) -> Any:
        call = self._submit(name, *args, **kwargs)
        try:
            return await call
        except asyncio.CancelledError:
            call.cancel()  # else a long wait would continue in the registry's process
            raise

    return ask


for _name in _METHODS:
    setattr(RegistryWorker, _name, register(dispatch_mode=Dispatch.RANK_ZERO)(getattr(WeightRegistry, _name)))
    setattr(GroupRegistry, _name, _forwarding(_name))
