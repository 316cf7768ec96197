"""What a run made of its fault. Nothing here looks at a process: facts in, verdict out."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from tests.chaos.plan import Action, Kind

CAUSE_S = 30.0
"""A run that ends by its fault has ended so many seconds after it."""
GONE_S = 15.0
"""Nothing of a run is left so many seconds after its end."""
MOST_DIFFERENCE = 1e-3
"""What replicas and policy may differ by in the probability of a token, on the same weights in float32."""
DIFFERENCE = "training/rollout_probs_diff_max"
STALENESS = "training/off_policy/trajectory_staleness/max"


class Verdict(Enum):
    """How it went; see `PASSED` and `OPEN` for which of them are good, and which say nothing."""

    SURVIVED = "survived"
    ENDED = "ended with its cause"
    HANG = "HANG"
    LEFTOVER = "LEFTOVER"
    WRONG_VERSION = "WRONG VERSION"
    LATE = "LATE"
    UNCLEAR = "UNCLEAR"
    GAVE_UP = "GAVE UP"
    MISSED = "over before the fault"
    NOT_POSSIBLE = "not possible here"


PASSED = frozenset({Verdict.SURVIVED, Verdict.ENDED})
OPEN = frozenset({Verdict.MISSED, Verdict.NOT_POSSIBLE})


@dataclass(frozen=True, kw_only=True, slots=True)
class Checked:
    """Samples against weights.

    Attributes:
        tokens: compared.
        unknown: tokens of versions without a checkpoint: the run ended before it was whole.
        versions: compared.
        wrong: the worst token that other weights made, in words; "" if there is none.
    """

    tokens: int = 0
    unknown: int = 0
    versions: int = 0
    wrong: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Seen:
    """What was seen of a run.

    Attributes:
        code: its exit code; None if it hung and was ended from outside.
        seconds: from the fault to the end of the command; None if it was over before.
        last_line: the last it said, of the errors if there are any.
        errors: all it wrote to its error stream.
        early: whether the fault came while it still started: a file system that is full is noticed by who
            writes to it, and a start writes when it gets there.
        left: what of it was still there `GONE_S` after its end.
        rows: of its `metrics.jsonl`.
        most_stale: how old weights may be that a sample was drawn with; None where nothing bounds it.
        sync: whether replicas and policy have the same weights at every step.
        other_weights: which sample was not made by the weights it names; "" if none was seen.
    """

    code: int | None
    seconds: float | None
    last_line: str
    errors: str
    early: bool
    left: Sequence[str]
    rows: Sequence[Mapping[str, Any]]
    most_stale: float | None
    sync: bool
    other_weights: str = ""


def judge(kind: Kind, seen: Seen) -> tuple[Verdict, str]:
    """The verdict, and what it rests on. The worst there is to say comes first."""
    if seen.code is None:
        return Verdict.HANG, "ended from outside"
    if seen.left:
        return Verdict.LEFTOVER, "; ".join(seen.left)
    if wrong := wrong_version(seen):
        return Verdict.WRONG_VERSION, wrong
    if seen.seconds is None:
        done = seen.code == 0
        return (
            (Verdict.MISSED, "") if done else (Verdict.UNCLEAR, f"ended before the fault: {seen.last_line}")
        )
    if seen.code == 0:
        return Verdict.SURVIVED, ""
    if kind.must_survive:
        return Verdict.GAVE_UP, f"should have gone on: {seen.last_line}"
    if unclear := unclear_end(kind, seen):
        return Verdict.UNCLEAR, unclear
    noticed = kind.action is not Action.FILL or not seen.early
    if noticed and seen.seconds > CAUSE_S:
        return Verdict.LATE, f"{seen.seconds:.1f} s after the fault"
    return Verdict.ENDED, ""


def wrong_version(seen: Seen) -> str:
    """Where a step was trained on samples of weights that it must not be; "" if nowhere."""
    if seen.other_weights:
        return seen.other_weights
    for row in seen.rows:
        difference, stale = row.get(DIFFERENCE), row.get(STALENESS)
        if seen.sync and difference is not None and not difference < MOST_DIFFERENCE:
            return f"step {row.get('step')}: {DIFFERENCE} is {difference:.2g}, not below {MOST_DIFFERENCE:g}"
        if seen.most_stale is not None and stale is not None and not stale <= seen.most_stale:
            return f"step {row.get('step')}: {STALENESS} is {stale:g}, above {seen.most_stale:g}"
    return ""


def unclear_end(kind: Kind, seen: Seen) -> str:
    """What is wrong with how a run said that it ended; "" if nothing is."""
    if seen.code != kind.code:
        return f"exit code {seen.code}, not {kind.code}: {seen.last_line}"
    lines = seen.errors.splitlines()
    if len(lines) != (1 if kind.cause else 0):
        return f"{len(lines)} lines of errors, the last: {seen.last_line}"
    if not re.search(kind.cause, seen.last_line):
        return f"does not name its cause: {seen.last_line}"
    return ""
