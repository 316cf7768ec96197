"""Which weight versions there are, who is reading them, and which replica serves which.

    publisher ──publish──> READY ──retire──> RETIRED ──reclaim, once no lease lives──> forgotten
                             │                  │
                   acquire ──┴──> lease <──renew┘     lapses `ttl` seconds later on the registry's own clock

Nobody else's clock counts: a holder is told how long a lease lasts, never until when. What lapsed stays
lapsed: its holder is refused, and what it read since counts as torn.
"""

from __future__ import annotations

import asyncio
import enum
import itertools
import math
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from neoproto.errors import KeyMissing, LeaseExpired
from neoproto.weights.manifest import Manifest
from neoproto.weights.version import WeightVersion

T = TypeVar("T")


class VersionState(enum.Enum):
    """Life of a version; once reclaimed it is not listed any more."""

    READY = "ready"
    """It can be acquired."""
    RETIRED = "retired"
    """Leases on it go on; there are no new ones."""


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
        serving: replica -> the version it said last that it serves.
        lapsed: leases that ended because nobody renewed them, since the start.
    """

    newest: WeightVersion | None
    versions: tuple[VersionInfo, ...]
    serving: Mapping[str, WeightVersion]
    lapsed: int


class _Held:
    __slots__ = ("holder", "ttl", "until", "version")

    def __init__(self, holder: str, version: WeightVersion, ttl: float, until: float) -> None:
        self.holder, self.version, self.ttl, self.until = holder, version, ttl, until


class WeightRegistry:
    """The registry's rules, without waiting, processes or threads.

    Args:
        clock: monotonic seconds of the registry's own process.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._manifests: dict[WeightVersion, Manifest] = {}
        self._states: dict[WeightVersion, VersionState] = {}
        self._newest: WeightVersion | None = None
        self._leases: dict[str, _Held] = {}
        self._earliest = math.inf  # no lease lapses before
        self._serving: dict[str, WeightVersion] = {}
        self._wanted: WeightVersion | None = None
        self._lapsed = 0
        self._token, self._numbers = uuid.uuid4().hex[:12], itertools.count(1)

    # -- versions -----------------------------------------------------------------------------------------

    def publish(self, manifest: Manifest) -> None:
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

    def latest(self) -> Manifest | None:
        """The newest version that can be acquired."""
        ready = self._ready()
        return self._manifests[max(ready)] if ready else None

    def retire(self, version: WeightVersion) -> None:
        """Let nobody acquire the version any more. Retiring twice is harmless.

        Raises:
            KeyMissing: it was never published, or is reclaimed.
        """
        self._known(version)
        self._states[version] = VersionState.RETIRED

    def reclaim(self, version: WeightVersion) -> bool:
        """Forget a retired version; its bytes may then go.

        Returns:
            False if a lease on it lives: nothing has changed.

        Raises:
            KeyMissing: it was never published, or is reclaimed.
            ValueError: it is not retired.
        """
        self._known(version)
        if self._states[version] is not VersionState.RETIRED:
            raise ValueError(f"weights {version} are not retired: they can still be acquired")
        if self.holders(version):
            return False
        del self._manifests[version], self._states[version]
        return True

    def holders(self, version: WeightVersion) -> tuple[LeaseInfo, ...]:
        """The live leases on a version, in the order in which they were acquired."""
        self._expire()
        now = self._clock()
        return tuple(
            LeaseInfo(lease_id=lease_id, holder=held.holder, version=version, seconds_left=held.until - now)
            for lease_id, held in self._leases.items()
            if held.version == version
        )

    # -- leases -------------------------------------------------------------------------------------------

    def acquire(self, holder: str, version: WeightVersion | None = None, *, ttl: float) -> Lease:
        """Take a lease on a version, or on the latest.

        Args:
            holder: who asks, for messages.
            ttl: seconds after which it lapses unless it is renewed, > 0.

        Raises:
            KeyMissing: the version is not ready: not published yet, retired or reclaimed.
            ValueError: `ttl` is no positive number of seconds.
        """
        if not 0 < ttl < math.inf:
            raise ValueError(f"a lease lasts a positive number of seconds, got {ttl!r}")
        manifest = self.latest() if version is None else self._manifests.get(version)
        if manifest is None or self._states[manifest.version] is not VersionState.READY:
            what = "no weights" if version is None else f"weights {version}"
            ready = ", ".join(map(str, self._ready())) or "none"
            raise KeyMissing(f"{what} can be acquired by {holder}; ready: {ready}")
        lease_id = f"{self._token}-{next(self._numbers)}"
        held = self._leases[lease_id] = _Held(holder, manifest.version, ttl, self._clock() + ttl)
        self._earliest = min(self._earliest, held.until)
        return Lease(lease_id=lease_id, holder=holder, ttl=ttl, manifest=manifest)

    def renew(self, lease_id: str) -> None:
        """Let a lease last its `ttl` from now.

        Raises:
            LeaseExpired: it lapsed, or was released.
        """
        self._expire()
        held = self._leases.get(lease_id)
        if held is None:
            raise LeaseExpired(f"lease {lease_id} has lapsed or was released")
        held.until = self._clock() + held.ttl

    def validate(self, lease_id: str) -> bool:
        """Whether a lease has lived until now without a gap."""
        self._expire()
        return lease_id in self._leases

    def release(self, lease_id: str) -> bool:
        """End a lease; False if it had ended before."""
        self._expire()
        return self._leases.pop(lease_id, None) is not None

    def next_lapse(self) -> float:
        """The clock's reading before which no lease lapses, in the future; `inf` without leases."""
        self._expire()
        return self._earliest

    # -- replicas -----------------------------------------------------------------------------------------

    def report_serving(self, replica: str, version: WeightVersion) -> None:
        """Note which version a replica generates on from now on."""
        self._serving[replica] = version

    def forget_replica(self, replica: str) -> None:
        """Forget a replica that is gone, and end its leases; one that was never heard of is ignored.

        If it still runs, it is refused like a holder whose lease lapsed.
        """
        self._serving.pop(replica, None)
        for lease_id in [lease_id for lease_id, held in self._leases.items() if held.holder == replica]:
            del self._leases[lease_id]

    def serving(self) -> dict[str, WeightVersion]:
        """Replica -> the version it serves; replicas that serve none yet are missing."""
        return dict(self._serving)

    def want(self, version: WeightVersion) -> None:
        """Somebody waits until this version is served: replicas load it below their lag."""
        self._wanted = version if self._wanted is None else max(version, self._wanted)

    def wanted(self) -> WeightVersion | None:
        """The newest version that somebody waited for; None if nobody did."""
        return self._wanted

    def state(self) -> RegistryState:
        """Everything, for display."""
        return RegistryState(
            newest=self._newest,
            versions=tuple(
                VersionInfo(
                    version=version,
                    state=self._states[version],
                    nbytes=self._manifests[version].nbytes,
                    leases=self.holders(version),
                )
                for version in sorted(self._manifests)
            ),
            serving=self.serving(),
            lapsed=self._lapsed,
        )

    def _ready(self) -> list[WeightVersion]:
        return sorted(version for version, state in self._states.items() if state is VersionState.READY)

    def _known(self, version: WeightVersion) -> None:
        if version not in self._manifests:
            known = ", ".join(map(str, sorted(self._manifests))) or "none"
            raise KeyMissing(f"weights {version} are not in the registry; there are: {known}")

    def _expire(self) -> None:
        now = self._clock()
        if now < self._earliest:
            return
        for lease_id in [lease_id for lease_id, held in self._leases.items() if held.until <= now]:
            del self._leases[lease_id]
            self._lapsed += 1
        self._earliest = min((held.until for held in self._leases.values()), default=math.inf)


