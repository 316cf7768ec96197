"""Weight versions, and every bit of arithmetic on them.

A version is `(epoch, n)`. `n` counts publishes; a restart from a checkpoint opens a new epoch and goes on
counting from the checkpoint's `n`, so a pair never names two different sets of weights.
"""

from __future__ import annotations

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
