"""Raw Monarch actors, which bench_runtime.py measures the runtime against; workers import this file too."""

from __future__ import annotations

from monarch.actor import Actor, concurrent_endpoint, endpoint


class RawSync(Actor):  # type: ignore[misc] # Monarch is not typed
    """The same without us."""

    @endpoint  # type: ignore[untyped-decorator]
    def sync(self, value: int) -> int:
        return value


class RawAsync(Actor):  # type: ignore[misc]
    """The same without us; both kinds of async endpoint."""

    @endpoint  # type: ignore[untyped-decorator]
    async def on_loop(self, value: int) -> int:
        return value

    @concurrent_endpoint  # type: ignore[untyped-decorator]
    async def overlapping(self, value: int) -> int:
        return value
