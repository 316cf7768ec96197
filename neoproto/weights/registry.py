"""Which weight versions there are, who is reading them, and which replica serves which.

    publisher ──publish──> READY ──retire──> RETIRED ──reclaim, once no lease lives──> forgotten
                             │                  │
                   acquire ──┴──> lease <──renew┘     lapses `ttl` seconds later on the registry's own clock

A replica that loads a version sends three messages (and renewals in between):

    acquire ──lease, manifest──> read ──> validate ──ok──> load ──> loaded: verified, reported, released

Only the registry's clock counts: a holder learns how long a lease lasts, never until when. A lease that
lapsed stays lapsed: its holder is refused, and what it read counts as torn.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import itertools
import math
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from neoproto.errors import KeyMissing, LeaseExpired, WeightsNotReady
from neoproto.weights.manifest import Manifest
from neoproto.weights.version import WeightVersion, should_load

T = TypeVar("T")


class VersionState(enum.Enum):
    """Life of a version; once reclaimed it is not listed any more."""

    READY = "ready"
    """It can be acquired."""
    RETIRED = "retired"
    """Its leases continue; there are no new ones."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Lease:
    """The right to read a version, while it is renewed.

    Attributes:
        lease_id: unique, also among registries.
        holder: who has it, in words for people.
        ttl: seconds from each renewal after which it lapses, on the registry's clock.
        manifest: what may be read.
    """

    lease_id: str
    holder: str
    ttl: float
    manifest: Manifest

    @property
    def version(self) -> WeightVersion:
        return self.manifest.version


@dataclass(frozen=True, kw_only=True, slots=True)
class LeaseInfo:
    """A live lease, for display and messages. `seconds_left` until it lapses unless it is renewed."""

    lease_id: str
    holder: str
    version: WeightVersion
    seconds_left: float

    def __str__(self) -> str:
        return f"{self.holder} on {self.version} ({self.seconds_left:.1f} s left)"


