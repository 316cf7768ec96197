"""Which replica gets the next prompts: the least loaded of those that serve a version new enough."""

from __future__ import annotations

import heapq
from collections.abc import Collection, Mapping, Sequence

from neoproto.weights.version import WeightVersion


class Routes:
    """Load and version of each replica, as far as the controller knows.

    Args:
        names: of the replicas.
        most_in_flight: prompts that one replica may have at a time.
        version_aware: a replica is used as soon as it serves the version asked for; otherwise once all of
            them do.
    """

    def __init__(self, names: Sequence[str], *, most_in_flight: int, version_aware: bool) -> None:
        self._order = {name: place for place, name in enumerate(names)}
        self._most, self._version_aware = most_in_flight, version_aware
        self._in_flight = dict.fromkeys(names, 0)
        self._up = set(names)
        self._serving: dict[str, WeightVersion] = {}
        # A heap of (load, place, name) for each version served. Entries with an old load are skipped.
        self._heaps: dict[WeightVersion, list[tuple[int, int, str]]] = {}
        self._all_serve: WeightVersion | None = None

    def update(self, serving: Mapping[str, WeightVersion], *, up: Collection[str] | None = None) -> None:
        """Note what each replica serves.

        Args:
            serving: one that is missing has not loaded anything yet, or is not up.
            up: replicas that are; None is all of them. Nothing waits for the others.
        """
        self._up = set(self._order) if up is None else set(up)
        self._serving = {name: serving[name] for name in self._order if name in serving and name in self._up}
        whole = len(self._serving) == len(self._up)
        self._all_serve = min(self._serving.values(), default=None) if whole else None
        self._heaps = {}
        for name in self._serving:
            self._offer(name)

    def drop(self, name: str) -> None:
        """Give a replica nothing until the next update; it has failed."""
        self.update(self._serving, up=self._up - {name})

    def room(self, version: WeightVersion) -> int:
        """How many prompts that ask for `version` the replica `choose` would name can take; 0 if none."""
        found = self._best(version)
        return 0 if found is None else self._most - self._in_flight[found]

    def choose(self, version: WeightVersion) -> str:
        """The replica that serves `version`, or a newer one, with the fewest prompts.

        Raises:
            ValueError: none has room.
        """
        found = self._best(version)
        if found is None:
            raise ValueError(f"no replica serves weights {version} and has room")
        return found

    def suits(self, name: str, version: WeightVersion) -> bool:
        """Whether prompts that ask for `version` may go to this replica, its load apart."""
        return self._serving[name] >= version and self._released(version)

    def started(self, name: str, prompts: int) -> None:
        """So many prompts were given to a replica."""
        self._in_flight[name] += prompts
        self._offer(name)

    def ended(self, name: str, prompts: int) -> None:
        """So many prompts of a replica are answered, or given up."""
        self._in_flight[name] -= prompts
        self._offer(name)

    def serves(self, name: str) -> WeightVersion:
        """What a chosen replica served when last heard of."""
        return self._serving[name]

    def _offer(self, name: str) -> None:
        load = self._in_flight[name]
        if name in self._serving and load < self._most:
            heap = self._heaps.setdefault(self._serving[name], [])
            heapq.heappush(heap, (load, self._order[name], name))

    def _best(self, version: WeightVersion) -> str | None:
        if not self._released(version):
            return None
        tops = [self._top(heap) for served, heap in self._heaps.items() if served >= version]
        return min((top for top in tops if top is not None), default=(0, 0, None))[2]

    def _released(self, version: WeightVersion) -> bool:
        return self._version_aware or (self._all_serve is not None and self._all_serve >= version)

    def _top(self, heap: list[tuple[int, int, str]]) -> tuple[int, int, str] | None:
        while heap and heap[0][0] != self._in_flight[heap[0][2]]:
            heapq.heappop(heap)
        return heap[0] if heap else None
