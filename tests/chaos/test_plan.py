"""What is drawn: the same for the same seed, all kinds, all modes, faults that have something to hit."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.chaos.plan import KINDS, LAST_FAULT_STEP, MODES, STEPS, Action, draw, matches


def test_a_seed_gives_the_same_series_again() -> None:
    assert draw(100, 3) == draw(100, 3)
    assert draw(100, 3) != draw(100, 4)


def test_every_kind_comes_before_one_comes_again_and_then_in_another_mode() -> None:
    plans = draw(3 * len(KINDS), 7)
    for turn in range(3):
        part = plans[turn * len(KINDS) : (turn + 1) * len(KINDS)]
        assert {plan.kind for plan in part} == set(KINDS)
    pairs = Counter((plan.kind, plan.mode) for plan in plans)
    assert set(pairs.values()) == {1}
    assert len(pairs) == len(KINDS) * len(MODES)


def test_moments_are_within_the_run_and_some_come_while_it_starts() -> None:
    plans = draw(400, 1)
    early = [plan for plan in plans if plan.phase == "start"]
    assert 40 < len(early) < 130
    for plan in plans:
        assert plan.step in (range(1) if plan.phase == "start" else range(1, LAST_FAULT_STEP + 1))
        assert 0 <= plan.delay_s <= 8
        assert 1 <= plan.pause_s <= 5
        assert 0 <= plan.choice < 1
    assert LAST_FAULT_STEP < STEPS
    assert [plan.index for plan in plans] == list(range(400))


def test_modes_and_kinds_can_be_chosen() -> None:
    plans = draw(5, 1, ["sync"], ["delay", "full-disk"])
    assert {plan.mode for plan in plans} == {"sync"}
    assert {plan.kind for plan in plans} == {"delay", "full-disk"}
    with pytest.raises(ValueError, match="no kind 'meteor'; there is kill-policy, "):
        draw(1, 1, MODES, ["meteor"])
    with pytest.raises(ValueError, match="no mode 'async'; there is sync, "):
        draw(1, 1, ["async"])


@pytest.mark.parametrize("group", ["rollout", "rollout-0", "rollout-12", "rollout-0-2"])
def test_replicas_are_known_in_one_group_and_in_groups_of_their_own(group: str) -> None:
    assert matches(KINDS["kill-rollout"], group)
    assert matches(KINDS["delay"], group)
    assert not matches(KINDS["kill-policy"], group)


def test_a_delay_is_for_workers_and_not_for_the_controller() -> None:
    assert not matches(KINDS["delay"], "controller")
    assert all(matches(KINDS["delay"], group) for group in ("actor", "store-index", "registry"))


def test_every_fault_of_the_list_is_there() -> None:
    victims = (
        "policy",
        "critic",
        "rollout",
        "volume",
        "index",
        "registry",
        "reward",
        "controller",
        "host",
        "guardian",
    )
    wanted = {f"{what}-{whom}" for what in ("kill", "stop") for whom in victims}
    assert wanted | {"term-controller", "int-controller", "delay", "full-shm", "full-disk"} == set(KINDS)
    paused = {name for name, kind in KINDS.items() if kind.action is Action.PAUSE}
    assert paused == {"delay", "stop-controller"}
    survived = {name for name, kind in KINDS.items() if kind.must_survive}
    assert survived == paused | {"kill-guardian", "stop-guardian"}