class Registry(Protocol):
    """A weight registry from anywhere. Methods without a line of their own are as in `WeightRegistry`."""

    async def publish(self, manifest: Manifest) -> None: ...

    async def latest(self) -> Manifest | None: ...

    async def retire(self, version: WeightVersion) -> None: ...

    async def reclaim(self, version: WeightVersion) -> bool: ...

    async def holders(self, version: WeightVersion) -> tuple[LeaseInfo, ...]: ...

    async def acquire(self, holder: str, version: WeightVersion | None = None, *, ttl: float) -> Lease: ...

    async def renew(self, lease_id: str) -> None: ...

    async def validate(self, lease_id: str) -> bool: ...

    async def release(self, lease_id: str) -> bool: ...

    async def report_serving(self, replica: str, version: WeightVersion) -> None: ...

    async def forget_replica(self, replica: str) -> None: ...

    async def serving(self) -> dict[str, WeightVersion]: ...

    async def state(self) -> RegistryState: ...

    async def wait_newer(self, than: WeightVersion | None, timeout: float) -> WeightVersion | None:
        """Wait for a ready version newer than `than` (None: any); None if `timeout` seconds pass before."""
        ...

    async def wanted(self) -> WeightVersion | None: ...

    async def wait_serving(self, replicas: Sequence[str], version: WeightVersion, timeout: float) -> bool:
        """Wait until each of the replicas serves `version` or a newer one; False when time ran out first.

        `version` is wanted from then on.
        """
        ...

    async def wait_reclaimed(self, version: WeightVersion, timeout: float) -> tuple[LeaseInfo, ...]:
        """Reclaim a retired version once its leases have ended.

        Returns:
            (), or, when `timeout` seconds passed first, the leases that held it up.
        """
        ...


