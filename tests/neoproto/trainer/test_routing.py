from neoproto.trainer.routing import Routes
from tests.neoproto.trainer.replay import version

NAMES = ("rollout/0", "rollout/1", "rollout/2")


def routes(*, most: int = 4, aware: bool = True, serving: tuple[int | None, ...] = (0, 0, 0)) -> Routes:
    made = Routes(NAMES, most_in_flight=most, version_aware=aware)
    made.update(served(*serving))
    return made


def served(*versions: int | None) -> dict:
    return {name: version(n) for name, n in zip(NAMES, versions, strict=True) if n is not None}


def test_the_least_loaded_replica_is_chosen_and_the_first_of_equals():
    made = routes()
    made.started("rollout/0", 2)
    made.started("rollout/1", 1)
    assert made.choose(version(0)) == "rollout/2"
    made.started("rollout/2", 1)
    assert made.choose(version(0)) == "rollout/1"
    made.ended("rollout/0", 2)
    assert made.choose(version(0)) == "rollout/0"


def test_only_replicas_that_serve_the_version_are_chosen():
    made = routes(serving=(0, 1, None))
    made.started("rollout/1", 3)
    assert made.choose(version(1)) == "rollout/1"
    assert made.choose(version(0)) == "rollout/0"
    assert made.choose(version(2)) is None
    assert made.suits("rollout/1", version(1))
    assert not made.suits("rollout/0", version(1))
    made.update(served(0, 1, 2))
    assert made.choose(version(1)) == "rollout/2"


def test_a_replica_takes_no_more_than_its_share():
    made = routes(most=2, serving=(1, None, None))
    assert made.room("rollout/0") == 2
    made.started("rollout/0", 2)
    assert made.choose(version(1)) is None
    made.update(served(1, None, None))
    assert made.choose(version(1)) is None
    made.ended("rollout/0", 1)
    assert made.choose(version(1)) == "rollout/0"
    assert made.room("rollout/0") == 1


def test_without_version_awareness_all_replicas_must_serve_the_version():
    made = routes(aware=False, serving=(1, 1, 0))
    assert made.choose(version(1)) is None
    assert not made.suits("rollout/0", version(1))
    assert made.choose(version(0)) == "rollout/0"
    made.update(served(1, 1, 1))
    assert made.choose(version(1)) == "rollout/0"
    made.update(served(1, 1, None))
    assert made.choose(version(0)) is None


def test_the_least_loaded_of_several_versions_is_chosen():
    made = routes(serving=(2, 1, 1))
    made.started("rollout/0", 1)
    assert made.choose(version(1)) == "rollout/1"
    made.started("rollout/1", 1)
    made.started("rollout/2", 1)
    assert made.choose(version(1)) == "rollout/0"
    made.started("rollout/0", 1)
    assert made.choose(version(1)) == "rollout/1"
    assert made.choose(version(2)) == "rollout/0"


def test_loads_are_kept_when_versions_change():
    made = routes()
    for name in NAMES[:2]:
        made.started(name, 1)
    made.update(served(1, 1, 1))
    assert made.choose(version(1)) == "rollout/2"


def test_nothing_waits_for_replicas_that_are_down_nor_goes_there():
    made = Routes(NAMES, most_in_flight=4, version_aware=False)
    made.update(served(1, 1, 0), up=NAMES[:2])
    assert made.choose(version(1)) == "rollout/0"
    assert not made.suits("rollout/0", version(2))
    made.drop("rollout/0")
    assert made.choose(version(1)) == "rollout/1"
    made.drop("rollout/1")
    assert made.choose(version(0)) is None
    made.ended("rollout/1", 0)
    assert made.choose(version(0)) is None


def test_a_replica_that_failed_leaves_the_others_waiting_for_one_that_has_yet_to_load():
    made = Routes(NAMES, most_in_flight=4, version_aware=False)
    made.update(served(1, 1, None))
    made.drop("rollout/0")
    assert made.choose(version(1)) is None
