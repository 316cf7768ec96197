"""What a person sets wins over what a shipped file sets, also where two options mean the same.

One option of such a pair rules the other: a number of steps rules epochs. That rule is for two values which a
person has set, or none. Where only the ruled one is a person's, the shipped value gives way to it.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from neoproto.algorithms.estimators import ESTIMATORS


@dataclass(frozen=True, kw_only=True, slots=True)
class Pair:
    """Two options of which a shipped value of one would defeat a person's value of the other.

    Attributes:
        typed: the path of the option that a person sets, to something else than null.
        gives_way: the path of the other, which becomes `to` unless a person has set it too.
        among: the person's values that the shipped one does not go with; None = all of them.
        shipped: the only shipped value that gives way; None = any.
    """

    typed: str
    gives_way: str
    to: Any = None
    among: tuple[Any, ...] | None = None
    shipped: Any = None


_ACTOR, _CORRECTION = "actor_rollout_ref.actor", "algorithm.rollout_correction"
PAIRS = (
    Pair(typed="trainer.total_epochs", gives_way="trainer.total_training_steps"),
    Pair(typed=f"{_ACTOR}.clip_ratio", gives_way=f"{_ACTOR}.clip_ratio_low"),
    Pair(typed=f"{_ACTOR}.clip_ratio", gives_way=f"{_ACTOR}.clip_ratio_high"),
    Pair(typed="reward.custom_reward_function.path", gives_way="reward.name", to="auto"),
    Pair(typed=f"{_CORRECTION}.rollout_is", gives_way=f"{_CORRECTION}.bypass_mode", to=False),
    Pair(
        typed="algorithm.adv_estimator",
        gives_way="algorithm.truncated",
        to="zero",
        among=tuple(name for name, estimator in ESTIMATORS.items() if not estimator.needs_critic),
        shipped="bootstrap",
    ),
)


def typed_wins(mapping: Mapping[str, Any], typed: Collection[str], held: Collection[str]) -> dict[str, Any]:
    """The configuration in which no shipped value defeats a person's.

    Args:
        mapping: composed and resolved.
        typed: dotted paths of a person's values.
        held: paths of the values that give way to none of them.
    """
    settled = copy.deepcopy(dict(mapping))
    for pair in PAIRS:
        value = _find(settled, pair.typed)
        section = _find(settled, pair.gives_way.rpartition(".")[0])
        name = pair.gives_way.rpartition(".")[2]
        if value is None or not covers(typed, pair.typed) or covers(held, pair.gives_way):
            continue
        if pair.among is not None and value not in pair.among:
            continue
        if isinstance(section, dict) and name in section and pair.shipped in (None, section[name]):
            section[name] = pair.to
    return settled


def covers(typed: Collection[str], path: str) -> bool:
    """Whether the value at `path`, or a whole that holds it, was set."""
    parts = path.split(".")
    return any(".".join(parts[: length + 1]) in typed for length in range(len(parts)))


def _find(mapping: Mapping[str, Any], path: str) -> Any:
    found: Any = mapping
    for name in path.split("."):
        found = found.get(name) if isinstance(found, Mapping) else None
    return found
