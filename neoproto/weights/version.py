"""Weight versions, and every bit of arithmetic on them.

A version is `(epoch, n)`. `n` counts publishes; a restart from a checkpoint opens a new epoch and continues
counting from the checkpoint's `n`, so a pair never names two different sets of weights.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True, order=True)
class WeightVersion:
    """Which weights. Ordered by epoch, then by number.

    Attributes:
        epoch: how often the run was restarted before these weights, >= 0.
        n: number of the publish, >= 0; 0 is the model that training starts from.

    Raises:
        ValueError: a negative field.
    """

    epoch: int
    n: int

    def __post_init__(self) -> None:
        if self.epoch < 0 or self.n < 0:
            raise ValueError(f"a weight version has no negative part, got epoch={self.epoch}, n={self.n}")

    def next(self) -> WeightVersion:
        """The version that the next publish of this epoch gets."""
        return WeightVersion(epoch=self.epoch, n=self.n + 1)

    def next_epoch(self) -> WeightVersion:
        """The version that a run restarted from a checkpoint of this one begins with: the same weights."""
        return WeightVersion(epoch=self.epoch + 1, n=self.n)

    def __str__(self) -> str:
        return f"{self.epoch}.{self.n}"


def lag(newest: WeightVersion, used: WeightVersion) -> int:
    """How many publishes `used` is behind `newest`.

    Within an epoch this is the difference of the numbers. Weights of an earlier epoch may lie on a branch
    that the restart gave up, with a number above the restart's; they count as at least one publish behind.

    Raises:
        ValueError: `used` is newer than `newest`.
    """
    if used > newest:
        raise ValueError(f"weights {used} are newer than the newest version {newest}")
    behind = newest.n - used.n
    return behind if used.epoch == newest.epoch else max(1, behind)


def should_load(
    current: WeightVersion | None,
    newest: WeightVersion,
    *,
    min_version_lag: int,
    wanted: WeightVersion | None = None,
) -> bool:
    """Whether a replica that serves `current` should load `newest`.

    Args:
        current: what it serves; None before its first load, and then it loads whatever the lag is.
        newest: the newest published version.
        min_version_lag: how many publishes it must be behind before a load is worth the pause, >= 1.
        wanted: a version a caller waits for; one that is newer than `current`, and published, is a reason
            to load below the lag.

    Raises:
        ValueError: `min_version_lag` is below 1; `current` is newer than `newest`.
    """
    if min_version_lag < 1:
        raise ValueError(f"min_version_lag must be >= 1, got {min_version_lag}")
    if current is None:
        return True
    asked_for = wanted is not None and current < wanted <= newest
    return asked_for or lag(newest, current) >= min_version_lag


def required_version(
    newest: WeightVersion, *, min_version_lag: int, prompt_version_lag: int = 0
) -> WeightVersion:
    """The oldest version that a prompt enqueued now may start on: what every replica is sure to load.

    A replica loads once it is `min_version_lag` publishes behind, so any of that many it may stay on.

    Args:
        newest: the newest published version.
        min_version_lag: of the replicas, >= 1.
        prompt_version_lag: how many publishes older it may be than what replicas are sure to load, >= 0.
    """
    behind = min_version_lag - 1 + prompt_version_lag
    return WeightVersion(epoch=newest.epoch, n=max(0, newest.n - behind))


def group_clock(started: Iterable[WeightVersion], min_weight_version: WeightVersion) -> WeightVersion:
    """What a group of trajectories is dated by: the oldest version that one of them started on.

    Args:
        started: of each trajectory that has a token, the version that its first token was sampled on.
        min_weight_version: what the prompt asked for; dates a group of which nothing has started.
    """
    return min(started, default=min_weight_version)


def staleness(newest: WeightVersion, clock: WeightVersion) -> int:
    """How many publishes a group dated `clock` is behind the newest version.

    0 if `clock` is the newer one: the group started on a version that was published before the caller was
    told of it.
    """
    return lag(max(newest, clock), clock)


def too_stale(newest: WeightVersion, clock: WeightVersion, max_off_policy_threshold: int) -> bool:
    """Whether a group dated `clock` is further behind than training allows."""
    return staleness(newest, clock) > max_off_policy_threshold
