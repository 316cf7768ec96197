"""Which replica gets the next prompts: the least loaded of those that serve a version new enough."""

from __future__ import annotations

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
        # There are few versions, however many replicas: comparing these is what takes time.
        self._serve: dict[WeightVersion, list[str]] = {}
        self._all_serve: WeightVersion | None = None

    def update(self, serving: Mapping[str, WeightVersion], *, up: Collection[str] | None = None) -> None:
        """Note what each replica serves.

        Args:
            serving: one that is missing has not loaded anything yet, or is not up.
            up: replicas that are; None is all of them. Nothing waits for the others.
        """
        self._up = set(self._order) if up is None else set(up)
        self._serving = {name: serving[name] for name in self._order if name in serving and name in self._up}
        self._serve = {}
        for name, version in self._serving.items():
            self._serve.setdefault(version, []).append(name)
        whole = len(self._serving) == len(self._up)
        self._all_serve = min(self._serve, default=None) if whole else None

    def drop(self, name: str) -> None:
        """Give a replica nothing until the next update; it has failed."""
        self.update(self._serving, up=self._up - {name})

    def choose(self, version: WeightVersion) -> str | None:
        """The least loaded replica that serves `version` or a newer one; None if none has room."""
        if not self._released(version):
            return None
        load = self._in_flight.__getitem__
        least = [min(names, key=load) for served, names in self._serve.items() if served >= version]
        found = min(least, key=lambda name: (load(name), self._order[name]), default=None)
        return None if found is None or self.room(found) <= 0 else found

    def room(self, name: str) -> int:
        """How many more prompts a replica can take."""
        return self._most - self._in_flight[name]

    def suits(self, name: str, version: WeightVersion) -> bool:
        """Whether prompts that ask for `version` may go to this replica, its load apart."""
        served = self._serving.get(name)
        return served is not None and served >= version and self._released(version)

    def started(self, name: str, prompts: int) -> None:
        """So many prompts were given to a replica."""
        self._in_flight[name] += prompts

    def ended(self, name: str, prompts: int) -> None:
        """So many prompts of a replica are answered, or given up."""
        self._in_flight[name] -= prompts

    def serves(self, name: str) -> WeightVersion:
        """What a chosen replica served when last heard of."""
        return self._serving[name]

    def _released(self, version: WeightVersion) -> bool:
        return self._version_aware or (self._all_serve is not None and self._all_serve >= version)
