"""The update agent: has one rollout replica serve new weight versions, when the replica's policy says so.

    registry ──newer?──> due? ──pull (lease, read)──> check layout ─> pause ─> load ─> check lease ─> resume
       ▲                         while generating                     └─ generation stands still ─┘     │
       └───────────────────────────────────── serves it ────────────────────────────────────────────────┘

An engine whose weights were not verified does not go on: it stays paused while the agent reads again, and is
ended if that fails.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import NoReturn, Protocol, TypeVar

from torch import Tensor

from neoproto import trace
from neoproto.errors import LeaseExpired, NeoProtoError, TornRead
from neoproto.weights.manifest import Manifest, TensorLayout
from neoproto.weights.options import PauseMode, UpdateOptions
from neoproto.weights.registry import Registry
from neoproto.weights.version import WeightVersion, should_load

T = TypeVar("T")

MOST_TORN_READS = 5
"""Reads in a row whose lease lapsed, after which a replica gives up."""


class ServingEngine(Protocol):
    """A replica's engine, as the agent sees it; `actors.rollout.engine_thread.EngineThread` is one."""

    async def check_layout(self, layout: Mapping[str, TensorLayout], what: str) -> None:
        """Raise WeightMismatch unless weights of this layout can be loaded."""
        ...

    async def pause(self, mode: PauseMode, drain_s: float) -> None:
        """Stop generating; new requests wait. Those in flight are given `drain_s` seconds to end first."""
        ...

    async def load(self, version: WeightVersion, tensors: Mapping[str, Tensor]) -> None:
        """Replace all weights. Nothing reads the tensors after it returns or raises, cancelled or not."""
        ...

    async def resume(self) -> None:
        """Go on generating; a no-op if it is not paused."""
        ...

    async def fail(self, cause: BaseException) -> None:
        """End the engine: it answers nothing from now on."""
        ...


class Held(Protocol):
    """A version that was read and is held by a lease; `Pulled` is one."""

    tensors: dict[str, Tensor]

    @property
    def version(self) -> WeightVersion: ...

    @property
    def manifest(self) -> Manifest: ...

    async def check(self) -> None:
        """Raise TornRead unless the lease has lived until now."""
        ...


