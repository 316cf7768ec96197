"""How long a replica stands still for new weights, beside how long its engine loads them.

    python scripts/bench_pause.py [--repeats 9] [--quick]

vLLM serves a model of SmolLM2-135M's shapes (269 MB as bfloat16, random values) and generates all the time;
an update agent takes version after version, in each pause mode. A pause is timed in the engine's thread, from
where it stops stepping to where it may step again; loading is a part of it. Medians; the last line is one
JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import statistics
import tempfile
from typing import Any

from _bench import EOS, Figure, Measurements, positive, random_llama

import neoproto  # noqa: F401 - first: it finds our packages, whatever else has their names
from actors.rollout.options import EngineOptions, rollout_env
from neoproto.config import RolloutConfig

PROMPT, ANSWER, IN_FLIGHT = 16, 96, 16


class Replica:
    """An engine, an agent beside it, and versions to take; all in this process."""

    def __init__(self, engine: Any, weights: dict[str, Any]) -> None:
        from neoproto.store import MemoryStore
        from neoproto.weights import Publisher, WeightRegistry, WeightVersion

        self.engine, self.weights = engine, weights
        self._store, self._registry = MemoryStore(), WeightRegistry()
        self._publisher = Publisher(self._store)
        self._version = WeightVersion(epoch=0, n=0)

    def agent(self, mode: Any) -> Any:
        """What takes versions for this engine."""
        from neoproto.weights import Puller, UpdateAgent, UpdateOptions

        puller = Puller(self._store, self._registry, "bench")
        options = UpdateOptions(pause_mode=mode, drain_timeout=0.0)
        return UpdateAgent(self._registry, puller, self.engine, options, replica="bench")

    async def update(self, agent: Any) -> dict[str, float]:
        """Take a version while generating: seconds paused, loading, from pause call to resumption."""
        generating = asyncio.create_task(self._generate())
        await asyncio.sleep(0.5)
        self._version = self._version.next()
        await self._registry.publish(self._publisher.publish(self._version, self.weights))
        await agent.load(self._version)
        times = self.engine.times
        generating.cancel()
        await asyncio.wait([generating])
        return {
            "paused": times.last_paused,
            "loading": times.last_loading,
            "update": agent.stats.last_update,
        }

    async def _generate(self) -> None:
        """Keep `IN_FLIGHT` requests in flight. Cancelled by the caller."""
        from neoproto.data.generation import GenerateRequest, SamplingParams

        sampling = SamplingParams(max_tokens=ANSWER)
        while True:
            await self.engine.generate(
                [
                    GenerateRequest(
                        uid="bench",
                        sample_index=index,
                        prompt_ids=tuple(range(3, 3 + PROMPT)),
                        sampling=sampling,
                        seed=index,
                    )
                    for index in range(IN_FLIGHT)
                ]
            )


def updates(
    replica: Replica, mode: str, count: int, measured: Measurements, runner: asyncio.Runner
) -> list[dict[str, float]]:
    """Of so many updates, after one that is not measured."""
    agent = replica.agent(mode)
    found: list[dict[str, float]] = []
    runner.run(replica.update(agent))
    measured.repeat(count, lambda _: found.append(runner.run(replica.update(agent))))
    return found


def figures_of(mode: str, found: list[dict[str, float]]) -> list[Figure]:
    """Of one pause mode, in milliseconds."""
    series = {name: [one[name] * 1e3 for one in found] for name in found[0]}
    beyond = [paused - loading for paused, loading in zip(series["paused"], series["loading"], strict=True)]
    return [
        Figure(
            name=f"pause_{mode}", value=statistics.median(series["paused"]), unit="ms", detail=dict(series)
        ),
        Figure(name=f"load_{mode}", value=statistics.median(series["loading"]), unit="ms"),
        Figure(
            name=f"pause_beyond_load_{mode}",
            value=statistics.median(beyond),
            unit="ms",
            goal="<= 50",
            detail={"beyond_ms": beyond},
        ),
    ]


def main() -> None:
    """Measure, then report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=positive, default=9)
    parser.add_argument("--quick", action="store_true", help="a small model, for trying the script itself")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        engine_options = EngineOptions(
            rollout=RolloutConfig(dtype="bfloat16"),
            model=folder,
            max_model_len=PROMPT + ANSWER,
            eos_token_ids=(EOS,),
        )
        os.environ.update(rollout_env(engine_options))  # before torch and vLLM are imported
        model = random_llama(options.quick).bfloat16()
        model.save_pretrained(folder)

        from actors.rollout.engine_thread import EngineThread
        from actors.rollout.vllm_engine import VllmEngine

        engine = EngineThread(lambda: VllmEngine(engine_options))
        replica = Replica(engine, {name: tensor.detach() for name, tensor in model.named_parameters()})
        with (
            Measurements("pause", options.repeats) as measured,
            contextlib.closing(engine),
            asyncio.Runner() as runner,
        ):
            for mode in ("abort", "keep"):
                measured.add(figures_of(mode, updates(replica, mode, options.repeats, measured, runner)))


if __name__ == "__main__":
    main()
