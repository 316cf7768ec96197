"""What one process has done through its client."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass

from neoproto.store.rowcache import RemoteRowCache
from neoproto.store.shm import SharedVolume

REPORTED = ("gets", "gets_shared", "bytes_mapped", "bytes_copied", "cache_hits", "cache_misses")
"""What clients tell of themselves with each put: a volume does not see what is read of its shared memory."""


@dataclass(kw_only=True, slots=True)
class ClientCounters:
    """Counts of one process. `gets_shared` are those gets that cost no message to a volume.

    No lock: gets are counted on the caller's thread, so two at once may count as one.
    """

    puts: int = 0
    gets: int = 0
    gets_shared: int = 0
    bytes_in: int = 0
    bytes_out: int = 0

    def with_memory(self, memories: Iterable[SharedVolume | None], cache: RemoteRowCache) -> dict[str, int]:
        """All counts by name: these, and those of shared memory and of the cache."""
        open_ones = [memory for memory in memories if memory is not None]
        return asdict(self) | {
            "bytes_mapped": sum(memory.mapped for memory in open_ones),
            "bytes_copied": sum(memory.copied for memory in open_ones),
            "holds": sum(memory.holds for memory in open_ones),
            "cache_hits": cache.hits,
            "cache_misses": cache.misses,
            "cache_bytes": cache.nbytes,
        }
