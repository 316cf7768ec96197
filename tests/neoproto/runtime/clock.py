"""Time that moves when a test says so, for what reads `time.monotonic`."""

from __future__ import annotations

from collections.abc import Callable

from neoproto.runtime.deadline import DeadlineWatch


class Clock:
    """Takes the place of `time.monotonic`."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class ManualWatch(DeadlineWatch):
    """A watch without a thread: what is due runs when a test moves its clock."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(lambda _: True)
        self._clock = clock
        self._entries: list[tuple[float, Callable[[int], None], int]] = []

    def add(self, deadline: float, on_expiry: Callable[[int], None], number: int) -> None:
        self._entries.append((deadline, on_expiry, number))

    def advance(self, seconds: float) -> None:
        """Let time pass, and run what is due then, in order."""
        self._clock.now += seconds
        due = [entry for entry in self._entries if entry[0] <= self._clock.now]
        self._entries = [entry for entry in self._entries if entry not in due]
        for _, on_expiry, number in sorted(due, key=lambda entry: entry[0]):
            on_expiry(number)
