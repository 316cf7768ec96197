"""How weights are published and pulled.

Classes of their own beside the configuration's sections: a publisher outside a run has no configuration, and
this package does not import it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from neoproto.weights.transports import TRANSPORTS

PauseMode = Literal["abort", "keep"]
"""What happens to requests in flight. "abort": they are stopped, and continue from the tokens they had.
"keep": they are frozen, and continue with their cache computed again."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightOptions:
    """Options of publishers and pullers.

    Attributes:
        transport: how bytes travel, one of `TRANSPORTS`; publisher and pullers need the same.
        num_slots: versions that are kept at a time; the oldest makes room for a new one, >= 1.
        rollout_dtype: what float32 weights are cast to on the way in, torch's name; None keeps them.
        bucket_bytes: weights are stored in buckets of at most so many bytes, a larger weight in its own, > 0.

    Raises:
        ValueError: a value out of range.
    """

    transport: str = "auto"
    num_slots: int = 2
    rollout_dtype: str | None = None
    bucket_bytes: int = 64 << 20

    def __post_init__(self) -> None:
        if self.transport not in TRANSPORTS:
            raise ValueError(f"transport must be one of {', '.join(TRANSPORTS)}, got {self.transport!r}")
        if self.num_slots < 1:
            raise ValueError(f"num_slots must be at least 1, got {self.num_slots}")
        if self.bucket_bytes <= 0:
            raise ValueError(f"bucket_bytes must be positive, got {self.bucket_bytes}")


@dataclass(frozen=True, kw_only=True, slots=True)
class UpdateOptions:
    """When and how a rollout replica takes new weights.

    Attributes:
        min_version_lag: how many publishes it must be behind before it loads of its own accord, >= 1. The
            first version, and one that is asked for, load whatever the lag.
        poll_interval: seconds after which it looks around again if the registry has nothing new, > 0.
        pause_mode: see `PauseMode`.
        drain_timeout: seconds that requests in flight are given to end before a pause, >= 0. New ones wait
            for the new weights meanwhile, so trajectories shorter than this span one version.

    Raises:
        ValueError: a value out of range.
    """

    min_version_lag: int = 1
    poll_interval: float = 1.0
    pause_mode: PauseMode = "abort"
    drain_timeout: float = 5.0

    def __post_init__(self) -> None:
        if self.min_version_lag < 1:
            raise ValueError(f"min_version_lag must be at least 1, got {self.min_version_lag}")
        if not self.poll_interval > 0:
            raise ValueError(f"poll_interval must be a positive number of seconds, got {self.poll_interval}")
        if self.pause_mode not in ("abort", "keep"):
            raise ValueError(f"pause_mode must be 'abort' or 'keep', got {self.pause_mode!r}")
        if not self.drain_timeout >= 0:
            raise ValueError(f"drain_timeout must be a number of seconds >= 0, got {self.drain_timeout}")
