"""How weights are published and pulled."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightOptions:
    """Options of publishers and pullers.

    Attributes:
        num_slots: versions that are kept at a time; the oldest makes room for a new one, >= 1.
        rollout_dtype: what float32 weights are cast to on the way in, torch's name; None keeps them.
        lease_ttl: seconds after which a puller's lease lapses if its process is gone or stuck, > 0.
        bucket_bytes: weights are stored in buckets of at most so many bytes, a larger weight in its own, > 0.

    Raises:
        ValueError: a value out of range.
    """

    num_slots: int = 2
    rollout_dtype: str | None = None
    lease_ttl: float = 30.0
    bucket_bytes: int = 64 << 20

    def __post_init__(self) -> None:
        if self.num_slots < 1:
            raise ValueError(f"num_slots must be at least 1, got {self.num_slots}")
        if not self.lease_ttl > 0:
            raise ValueError(f"lease_ttl must be a positive number of seconds, got {self.lease_ttl}")
        if self.bucket_bytes <= 0:
            raise ValueError(f"bucket_bytes must be positive, got {self.bucket_bytes}")
