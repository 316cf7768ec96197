"""Replicas that take their weights themselves, between real processes; the engine is not."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from neoproto.data import DataProto
from neoproto.errors import NeoProtoError, WorkerDied
from neoproto.runtime import ClassWithInitArgs, Runtime
from neoproto.weights import WeightVersion
from tests.actors.agent_workers import PROMPT, Registry, Replicas, Trainer
from tests.meshes.leftovers import wait_until_clean

pytestmark = pytest.mark.live


def version(n: int) -> WeightVersion:
    return WeightVersion(epoch=0, n=n)


def prompts(count: int) -> DataProto:
    return DataProto.from_dict(
        tensors={"prompts": torch.arange(1, PROMPT + 1).repeat(count, 1)},
        non_tensors={"uid": np.array([f"q{row}" for row in range(count)], dtype=object)},
    )


def spans(batch: DataProto) -> set[tuple[int, ...]]:
    """Which versions the trajectories were sampled on, in order."""
    found = set()
    for row in batch["weight_versions"].tolist():
        drawn = [one for one in row if one >= 0]
        found.add(tuple(one for place, one in enumerate(drawn) if place == 0 or drawn[place - 1] != one))
    return found


@pytest.mark.core
def test_replicas_take_versions_on_their_own_until_the_registry_dies(tmp_path: Path) -> None:
    with Runtime.from_config({"runtime": {"run_dir": str(tmp_path)}}) as runtime:
        registry = runtime.create_worker_group(
            ClassWithInitArgs(Registry), on=runtime.create_resource_pool(1, 1), name="registry"
        )
        handle = registry.slice(start=0, size=1)
        trainer = runtime.create_worker_group(
            ClassWithInitArgs(Trainer, handle), on=runtime.create_resource_pool(1, 1), name="trainer"
        )
        rollout = runtime.create_worker_group(
            ClassWithInitArgs(Replicas), on=runtime.create_resource_pool(1, 2), name="rollout"
        )
        rollout.submit("attach_registry", (handle,), timeout=30).result()
        agents = rollout.submit("run_agent", timeout=300)

        def served(n: int) -> bool:
            names = ["rollout/0", "rollout/1"]
            return bool(registry.submit("wait_serving", (names, version(n), 10.0), timeout=30).result())

        # The first version loads by itself, the next is below the lag and is not; the one after loads while
        # the replicas generate, and the trajectories in flight span both.
        trainer.submit("publish", (1,), timeout=30).result()
        assert served(1)
        trainer.submit("publish", (2,), timeout=30).result()
        answers = rollout.submit("generate_sequences", (prompts(8),), timeout=60)
        until = time.monotonic() + 10
        while not all(rollout.submit("in_flight", timeout=10).result()):
            assert time.monotonic() < until
        trainer.submit("publish", (3,), timeout=30).result()
        assert served(3)
        assert (1, 3) in spans(answers.result()) <= {(1,), (1, 3)}
        assert spans(rollout.submit("generate_sequences", (prompts(2),), timeout=60).result()) == {(3,)}
        for figures in rollout.submit("stats", timeout=30).result():
            assert (figures["weight_loads"], figures["torn_reads"]) == (2, 0)
            assert 0 < figures["last_load_seconds"] <= figures["last_pause_seconds"]

        # Asked for, a version loads below the lag.
        trainer.submit("publish", (4,), timeout=30).result()
        rollout.submit("update_weights", (version(4),), timeout=30).result()
        assert served(4)

        pid = registry.submit("pid", timeout=30).result()[0]
        os.kill(pid, signal.SIGKILL)
        died = time.monotonic()
        with pytest.raises(NeoProtoError) as caught:
            agents.result()
        assert time.monotonic() - died < 10
        assert isinstance(caught.value, WorkerDied), caught.value
        assert "registry" in str(caught.value)
        # What they serve, they serve on.
        assert spans(rollout.submit("generate_sequences", (prompts(2),), timeout=60).result()) == {(4,)}
    assert wait_until_clean(runtime.run_id, None, 2.0) == []
