"""What is done to a run, and when: drawn by a seed, so that the same seed gives the same faults again."""

from __future__ import annotations

import random
import re
import signal
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Literal

MODES = ("sync", "separate_async", "decoupled_async")
STEPS = 12
"""Training steps of a run: enough for one that survives its fault to show that it does."""
LAST_FAULT_STEP = 7
START_SHARE = 0.2
"""Of the faults, how many come while the run still starts."""


class Action(Enum):
    """How a fault is brought about."""

    SIGNAL = "signal"
    PAUSE = "pause"
    FILL = "fill"


@dataclass(frozen=True, kw_only=True, slots=True)
class Kind:
    """One kind of fault.

    Attributes:
        name: as on the command line.
        action: what is done; PAUSE is SIGSTOP, and SIGCONT after the plan's pause.
        group: whose process it is done to, a pattern of names in `processes.json`, "host" or "guardian"; ""
            for none.
        signal: its name, for SIGNAL.
        mount: for FILL, what is full: "/dev/shm" or "run folder".
        code: exit code of a run that ends by it.
        cause: what the last line of such a run says, a pattern; "" if it can say nothing.
        must_survive: whether the run has to go on to its end.
    """

    name: str
    action: Action
    group: str = ""
    signal: str = ""
    mount: str = ""
    code: int = 1
    cause: str = ""
    must_survive: bool = False


_GROUPS = {
    "policy": "actor",
    "critic": "critic",
    "rollout": r"rollout(-\d+)*",
    "volume": "store-volume",
    "index": "store-index",
    "registry": "registry",
    "reward": "reward",
}
_ANYBODY = "|".join(_GROUPS.values())


def _named(group: str) -> str:
    """How a line names a process: the store's are not told apart there."""
    return "object store" if group.startswith("store-") else rf"\b{group}\b"


def _process_kinds() -> Iterator[Kind]:
    for name, group in _GROUPS.items():
        said = rf"^error: .*{_named(group)}"
        killed, stopped = rf"{said}.*signal 9 \(SIGKILL\)", f"{said}.*stopped"
        yield Kind(name=f"kill-{name}", action=Action.SIGNAL, group=group, signal="SIGKILL", cause=killed)
        yield Kind(name=f"stop-{name}", action=Action.SIGNAL, group=group, signal="SIGSTOP", cause=stopped)


def _controller(name: str, signum: signal.Signals, said: str) -> Kind:
    """The shell's exit code of a program that leaves by a signal, Python's of one that the signal ends."""
    code = 128 + signum if said else -signum
    cause = f"^{said}; everything of the run is closed$" if said else ""
    return Kind(
        name=name, action=Action.SIGNAL, group="controller", signal=signum.name, code=code, cause=cause
    )


_HOST = r"^error: .*its host .* died: "
_FULL_DISK = r"^error: .*(/run/.*No space left on device|No space left on device.*/run/)"
KINDS = {
    kind.name: kind
    for kind in (
        *_process_kinds(),
        Kind(
            name="kill-host", action=Action.SIGNAL, group="host", signal="SIGKILL", cause=f"{_HOST}signal 9"
        ),
        Kind(name="stop-host", action=Action.SIGNAL, group="host", signal="SIGSTOP", cause=f"{_HOST}stopped"),
        Kind(
            name="kill-guardian", action=Action.SIGNAL, group="guardian", signal="SIGKILL", must_survive=True
        ),
        Kind(
            name="stop-guardian", action=Action.SIGNAL, group="guardian", signal="SIGSTOP", must_survive=True
        ),
        _controller("kill-controller", signal.SIGKILL, ""),
        _controller("term-controller", signal.SIGTERM, "ended by SIGTERM"),
        _controller("int-controller", signal.SIGINT, "interrupted"),
        Kind(name="stop-controller", action=Action.PAUSE, group="controller", must_survive=True),
        Kind(name="delay", action=Action.PAUSE, group=_ANYBODY, must_survive=True),
        Kind(name="full-shm", action=Action.FILL, mount="/dev/shm", cause=r"^error: .*/dev/shm"),
        Kind(name="full-disk", action=Action.FILL, mount="run folder", cause=_FULL_DISK),
    )
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """One run and what happens to it.

    Attributes:
        index: its place in the series.
        mode: of the trainer.
        kind: name of the fault.
        phase: "start" is from the first sign of hosts on, "step" from the line of a step on.
        step: that step; 0 in phase "start".
        delay_s: seconds from there.
        pause_s: how long a paused process is stopped.
        choice: in [0, 1): which one of several processes that fit.
    """

    index: int
    mode: str
    kind: str
    phase: Literal["start", "step"]
    step: int
    delay_s: float
    pause_s: float
    choice: float

    @property
    def moment(self) -> str:
        """When the fault comes, for people."""
        return f"{'start' if self.phase == 'start' else f'step {self.step}'} + {self.delay_s:.2f} s"


def draw(
    runs: int, seed: int, modes: Sequence[str] = MODES, kinds: Sequence[str] | None = None
) -> list[Plan]:
    """The plans of a series: every kind before one comes again, and then in another mode.

    Raises:
        ValueError: an unknown mode or kind.
    """
    kinds = list(KINDS) if kinds is None else kinds
    for what, given, known in (("mode", modes, MODES), ("kind", kinds, list(KINDS))):
        if unknown := [name for name in given if name not in known]:
            raise ValueError(f"no {what} {unknown[0]!r}; there is {', '.join(known)}")
    chance = random.Random(seed)
    turns = {kind: chance.randrange(len(modes)) for kind in kinds}
    pairs: list[tuple[str, str]] = []
    for turn in range(-(-runs // len(kinds))):
        order = chance.sample(kinds, len(kinds))
        pairs += [(modes[(turns[kind] + turn) % len(modes)], kind) for kind in order]
    return [_draw_one(index, mode, kind, chance) for index, (mode, kind) in enumerate(pairs[:runs])]


def _draw_one(index: int, mode: str, kind: str, chance: random.Random) -> Plan:
    # All are drawn for every plan, so that each kind takes as much of the sequence as another.
    early = chance.random() < START_SHARE
    step, share = chance.randint(1, LAST_FAULT_STEP), chance.random()
    pause, choice = round(chance.uniform(1.0, 5.0), 2), chance.random()
    return Plan(
        index=index,
        mode=mode,
        kind=kind,
        phase="start" if early else "step",
        step=0 if early else step,
        delay_s=round(share * (8.0 if early else 1.5), 2),
        pause_s=pause,
        choice=choice,
    )


def matches(kind: Kind, group: str) -> bool:
    """Whether a process of that group is one the fault is for."""
    return re.fullmatch(kind.group, group) is not None
