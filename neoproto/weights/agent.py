"""The update agent: has a rollout replica serve new weight versions, when its update policy allows it.

    registry ──wait_newer──> pull: lease, read, validate ─> check layout ─> pause ─> load ─> loaded ─> resume
                             └──────────── while generating ───────────┘    └─ generation stands still ─┘

`loaded` is one message: the registry verifies the lease, notes what the replica serves, and ends the lease.
An engine whose weights were not verified does not resume: it stays paused while the agent reads again, and is
ended if that fails.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Mapping
from dataclasses import dataclass
from typing import NoReturn, Protocol, TypeVar

from torch import Tensor

from neoproto import trace
from neoproto.errors import LeaseExpired, NeoProtoError, TornRead, WeightsNotReady
from neoproto.weights.manifest import TensorLayout
from neoproto.weights.options import PauseMode, UpdateOptions
from neoproto.weights.puller import Pulled, Puller
from neoproto.weights.registry import WeightRegistry
from neoproto.weights.version import WeightVersion

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


@dataclass(frozen=True, kw_only=True, slots=True)
class AgentStats:
    """What an agent has done. Seconds are those of its event loop.

    Attributes:
        loads: versions that the replica came to serve.
        torn_reads: reads whose lease lapsed, and that were made again.
        pull_seconds, last_pull: lease and read, while generating.
        update_seconds, last_update: from where new requests begin to wait until they continue; with the time
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
    load one after another and never go backwards. A load costs three messages to the registry, and a renewal
    of the lease now and then where it takes long.

    Args:
        registry: where new versions are waited for.
        puller: reads them; of the same registry.
        engine: the replica's.
        replica: its name in the registry.
        options: when and how.
    """

    def __init__(
        self,
        registry: WeightRegistry,
        puller: Puller,
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

        Consumes: versions from the registry. Waits for: one that is `min_version_lag` publishes newer than
        what is served, or that a caller waits for (validation); at first, for any. Produces: an engine that
        serves it. Unblocked by: a publish, or `poll_interval`. Ends by an error, or cancelled.

        Raises:
            NeoProtoError: the registry is gone, weights do not fit, reads were torn again and again, or a
                load failed, here or for another caller; after the latter the engine answers nothing.
        """
        options = self._options
        while True:
            due = await self._registry.wait_newer(
                self._version, options.poll_interval, min_version_lag=options.min_version_lag
            )
            self._refuse_after_failure()
            if due is not None:
                with contextlib.suppress(WeightsNotReady):  # retired meanwhile: wait for the next
                    await self.load(due)

    async def load(self, version: WeightVersion) -> None:
        """Serve `version` or a newer one; whatever the lag. If it has to load, it loads the newest.

        Raises:
            WeightsNotReady (a ValueError): it is not published, or retired, and there is no newer one.
            NeoProtoError: as `run`.
        """
        # One update at a time, and what another caller has loaded meanwhile is not loaded again.
        async with self._updating:
            self._refuse_after_failure()
            if self._version is None or self._version < version:
                try:
                    await self._update(version)
                except WeightsNotReady:
                    raise  # nothing was read: the next try may succeed
                except Exception as error:
                    self._failure = error
                    raise

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
                    seen = await self._registry.wait_newer(seen, self._options.poll_interval) or seen
                    if seen is not None and seen >= version:
                        with contextlib.suppress(WeightsNotReady):
                            await self.load(version)
        except TimeoutError as error:
            if isinstance(error, NeoProtoError):
                raise
            raise TimeoutError(
                f"{self._replica} waited {timeout:.1f} s for weights {version}; it serves {self._version}"
            ) from error

    async def _update(self, version: WeightVersion) -> None:
        """Have the engine serve the newest version, at least this one; a torn read is made again."""
        try:
            for attempt in range(1, MOST_TORN_READS + 1):
                try:
                    await self._pull_and_load(version)
                except (TornRead, LeaseExpired) as error:
                    self._torn_reads += 1
                    if attempt == MOST_TORN_READS:
                        raise TornRead(
                            f"{self._replica} gave up after {attempt} torn reads: {error}"
                        ) from error
                else:
                    return
        except BaseException as error:
            if not self._verified:
                failure = error if isinstance(error, Exception) else TornRead("cancelled after a torn read")
                self._failure = failure
                await run_to_end(self._engine.fail(failure))
            raise
        finally:
            await self._resume()

    async def _pull_and_load(self, version: WeightVersion) -> None:
        start, began = _now(), time.perf_counter()
        # An engine that holds unverified weights needs verified ones, even if only older ones are left.
        at_least = version if self._verified else None
        async with self._puller.pull(min_version=at_least) as pulled:
            self._last_pull = _now() - start
            self._pull_seconds += self._last_pull
            trace.since("pull weights", "weights", began, version=str(pulled.version))
            await self._engine.check_layout(pulled.manifest.layout(), f"weights {pulled.version}")
            if self._paused_since is None:
                start = _now()
                with trace.span("pause", "weights"):
                    await self._engine.pause(self._options.pause_mode, self._options.drain_timeout)
                self._paused_since = start
            await run_to_end(self._swap(pulled))

    async def _swap(self, pulled: Pulled) -> None:
        """Load, verify, resume. Once begun, this is not left half-way: no engine is left with a mixture."""
        self._verified = False
        with trace.span("load weights", "weights", version=str(pulled.version)):
            await self._engine.load(pulled.version, pulled.tensors)
            await pulled.loaded(self._replica)
        self._verified, self._version = True, pulled.version
        self._loads += 1
        await self._resume()

    async def _resume(self) -> None:
        since, self._paused_since = self._paused_since, None
        if since is None:
            return
        await run_to_end(self._engine.resume())
        self._last_update = _now() - since
        self._update_seconds += self._last_update

    def _refuse_after_failure(self) -> None:
        cause = self._failure
        if cause is not None:
            text = f"{self._replica} updates no more: {type(cause).__name__}: {cause}"
            raise NeoProtoError(text) from cause


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
            task.exception()  # looked at, so that asyncio does not warn of it
        raise cancelled
    return task.result()


def _now() -> float:
    return asyncio.get_running_loop().time()
