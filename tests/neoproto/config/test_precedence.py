"""A shipped value gives way to a person's, where two options say the same thing."""

from __future__ import annotations

from typing import Any

import pytest

from neoproto.config.precedence import PAIRS, Pair, covers, typed_wins

VALUES: dict[str, Any] = {
    "trainer.total_epochs": 15,
    "actor_rollout_ref.actor.clip_ratio": 0.3,
    "reward.custom_reward_function.path": "mine.py",
    "algorithm.rollout_correction.rollout_is": "token",
    "algorithm.adv_estimator": "grpo",
}


def tree(values: dict[str, Any]) -> dict[str, Any]:
    made: dict[str, Any] = {}
    for path, value in values.items():
        *above, name = path.split(".")
        section = made
        for key in above:
            section = section.setdefault(key, {})
        section[name] = value
    return made


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: pair.gives_way)
def test_the_shipped_one_gives_way_unless_it_is_held(pair: Pair) -> None:
    shipped = "bootstrap" if pair.shipped else "shipped"
    before = tree({pair.typed: VALUES[pair.typed], pair.gives_way: shipped})
    after = tree({pair.typed: VALUES[pair.typed], pair.gives_way: pair.to})
    assert typed_wins(before, {pair.typed}, {pair.typed}) == after
    assert typed_wins(before, {pair.typed}, {pair.typed, pair.gives_way}) == before, "both are a person's"
    assert typed_wins(before, set(), set()) == before, "neither is"
    nothing = tree({pair.typed: None, pair.gives_way: shipped})
    assert typed_wins(nothing, {pair.typed}, {pair.typed}) == nothing


def test_only_what_does_not_fit_gives_way() -> None:
    custom = tree({"algorithm.adv_estimator": "custom", "algorithm.truncated": "bootstrap"})
    masked = tree({"algorithm.adv_estimator": "grpo", "algorithm.truncated": "mask"})
    for mapping in (custom, masked, {}, {"algorithm": 3}):
        assert typed_wins(mapping, {"algorithm.adv_estimator"}, set()) == mapping


def test_a_whole_covers_its_parts() -> None:
    assert covers({"trainer"}, "trainer.total_epochs")
    assert not covers({"trainer.total"}, "trainer.total_epochs")
