import pickle

import pytest

from neoproto.weights import (
    WeightVersion,
    group_clock,
    lag,
    required_version,
    should_load,
    staleness,
    too_stale,
)


def version(epoch: int, n: int) -> WeightVersion:
    return WeightVersion(epoch=epoch, n=n)


def test_a_later_epoch_is_newer_whatever_its_number():
    assert sorted([version(1, 3), version(0, 9), version(1, 2), version(0, 0)]) == [
        version(0, 0),
        version(0, 9),
        version(1, 2),
        version(1, 3),
    ]


def test_next_counts_on_and_a_restart_keeps_the_number():
    assert version(0, 4).next() == version(0, 5)
    assert version(0, 4).next_epoch() == version(1, 4)
    assert str(version(1, 4)) == "1.4"


@pytest.mark.parametrize(
    ("newest", "used", "behind"),
    [((0, 5), (0, 5), 0), ((0, 5), (0, 2), 3), ((1, 5), (0, 2), 3), ((1, 5), (0, 5), 1), ((1, 5), (0, 9), 1)],
)
def test_lag_counts_publishes_and_an_older_epoch_is_at_least_one_behind(newest, used, behind):
    assert lag(version(*newest), version(*used)) == behind


def test_lag_refuses_a_version_from_the_future():
    with pytest.raises(ValueError, match=r"0\.3 are newer than the newest version 0\.2"):
        lag(version(0, 2), version(0, 3))


def test_negative_parts_are_refused():
    with pytest.raises(ValueError, match="n=-1"):
        version(0, -1)


def test_a_version_travels_and_is_a_key():
    assert pickle.loads(pickle.dumps(version(2, 7))) == version(2, 7)
    assert {version(2, 7): "x"}[version(2, 7)] == "x"


@pytest.mark.parametrize(
    ("current", "newest", "least", "wanted", "load"),
    [
        (None, (0, 0), 3, None, True),  # the first version, whatever the lag
        ((0, 4), (0, 4), 1, None, False),
        ((0, 4), (0, 5), 1, None, True),
        ((0, 4), (0, 5), 2, None, False),
        ((0, 4), (0, 6), 2, None, True),
        ((0, 4), (0, 5), 2, (0, 5), True),  # waited for
        ((0, 5), (0, 5), 1, (0, 5), False),  # there already
        ((0, 4), (0, 5), 2, (0, 6), False),  # not published yet
        ((0, 9), (1, 9), 1, None, True),  # a restart's first version
    ],
)
def test_a_replica_loads_what_is_new_enough_or_waited_for(current, newest, least, wanted, load):
    assert load is should_load(
        current and version(*current),
        version(*newest),
        min_version_lag=least,
        wanted=wanted and version(*wanted),
    )


def test_a_lag_of_nothing_is_refused():
    with pytest.raises(ValueError, match="min_version_lag must be >= 1, got 0"):
        should_load(None, version(0, 1), min_version_lag=0)


@pytest.mark.parametrize(
    ("newest", "lag", "older", "asked"),
    [(5, 1, 0, 5), (5, 2, 0, 4), (5, 1, 1, 4), (5, 3, 2, 1), (1, 3, 0, 0), (0, 1, 0, 0)],
)
def test_a_prompt_asks_for_what_every_replica_is_sure_to_load(newest, lag, older, asked):
    found = required_version(version(2, newest), min_version_lag=lag, prompt_version_lag=older)
    assert found == version(2, asked)


def test_a_group_is_dated_by_its_oldest_start():
    assert group_clock([version(0, 3), version(0, 2)], version(0, 1)) == version(0, 2)
    assert group_clock([version(1, 3), version(0, 9)], version(0, 1)) == version(0, 9)


def test_a_group_of_which_nothing_started_is_dated_by_what_its_prompt_asked_for():
    assert group_clock([], version(0, 1)) == version(0, 1)


@pytest.mark.parametrize(("clock", "behind"), [((0, 5), 0), ((0, 3), 2), ((0, 7), 0)])
def test_staleness_counts_publishes_and_is_never_negative(clock, behind):
    assert staleness(version(0, 5), version(*clock)) == behind
    assert too_stale(version(0, 5), version(*clock), 1) is (behind > 1)


@pytest.mark.parametrize(("threshold", "too_old"), [(1, True), (2, False), (3, False)])
def test_too_stale_is_beyond_the_threshold(threshold, too_old):
    assert too_stale(version(0, 5), version(0, 3), threshold) is too_old