class LocalRegistry:
    """A `Registry` of this process's event loop; what the registry's worker hosts.

    Args:
        clock: monotonic seconds; by default that of the running loop.
    """

    def __init__(self, clock: Callable[[], float] | None = None) -> None:
        self._clock = clock or _loop_time
        self._rules = WeightRegistry(self._clock)
        # One each, so that hundreds of replicas that report do not wake hundreds that wait for a version.
        self._published, self._served, self._let_go = (asyncio.Condition() for _ in range(3))

    async def publish(self, manifest: Manifest) -> None:
        self._rules.publish(manifest)
        await _notify(self._published)

    async def latest(self) -> Manifest | None:
        return self._rules.latest()

    async def retire(self, version: WeightVersion) -> None:
        self._rules.retire(version)

    async def reclaim(self, version: WeightVersion) -> bool:
        return self._rules.reclaim(version)

    async def holders(self, version: WeightVersion) -> tuple[LeaseInfo, ...]:
        return self._rules.holders(version)

    async def acquire(self, holder: str, version: WeightVersion | None = None, *, ttl: float) -> Lease:
        return self._rules.acquire(holder, version, ttl=ttl)

    async def renew(self, lease_id: str) -> None:
        self._rules.renew(lease_id)

    async def validate(self, lease_id: str) -> bool:
        return self._rules.validate(lease_id)

    async def release(self, lease_id: str) -> bool:
        ended = self._rules.release(lease_id)
        await _notify(self._let_go)
        return ended

    async def report_serving(self, replica: str, version: WeightVersion) -> None:
        self._rules.report_serving(replica, version)
        await _notify(self._served)

    async def forget_replica(self, replica: str) -> None:
        self._rules.forget_replica(replica)
        await _notify(self._let_go)

    async def serving(self) -> dict[str, WeightVersion]:
        return self._rules.serving()

    async def state(self) -> RegistryState:
        return self._rules.state()

    async def wait_newer(self, than: WeightVersion | None, timeout: float) -> WeightVersion | None:
        def newer() -> WeightVersion | None:
            latest = self._rules.latest()
            found = None if latest is None else latest.version
            return found if found is not None and (than is None or found > than) else None

        return await self._wait_for(self._published, newer, timeout)

    async def wanted(self) -> WeightVersion | None:
        return self._rules.wanted()

    async def wait_serving(self, replicas: Sequence[str], version: WeightVersion, timeout: float) -> bool:
        self._rules.want(version)

        def all_serve() -> bool | None:
            serving = self._rules.serving()
            return all(name in serving and serving[name] >= version for name in replicas) or None

        return await self._wait_for(self._served, all_serve, timeout) is True

    async def wait_reclaimed(self, version: WeightVersion, timeout: float) -> tuple[LeaseInfo, ...]:
        def reclaimed() -> bool | None:
            return self._rules.reclaim(version) or None

        done = await self._wait_for(self._let_go, reclaimed, timeout, lapses=True)
        return () if done else self._rules.holders(version)

    async def _wait_for(
        self,
        changed: asyncio.Condition,
        found: Callable[[], T | None],
        timeout: float,
        *,
        lapses: bool = False,
    ) -> T | None:
        """Look at every change, and with `lapses` when a lease may have lapsed; None if time runs out."""
        until = self._clock() + timeout
        async with changed:
            while (value := found()) is None:
                now = self._clock()
                if now >= until:
                    return None
                wake = min(until, self._rules.next_lapse()) if lapses else until
                try:
                    async with asyncio.timeout(wake - now):
                        await changed.wait()
                except TimeoutError:
                    continue
        return value


async def _notify(changed: asyncio.Condition) -> None:
    async with changed:
        changed.notify_all()


def _loop_time() -> float:
    return asyncio.get_running_loop().time()
