"""A rollout replica without a model and a publisher for it; in a module, so that they travel by name."""

from __future__ import annotations

import os
import threading
from typing import Any

import torch

from actors.rollout.engine_thread import EngineThread
from actors.rollout.options import EngineOptions, RolloutOptions
from actors.rollout.worker import RolloutWorker
from actors.weight_registry import GroupRegistry, RegistryWorker
from neoproto.config import RolloutConfig
from neoproto.runtime import Worker
from neoproto.store import active_store
from neoproto.weights import Publisher, UpdateOptions, WeightVersion
from tests.actors.fake_engine import FakeEngine

PROMPT, ANSWER = 6, 600


def rollout_options() -> RolloutOptions:
    engine = EngineOptions(
        rollout=RolloutConfig(seed=11, n=4),
        model="none",
        max_model_len=PROMPT + ANSWER,
        eos_token_ids=(2,),
    )
    return RolloutOptions(
        engine=engine,
        max_prompt_length=PROMPT,
        max_response_length=ANSWER,
        pad_token_id=0,
        updates=UpdateOptions(min_version_lag=2, poll_interval=0.5, drain_timeout=0.0),
    )


class Replicas(RolloutWorker):
    """Rollout workers whose engine answers from arithmetic: slowly, 20 ms a step, on version 1."""

    def __init__(self) -> None:
        self._fake, pace = FakeEngine(), threading.Event()
        fake = self._fake

        def on_step(running: int) -> None:
            if fake.version == 1:
                pace.wait(0.02)

        fake.on_step = on_step
        super().__init__(rollout_options(), EngineThread(lambda: fake))

    async def in_flight(self) -> int:
        """Requests in the engine."""
        return len(self._fake.running)


class Trainer(Worker):
    """Publishes weights of the fake engine's layout."""

    def __init__(self, registry: Any) -> None:
        store = active_store()
        assert store is not None
        self._publisher = Publisher(store, GroupRegistry(registry))

    def publish(self, n: int) -> None:
        self._publisher.publish(WeightVersion(epoch=0, n=n), {"w": torch.full((2,), float(n))}, timeout=20.0)


class Registry(RegistryWorker):
    """The registry, and where it runs."""

    async def pid(self) -> int:
        return os.getpid()
