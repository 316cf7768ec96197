"""The list of what is used of Monarch's private API, against the Monarch that is installed."""

from __future__ import annotations

import pytest

from neoproto.private_api import monarch as private
from neoproto.private_api.monarch import Use


def test_monarch_has_every_private_name() -> None:
    assert private.missing() == []


@pytest.mark.parametrize(
    "name",
    [
        "monarch._src.actor.no_such_module:thing",
        "monarch._src.actor.actor_mesh:NoSuchClass.method",
        "monarch._src.actor.actor_mesh:Instance._no_such_method",
        "monarch._src.job.process:ProcessJob._no_such_attribute",
    ],
)
def test_a_name_that_is_gone_is_said_with_what_it_is_for(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(private, "PRIVATE", {**private.PRIVATE, name: Use("Something needs it.", "Nothing.")})
    assert private.missing() == [f"Monarch has no {name} any more. Something needs it."]


def test_every_use_has_its_reason_and_what_is_done_instead() -> None:
    assert all(use.reason.endswith(".") and use.instead.endswith(".") for use in private.PRIVATE.values())


def test_a_name_that_is_not_listed_is_refused() -> None:
    with pytest.raises(AssertionError, match="is not in the list"):
        private._private("monarch._src.actor.actor_mesh:_context")


def test_no_private_name_is_used_when_that_is_not_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(private, "_allowed", False)
    with pytest.raises(AssertionError, match="private_api is false"):
        private._private("monarch._src.actor.actor_mesh:Port._send_message")


class Job:
    """What an applied job of a kind of its own has."""

    def __init__(self, *, active: bool = True, runs: bool = True) -> None:
        self.active, self.runs, self._host_to_pid = active, runs, {"a_0": "?"}
        self._meshes = {"a": 2}

    def can_run(self, spec: object) -> bool:
        return spec is self and self.runs


def test_a_job_is_judged_by_its_public_names_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(private, "_allowed", False)
    alive = Job()
    assert private.applied_job(alive) is alive
    assert private.applied_job(Job(active=False)) is private.applied_job(Job(runs=False)) is None
    assert private.host_pids(alive) == {}
    assert private.declared_meshes(alive) is None
    assert not private.rename_controller("name", object())