class WeightPuller(Protocol):
    """Where versions come from; `Puller` is one."""

    def pull(self, version: WeightVersion | None = None) -> AbstractAsyncContextManager[Held]:
        """Lease and read a version, the latest by default; held as long as the block."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class AgentStats:
    """What an agent has done. Seconds are those of its event loop.

    Attributes:
        loads: versions that the replica came to serve.
        torn_reads: reads whose lease lapsed, and that were made again.
        pull_seconds, last_pull: lease and read, while generating.
        update_seconds, last_update: from where new requests begin to wait until they go on; with the time
            that requests in flight were given to end.
    """

    loads: int = 0
    torn_reads: int = 0
    pull_seconds: float = 0.0
    last_pull: float = 0.0
    update_seconds: float = 0.0
    last_update: float = 0.0


class UpdateAgent:
    """Beside one replica's engine, on its event loop.

    Either `run` decides when to load, or the trainer does, with `load`. Both may be used at once: versions
    load one after another and never go backwards.

    Args:
        registry: tells of new versions, and is told what is served.
        puller: reads them.
        engine: the replica's.
        replica: its name in the registry.
        options: when and how.
    """

    def __init__(
        self,
        registry: Registry,
        puller: WeightPuller,
        engine: ServingEngine,
        options: UpdateOptions | None = None,
        *,
        replica: str,
    ) -> None:
        self._registry, self._puller, self._engine, self._replica = registry, puller, engine, replica
        self._options = options or UpdateOptions()
        self._version: WeightVersion | None = None
        self._updating = asyncio.Lock()
        self._failure: Exception | None = None
        self._verified = True
        self._paused_since: float | None = None
        self._loads = self._torn_reads = 0
        self._pull_seconds = self._last_pull = self._update_seconds = self._last_update = 0.0

    @property
    def version(self) -> WeightVersion | None:
        """What the replica serves; None before its first load."""
        return self._version

    @property
    def stats(self) -> AgentStats:
        """So far."""
        return AgentStats(
            loads=self._loads,
            torn_reads=self._torn_reads,
            pull_seconds=self._pull_seconds,
            last_pull=self._last_pull,
            update_seconds=self._update_seconds,
            last_update=self._last_update,
        )

    async def run(self) -> NoReturn:
        """Keep the replica up to date.

        Consumes: versions from the registry. Waits for: a version newer than the last one seen. Produces:
        an engine that serves it, once `min_version_lag` says so, or somebody waits for it (validation); the
        first one in any case. Unblocked by: a publish, or `poll_interval`. Ends by an error, or cancelled.

        Raises:
            NeoProtoError: the registry is gone, weights do not fit, reads were torn again and again, or a
                load failed, here or for another caller; after the latter the engine answers nothing.
        """
        seen: WeightVersion | None = None
        while True:
            newest = await self._registry.wait_newer(seen, self._options.poll_interval)
            if self._failure is not None:
                raise self._gave_up() from self._failure
            seen = newest or seen
            if seen is not None and (self._version is None or seen > self._version):
                await self._catch_up(seen, wanted=await self._wanted())

    async def load(self, version: WeightVersion) -> None:
        """Serve `version`, or the newest if that is newer; whatever the lag.

        Raises:
            ValueError: it is not published.
            NeoProtoError: as `run`.
        """
        latest = await self._registry.latest()
        if latest is None or latest.version < version:
            known = "none" if latest is None else latest.version
            raise ValueError(f"{self._replica} cannot load weights {version}, the newest are {known}")
        await self._catch_up(latest.version, wanted=version)

    async def wait_for_version(self, version: WeightVersion, timeout: float) -> None:
        """Serve `version` or a newer one as soon as there is one; whatever the lag.

        Raises:
            TimeoutError: it was not published and loaded within `timeout` seconds.
            NeoProtoError: as `run`.
        """
        try:
            async with asyncio.timeout(timeout):
                seen: WeightVersion | None = None
                while self._version is None or self._version < version:
                    newest = await self._registry.wait_newer(seen, self._options.poll_interval)
                    if newest is not None:
                        seen = newest
                        await self._catch_up(newest, wanted=version)
        except TimeoutError as error:
            if isinstance(error, NeoProtoError):
                raise
            raise TimeoutError(
                f"{self._replica} waited {timeout:.1f} s for weights {version}; it serves {self._version}"
            ) from error

    async def _wanted(self) -> WeightVersion | None:
        """What somebody waits for; not asked where every new version is loaded anyway."""
        return await self._registry.wanted() if self._options.min_version_lag > 1 else None

    async def _catch_up(self, newest: WeightVersion, wanted: WeightVersion | None) -> None:
        async with self._updating:
            if self._failure is not None:
                raise self._gave_up() from self._failure
            try:
                if self._is_due(newest, wanted):
                    await self._update()
            except Exception as error:
                self._failure = error
                raise

    def _is_due(self, newest: WeightVersion, wanted: WeightVersion | None) -> bool:
        if self._version is not None and newest <= self._version:
            return False
        return should_load(
            self._version, newest, min_version_lag=self._options.min_version_lag, wanted=wanted
        )

    async def _update(self) -> None:
        """Read the newest version and have the engine serve it; a torn read is made again."""
        try:
            served = await self._read_and_serve()
        except BaseException as error:
            if not self._verified:
                self._failure = (
                    error if isinstance(error, Exception) else TornRead("cancelled after a torn read")
                )
                await run_to_end(self._engine.fail(self._failure))
            raise
        finally:
            await self._resume()
        await self._registry.report_serving(self._replica, served)

    async def _read_and_serve(self) -> WeightVersion:
        for attempt in range(1, MOST_TORN_READS + 1):
            start, began = _now(), time.perf_counter()
            try:
                async with self._puller.pull() as held:
                    self._last_pull = _now() - start
                    trace.since("pull weights", "weights", began, version=str(held.version))
                    self._pull_seconds += self._last_pull
                    return await self._serve(held)
            except (TornRead, LeaseExpired) as error:
                self._torn_reads += 1
                if attempt == MOST_TORN_READS:
                    raise TornRead(f"{self._replica} gave up after {attempt} torn reads: {error}") from error
        raise AssertionError("unreachable")

    async def _serve(self, held: Held) -> WeightVersion:
        if self._verified and self._version is not None and held.version <= self._version:
            return self._version  # what was newest has been retired since
        await self._engine.check_layout(held.manifest.layout(), f"weights {held.version}")
        if self._paused_since is None:
            start = _now()
            with trace.span("pause", "weights"):
                await self._engine.pause(self._options.pause_mode, self._options.drain_timeout)
            self._paused_since = start
        await run_to_end(self._swap(held))
        return held.version

    async def _swap(self, held: Held) -> None:
        """Load, check, go on: once begun, not left half-way."""
        self._verified = False
        with trace.span("load weights", "weights", version=str(held.version)):
            await self._engine.load(held.version, held.tensors)
            await held.check()
        self._verified, self._version = True, held.version
        self._loads += 1
        await self._resume()

    async def _resume(self) -> None:
        since, self._paused_since = self._paused_since, None
        if since is None:
            return
        await run_to_end(self._engine.resume())
        self._last_update = _now() - since
        self._update_seconds += self._last_update

    def _gave_up(self) -> NeoProtoError:
        cause = self._failure
        return NeoProtoError(f"{self._replica} updates no more: {type(cause).__name__}: {cause}")


async def run_to_end(work: Awaitable[T]) -> T:
    """Await `work`; cancelled, wait for its end all the same, and only then be cancelled."""
    task = asyncio.ensure_future(work)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        if not task.cancelled():
            task.exception()  # looked at, so that nobody is warned of it
        raise cancelled
    return task.result()


def _now() -> float:
    return asyncio.get_running_loop().time()