@dataclass(frozen=True, kw_only=True, slots=True)
class VersionInfo:
    """A version that is not reclaimed, for display."""

    version: WeightVersion
    state: VersionState
    nbytes: int
    leases: tuple[LeaseInfo, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class RegistryState:
    """All a registry knows, at one moment.

    Attributes:
        newest: the last version published, reclaimed or not; None before the first.
        versions: those not reclaimed, oldest first.
        serving: replica -> the version it reported last.
        wanted: the newest version that a caller waited for; replicas load it below their lag.
        lapsed: leases that ended because they were not renewed, since the start.
    """

    newest: WeightVersion | None
    versions: tuple[VersionInfo, ...]
    serving: Mapping[str, WeightVersion]
    wanted: WeightVersion | None
    lapsed: int


@dataclass(kw_only=True, slots=True)
class _LeaseRecord:
    """What the registry keeps of a lease; it lapses when its clock reads `until`."""

    holder: str
    version: WeightVersion
    ttl: float
    until: float


class WeightRegistry:
    """A run's weight registry: its rules, and waiting for what they decide.

    It belongs to one event loop. Only the methods named `wait_…` wait; every other one runs from its first
    line to its last without a suspension, so each message is judged as a whole and no lock is needed. A run
    hosts one in a process of its own (`actors.weight_registry.RegistryWorker`); other processes reach it
    through `actors.weight_registry.GroupRegistry`, which has the same methods.

    Args:
        clock: monotonic seconds; by default that of the running loop.
    """

    def __init__(self, clock: Callable[[], float] | None = None) -> None:
        self._clock = clock or _loop_time
        self._manifests: dict[WeightVersion, Manifest] = {}
        self._states: dict[WeightVersion, VersionState] = {}
        self._newest: WeightVersion | None = None
        self._leases: dict[str, _LeaseRecord] = {}
        self._earliest = math.inf  # no lease lapses before
        self._serving: dict[str, WeightVersion] = {}
        self._wanted: WeightVersion | None = None
        self._lapsed = 0
        # Ids are unique among registries too: a lease of a registry that died is unknown to its successor.
        self._token, self._numbers = uuid.uuid4().hex[:12], itertools.count(1)
        # One signal for each kind of waiting: hundreds of replicas that report must not wake the hundreds
        # that wait for a version.
        self._due, self._served, self._ended = asyncio.Event(), asyncio.Event(), asyncio.Event()

    # -- versions -----------------------------------------------------------------------------------------

    async def publish(self, manifest: Manifest) -> None:
        """Announce a version whose every byte is readable.

        Raises:
            ValueError: it is not newer than the last one announced.
        """
        version = manifest.version
        if self._newest is not None and version <= self._newest:
            raise ValueError(f"weights {version} cannot be published after {self._newest}")
        self._manifests[version] = manifest
        self._states[version] = VersionState.READY
        self._newest = version
        _wake_all(self._due)

    async def latest(self) -> Manifest | None:
        """The newest version that can be acquired."""
        return self._latest()

    async def retire(self, version: WeightVersion) -> None:
        """Refuse new leases on the version. Retiring twice is harmless.

        Raises:
            KeyMissing: it was never published, or is reclaimed.
        """
        self._refuse_unknown(version)
        self._states[version] = VersionState.RETIRED

    async def reclaim(self, version: WeightVersion) -> bool:
        """Forget a retired version; its bytes may then go.

        Returns:
            False if a lease on it lives: nothing has changed.

        Raises:
            KeyMissing: it was never published, or is reclaimed.
            ValueError: it is not retired.
        """
        return self._reclaim(version)

    async def wait_reclaimed(self, version: WeightVersion, timeout: float) -> tuple[LeaseInfo, ...]:
        """Reclaim a retired version once its leases have ended.

        Returns:
            (), or, when `timeout` seconds passed first, the leases that held it up.

        Raises:
            KeyMissing, ValueError: as `reclaim`.
        """

        def reclaimed() -> bool | None:
            return self._reclaim(version) or None

        done = await self._wait_for(self._ended, reclaimed, timeout, or_a_lapse=True)
        return () if done else self._holders(version)

    async def holders(self, version: WeightVersion) -> tuple[LeaseInfo, ...]:
        """The live leases on a version, in the order in which they were acquired."""
        return self._holders(version)

    # -- leases -------------------------------------------------------------------------------------------

    async def acquire(
        self,
        holder: str,
        version: WeightVersion | None = None,
        *,
        ttl: float,
        min_version: WeightVersion | None = None,
    ) -> Lease:
        """Take a lease on a version, or on the latest.

        Args:
            holder: who asks; a replica's name, so that its leases end when it is forgotten.
            ttl: seconds after which it lapses unless it is renewed, > 0.
            min_version: refuse an older one.

        Raises:
            WeightsNotReady: the version is not published yet, retired or reclaimed, or the latest is older
                than `min_version`.
            ValueError: `ttl` is no positive number of seconds.
        """
        if not 0 < ttl < math.inf:
            raise ValueError(f"a lease lasts a positive number of seconds, got {ttl!r}")
        manifest = self._latest() if version is None else self._manifests.get(version)
        ready = manifest is not None and self._states[manifest.version] is VersionState.READY
        if manifest is None or not ready or (min_version is not None and manifest.version < min_version):
            wanted = "any weights" if version is None else f"weights {version}"
            if min_version is not None:
                wanted = f"weights {min_version} or newer"
            there = ", ".join(map(str, self._ready())) or "none"
            raise WeightsNotReady(f"{holder} cannot have {wanted}; ready: {there}")
        lease_id = f"{self._token}-{next(self._numbers)}"
        record = _LeaseRecord(holder=holder, version=manifest.version, ttl=ttl, until=self._clock() + ttl)
        self._leases[lease_id] = record
        self._earliest = min(self._earliest, record.until)
        return Lease(lease_id=lease_id, holder=holder, ttl=ttl, manifest=manifest)

    async def renew(self, lease_id: str) -> None:
        """Let a lease last its `ttl` from now.

        Raises:
            LeaseExpired: it lapsed, or was released.
        """
        self._expire()
        record = self._leases.get(lease_id)
        if record is None:
            raise LeaseExpired(f"lease {lease_id} has lapsed or was released")
        record.until = self._clock() + record.ttl

    async def validate(self, lease_id: str) -> bool:
        """Whether a lease has lived until now without a gap."""
        self._expire()
        return lease_id in self._leases

    async def loaded(self, lease_id: str, replica: str) -> bool:
        """End a lease whose version is loaded, and note that `replica` serves it from now on.

        This is one message on purpose: between a check and a report of their own the lease could lapse, and a
        version that was overwritten would be reported as served.

        Returns:
            False if the lease had ended before: the load is torn, and nothing has changed.
        """
        self._expire()
        record = self._leases.pop(lease_id, None)
        if record is None:
            return False
        self._serving[replica] = record.version
        _wake_all(self._served)
        _wake_all(self._ended)
        return True

    async def release(self, lease_id: str) -> bool:
        """End a lease; False if it had ended before."""
        self._expire()
        released = self._leases.pop(lease_id, None) is not None
        _wake_all(self._ended)
        return released

    # -- replicas -----------------------------------------------------------------------------------------

    async def report_serving(self, replica: str, version: WeightVersion) -> None:
        """Note which version a replica generates on from now on; `loaded` does so for a leased one."""
        self._serving[replica] = version
        _wake_all(self._served)

    async def forget_replica(self, replica: str) -> None:
        """Forget a replica that is gone, and end its leases; an unknown one is ignored.

        If it still runs, it is refused like a holder whose lease lapsed.
        """
        self._serving.pop(replica, None)
        for lease_id in [lease_id for lease_id, record in self._leases.items() if record.holder == replica]:
            del self._leases[lease_id]
        _wake_all(self._ended)

    async def serving(self) -> dict[str, WeightVersion]:
        """Replica -> the version it serves; replicas that serve none yet are missing."""
        return dict(self._serving)

    async def wait_newer(
        self, than: WeightVersion | None, timeout: float, *, min_version_lag: int = 1
    ) -> WeightVersion | None:
        """Wait for a ready version that a replica on `than` should load, see `should_load`.

        Args:
            than: what it serves; None if nothing, and then any version will do.
            min_version_lag: how many publishes newer it has to be, unless a caller waits for it.

        Returns:
            The newest version; None if `timeout` seconds passed first.
        """

        def due() -> WeightVersion | None:
            latest = self._latest()
            if latest is None or (than is not None and latest.version <= than):
                return None
            wanted = self._wanted
            due = should_load(than, latest.version, min_version_lag=min_version_lag, wanted=wanted)
            return latest.version if due else None

        return await self._wait_for(self._due, due, timeout)

    async def wanted(self) -> WeightVersion | None:
        """The newest version that a caller waited for; None if there is none."""
        return self._wanted

    async def wait_serving(self, replicas: Sequence[str], version: WeightVersion, timeout: float) -> bool:
        """Wait until each of the replicas serves `version` or a newer one; False when time ran out first.

        `version` is wanted from then on: replicas load it below their lag.
        """
        if self._wanted is None or version > self._wanted:
            self._wanted = version
            _wake_all(self._due)

        def all_serve() -> bool | None:
            serving = self._serving
            return all(name in serving and serving[name] >= version for name in replicas) or None

        return await self._wait_for(self._served, all_serve, timeout) is True

    async def state(self) -> RegistryState:
        """Everything, for display."""
        return RegistryState(
            newest=self._newest,
            versions=tuple(
                VersionInfo(
                    version=version,
                    state=self._states[version],
                    nbytes=self._manifests[version].nbytes,
                    leases=self._holders(version),
                )
                for version in sorted(self._manifests)
            ),
            serving=dict(self._serving),
            wanted=self._wanted,
            lapsed=self._lapsed,
        )

    # -- shared by the above ------------------------------------------------------------------------------

    def _ready(self) -> list[WeightVersion]:
        return sorted(version for version, state in self._states.items() if state is VersionState.READY)

    def _latest(self) -> Manifest | None:
        ready = self._ready()
        return self._manifests[ready[-1]] if ready else None

    def _refuse_unknown(self, version: WeightVersion) -> None:
        if version not in self._manifests:
            known = ", ".join(map(str, sorted(self._manifests))) or "none"
            raise KeyMissing(f"weights {version} are not in the registry; there are: {known}")

    def _reclaim(self, version: WeightVersion) -> bool:
        self._refuse_unknown(version)
        if self._states[version] is not VersionState.RETIRED:
            raise ValueError(f"weights {version} are not retired: they can still be acquired")
        if self._holders(version):
            return False
        del self._manifests[version], self._states[version]
        return True

    def _holders(self, version: WeightVersion) -> tuple[LeaseInfo, ...]:
        self._expire()
        now = self._clock()
        return tuple(
            LeaseInfo(
                lease_id=lease_id, holder=record.holder, version=version, seconds_left=record.until - now
            )
            for lease_id, record in self._leases.items()
            if record.version == version
        )

    def _expire(self) -> None:
        """Drop what has lapsed. Whoever judges a lease calls this first."""
        now = self._clock()
        if now < self._earliest:
            return
        for lease_id in [lease_id for lease_id, record in self._leases.items() if record.until <= now]:
            del self._leases[lease_id]
            self._lapsed += 1
        self._earliest = min((record.until for record in self._leases.values()), default=math.inf)

    async def _wait_for(
        self,
        signal: asyncio.Event,
        found: Callable[[], T | None],
        timeout: float,
        *,
        or_a_lapse: bool = False,
    ) -> T | None:
        """Look at every signal, and with `or_a_lapse` when a lease may have lapsed; None if time runs out."""
        until = self._clock() + timeout
        # No suspension between looking and waiting: a signal cannot come unseen in between.
        while (value := found()) is None:
            now = self._clock()
            if now >= until:
                return None
            wake = min(until, self._earliest) if or_a_lapse else until
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wake - now):
                    await signal.wait()
        return value


# Names of before there was one class; to be removed after the first release.
LocalRegistry = WeightRegistry
Registry = WeightRegistry


def _wake_all(signal: asyncio.Event) -> None:
    """Wake all who wait now; who waits later waits for the next signal."""
    signal.set()
    signal.clear()


def _loop_time() -> float:
    return asyncio.get_running_loop().time()
