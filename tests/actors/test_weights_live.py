"""Weights between real processes: one publisher of two ranks, three pullers, a registry of its own."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from actors.weight_registry import RegistryWorker
from neoproto.errors import WorkerDied
from neoproto.runtime import ClassWithInitArgs, Runtime
from neoproto.store import active_store
from tests.actors.weight_workers import Replica, Trainer, version
from tests.meshes.leftovers import wait_until_clean

pytestmark = pytest.mark.live

VERSIONS = 25


@pytest.mark.core
def test_three_replicas_follow_a_publisher_bit_for_bit_and_one_dies_with_a_lease(tmp_path: Path) -> None:
    with Runtime.from_config({"runtime": {"run_dir": str(tmp_path)}}) as runtime:
        registry = runtime.create_worker_group(
            ClassWithInitArgs(RegistryWorker), on=runtime.create_resource_pool(1, 1), name="registry"
        )
        handle = registry.slice(start=0, size=1)
        trainer = runtime.create_worker_group(
            ClassWithInitArgs(Trainer, handle), on=runtime.create_resource_pool(1, 2), name="trainer"
        )
        replicas = runtime.create_worker_group(
            ClassWithInitArgs(Replica, handle), on=runtime.create_resource_pool(1, 3), name="replica"
        )

        def publish(n: int, timeout: float = 30.0) -> str:
            (error, pieces), other = trainer.submit("publish", (n, timeout), timeout=60).result()
            assert error == other[0]
            assert error or pieces == 1
            return error

        following = replicas.submit("follow", (VERSIONS,), timeout=120)
        assert [publish(n) for n in range(VERSIONS + 1)] == [""] * (VERSIONS + 1)
        for seen, wrong in following.result():
            assert wrong == []
            assert seen == sorted(set(seen))
            assert seen[-1] == VERSIONS
        waiting = registry.submit(
            "wait_serving", ([f"replica/{i}" for i in range(3)], version(VERSIONS), 5.0)
        )
        assert waiting.result()
        assert replicas.submit("pull_share", timeout=30).result() == [[], [], []]

        # A live holder keeps its version, and is named; a dead one keeps it until its lease lapses.
        held, _ = replicas.rank(1).submit("hold", (60.0,), timeout=30).result()[0]
        assert publish(held + 1) == ""
        error = publish(held + 2, timeout=3.0)
        assert error.startswith(
            f"WeightsInUse: weights 0.{held} were still read after 3.0 s, by replica/1 on"
        )
        replicas.rank(1).submit("let_go", timeout=30).result()
        assert publish(held + 2) == ""
        doomed, pid = replicas.rank(2).submit("hold", (3.0,), timeout=30).result()[0]
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(WorkerDied):
            replicas.rank(2).submit("let_go", timeout=30).result()
        assert [publish(doomed + 1), publish(doomed + 2)] == ["", ""]
        state = registry.submit("state", timeout=10).result()
        assert state.lapsed == 1
        assert [one.version.n for one in state.versions] == [doomed + 1, doomed + 2]

        store = active_store()
        stats = store.stats(run=True)
        assert stats["objects"] == 2 * 2, "two versions of two buckets"
        assert stats["made"] <= 4 * 2, "slots are used again, not made anew"
    assert wait_until_clean(runtime.run_id, None, 2.0) == []
