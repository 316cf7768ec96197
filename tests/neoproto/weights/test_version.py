import pickle

import pytest

from neoproto.weights import WeightVersion, lag


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
