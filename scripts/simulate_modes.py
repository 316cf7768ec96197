"""The three trainer modes on simulated workers: speed, staleness of samples, what the controller costs.

    python scripts/simulate_modes.py [--replicas 1,4,16,64,256] [--repeats 5] [--warmup-batches 3] …

The trainers, the prompt queue, the dispatcher, the replay buffer, the weight registry and the update agents
are those of a real run; generation, training and weight traffic are waits on a virtual clock. The last line
is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from _bench import Figure, Measurements, first_of, positive
from _simulated_rollout import SimulatedGroup, SimulatedReplica, Times, Trainee, score
from _virtual_time import VirtualLoop

from neoproto.config import RunConfig, load_config
from neoproto.data import DataProto
from neoproto.run.process import collect_garbage_rarely
from neoproto.store import MemoryStore, use_store
from neoproto.trainer.asynchronous import AsyncTrainer
from neoproto.trainer.metrics.record import StepReport, TrainingParts, training_parts
from neoproto.trainer.protocols import Workers
from neoproto.trainer.sync import SyncTrainer
from neoproto.trainer.tasks import beside
from neoproto.weights import WeightRegistry, WeightVersion
from neoproto.weights.options import UpdateOptions

MODES = ("sync", "separate_async", "decoupled_async")
OFF_POLICY = "training/off_policy"
SKIPPED = 3
"""Steps at either end that are not measured: rollout starts empty and runs dry."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Setup:
    """One simulated run.

    Attributes:
        prompts: of a training step.
        slots: prompts that one replica generates at a time.
        steps: training steps, those that are not measured included.
        per_call: prompts of one call to a replica.
    """

    mode: str
    replicas: int = 8
    prompts: int = 512
    slots: int = 64
    steps: int = 12
    times: Times = field(default_factory=Times)
    warmup_batches: int = 3
    threshold: int = 4
    min_version_lag: int = 1
    prompt_version_lag: int = 0
    per_call: int = 2
    seed: int = 0

    @property
    def training_bound(self) -> float:
        """Seconds a step that training takes."""
        return self.times.train

    @property
    def generation_bound(self) -> float:
        """Seconds a step that generation takes with every slot always full and no load."""
        return self.prompts * self.times.mean_generate / (self.replicas * self.slots)

    @property
    def bound(self) -> float:
        """No asynchronous trainer makes shorter steps: the slower of the two."""
        return max(self.training_bound, self.generation_bound)


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What a simulated run came down to, over the measured steps.

    Attributes:
        step_s: virtual seconds a step.
        prompts_per_s: trained on, by virtual time.
        training_idle, rollout_idle: shares of the time in which the policy's devices, and the replicas'
            slots, did not work.
        staleness, staleness_max, spans: see `training/off_policy/*`; means of steps, and the most.
        evicted: share of the generated groups.
        controller_cpu_s: real seconds a step that trainer, queue, dispatcher and buffer computed.
    """

    step_s: float
    prompts_per_s: float
    training_idle: float
    rollout_idle: float
    staleness: float
    staleness_max: float
    spans: float
    evicted: float
    controller_cpu_s: float

    def rounded(self) -> dict[str, float]:
        return {name: round(value, 4) for name, value in dataclasses.asdict(self).items()}


class Prompts:
    """A `PromptSource` without end."""

    has_validation = False
    steps_per_epoch = 1_000_000

    def __init__(self, size: int) -> None:
        self._size, self._drawn = size, 0

    def next_batch(self) -> DataProto:
        numbers = range(self._drawn, self._drawn + self._size)
        self._drawn += self._size
        return DataProto.from_dict(
            tensors={"prompts": torch.tensor(numbers)[:, None]},
            non_tensors={"uid": np.array([f"p{number}" for number in numbers], dtype=object)},
        )

    def state_dict(self) -> dict[str, Any]:
        return {"drawn": self._drawn}

    def validation_batches(self) -> Iterator[DataProto]:
        return iter(())


@dataclass(frozen=True, kw_only=True, slots=True)
class _Mark:
    """The end of a step."""

    now: float
    cpu: float
    trained: float
    generated: float
    metrics: Mapping[str, float]


class Place:
    """A replica as the dispatcher sees it; it never fails."""

    up = True

    def __init__(self, rollout: SimulatedGroup, rank: int, replica: SimulatedReplica) -> None:
        self.name, self._process = replica.name, rollout.rank(rank).handle()

    async def generate(self, prompts: DataProto, timeout: float) -> DataProto:
        batch: DataProto = await self._process.within(timeout).generate_sequences(prompts)
        return batch


class Simulation:
    """The workers of one run, and who listens to its trainer."""

    def __init__(self, setup: Setup, loop: VirtualLoop) -> None:
        self._setup, self._loop = setup, loop
        self._registry = WeightRegistry()
        self._trainee = Trainee(self._registry, setup.times, num_slots=3)
        self._replicas = [
            SimulatedReplica(
                self._registry,
                f"rollout-{rank}",
                slots=setup.slots,
                times=setup.times,
                driven=setup.mode != "decoupled_async",
                options=UpdateOptions(min_version_lag=setup.min_version_lag, drain_timeout=0.0),
                seed=setup.seed,
            )
            for rank in range(setup.replicas)
        ]
        self._rollout = SimulatedGroup(
            "rollout",
            {"generate_sequences": self._generate, "update_weights": self._update_weights},
            ranks=[{"generate_sequences": replica.generate} for replica in self._replicas],
        )
        self._marks: list[_Mark] = []

    # -- the tracker and the console of the run -----------------------------------------------------------

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self._marks.append(
            _Mark(
                now=self._loop.now,
                cpu=self._loop.cpu["controller"],
                trained=self._trainee.busy,
                generated=sum(replica.engine.busy for replica in self._replicas),
                metrics=dict(metrics),
            )
        )

    def close(self) -> None: ...

    def step(self, report: StepReport) -> None: ...

    def validation(self, step: int, metrics: Mapping[str, float]) -> None: ...

    # -- the run ------------------------------------------------------------------------------------------

    async def run(self) -> Outcome:
        """Train, and sum up."""
        setup, parts = self._setup, self._parts()
        if setup.mode == "sync":
            await SyncTrainer(parts).run()
            return self._outcome()
        places = [Place(self._rollout, rank, simulated) for rank, simulated in enumerate(self._replicas)]
        agents: dict[str, asyncio.Task[Any]] = {}
        if setup.mode == "decoupled_async":
            agents = {
                f"the update agent of {simulated.name}": self._loop.on("rollout", simulated.agent.run())
                for simulated in self._replicas
            }
        await beside(AsyncTrainer(parts, self._registry, places).run(), agents)
        return self._outcome()

    def _parts(self) -> TrainingParts:
        trainee = self._trainee
        workers = Workers(
            num_devices=2 * self._setup.replicas,
            rollout=self._rollout.handle(),
            reward=SimulatedGroup("reward", {"compute_score": score}).handle(),
            actor=SimulatedGroup(
                "actor",
                {
                    "compute_log_prob": trainee.compute_log_prob,
                    "update_actor": trainee.update_actor,
                    "publish_weights": trainee.publish_weights,
                },
                serial=True,
            ).handle(),
        )
        return training_parts(
            run_config(self._setup),
            workers,
            Prompts(self._setup.prompts),
            tracker=self,
            show=self,
            run_dir=Path(),
            total_steps=self._setup.steps,
        )

    async def _generate(self, prompts: DataProto) -> DataProto:
        """A whole batch, spread over the replicas."""
        size = -(-len(prompts) // len(self._replicas))
        shares = zip(self._replicas, prompts.split(size), strict=False)
        parts = await asyncio.gather(*(replica.generate(share) for replica, share in shares))
        return DataProto.concat(parts)

    async def _update_weights(self, version: WeightVersion) -> None:
        await asyncio.gather(*(replica.agent.load(version) for replica in self._replicas))

    def _outcome(self) -> Outcome:
        setup, marks = self._setup, self._marks
        first, last = marks[SKIPPED - 1], marks[-1 - SKIPPED]
        measured = marks[SKIPPED : len(marks) - SKIPPED]
        seconds, steps = last.now - first.now, len(measured)
        slots = setup.replicas * setup.slots
        dropped = sum(mark.metrics.get(f"{OFF_POLICY}/evicted_samples/stale", 0.0) for mark in measured)

        def of(name: str) -> list[float]:
            return [mark.metrics.get(f"{OFF_POLICY}/{name}", 0.0) for mark in measured]

        return Outcome(
            step_s=seconds / steps,
            prompts_per_s=setup.prompts * steps / seconds,
            training_idle=1 - (last.trained - first.trained) / seconds,
            rollout_idle=1 - (last.generated - first.generated) / (seconds * slots),
            staleness=statistics.mean(of("trajectory_staleness/mean")),
            staleness_max=max(of("trajectory_staleness/max")),
            spans=statistics.mean(of("trajectory_spans/mean")),
            evicted=dropped / (dropped + setup.prompts * steps),
            controller_cpu_s=(last.cpu - first.cpu) / steps,
        )


def run_config(setup: Setup) -> RunConfig:
    """The configuration of a run with one sample a prompt and no critic."""
    trainer: dict[str, Any] = {
        "mode": setup.mode,
        "timeouts": {"generate": 600.0, "weights": 600.0},
        "replay_buffer": {"max_off_policy_threshold": setup.threshold},
    }
    if setup.mode != "sync":
        trainer[setup.mode] = {
            "num_warmup_batches": setup.warmup_batches,
            "dispatch_batch_size": setup.per_call,
            "dispatch_poll_interval": 0.1,
        }
    if setup.mode == "decoupled_async":
        trainer[setup.mode] |= {
            "min_version_lag": setup.min_version_lag,
            "prompt_version_lag": setup.prompt_version_lag,
        }
    return load_config(
        {
            # The task is not asked for anything; its size only has to be enough for a batch.
            "data": {"train_batch_size": setup.prompts, "task": {"size": setup.prompts}},
            "actor_rollout_ref": {"actor": {"ppo_mini_batch_size": setup.prompts}},
            "algorithm": {"adv_estimator": "reinforce_plus_plus"},
            "trainer": trainer,
        }
    )


def simulate(setup: Setup) -> Outcome:
    """Run one setup on a loop and a store of its own."""
    store = MemoryStore()
    with asyncio.Runner(loop_factory=VirtualLoop) as runner, use_store(store):
        loop = runner.get_loop()
        assert isinstance(loop, VirtualLoop)

        async def run() -> Outcome:
            return await Simulation(setup, loop).run()

        outcome = runner.run(run())
    store.close()
    return outcome


def base_figures(outcomes: Mapping[str, Sequence[Outcome]], bound: float) -> list[Figure]:
    """The base case: one set of figures a mode, and the goal."""
    figures = [Figure(name="bound", value=bound, unit="s/step")]
    for mode, runs in outcomes.items():
        detail = {"runs": [run.rounded() for run in runs]}
        for name, unit in (
            ("step_s", "s/step"),
            ("prompts_per_s", "1/s"),
            ("training_idle", "share"),
            ("rollout_idle", "share"),
            ("staleness", "versions"),
            ("evicted", "share"),
            ("controller_cpu_s", "s/step"),
        ):
            value = statistics.median(getattr(run, name) for run in runs)
            figures.append(
                Figure(
                    name=f"{mode}/{name}", value=value, unit=unit, detail=detail if name == "step_s" else {}
                )
            )
    decoupled = statistics.median(run.step_s for run in outcomes["decoupled_async"])
    separate = statistics.median(run.step_s for run in outcomes["separate_async"])
    return [
        *figures,
        Figure(name="decoupled_vs_bound", value=decoupled / bound, unit="ratio", goal="<= 1.1"),
        Figure(name="separate_vs_decoupled", value=separate / decoupled, unit="ratio"),
    ]


def scaling_figures(
    outcomes: Mapping[int, Mapping[str, Outcome]], bounds: Mapping[int, float]
) -> list[Figure]:
    """How the modes and the controller's cost change with the number of replicas, prompts growing alike."""
    figures = []
    for replicas, by_mode in outcomes.items():
        for mode, outcome in by_mode.items():
            figures.append(
                Figure(
                    name=f"{mode}/{replicas}_replicas",
                    value=outcome.step_s / bounds[replicas],
                    unit="of bound",
                    detail=outcome.rounded(),
                )
            )
    cost = {
        replicas: by_mode["decoupled_async"].controller_cpu_s / replicas
        for replicas, by_mode in outcomes.items()
    }
    fewest, most = min(cost), max(cost)
    growth = Figure(
        name=f"controller_cpu_a_replica_{fewest}_to_{most}",
        value=cost[most] / cost[fewest],
        unit="ratio",
        goal="<= 1.1",
        detail={"s_a_step_and_replica": {str(replicas): round(value, 6) for replicas, value in cost.items()}},
    )
    return [*figures, growth]


def setup_of(options: argparse.Namespace, mode: str, *, replicas: int, prompts: int, seed: int = 0) -> Setup:
    times = Times(**{name: getattr(options, name) for name in Times.__dataclass_fields__})
    return Setup(
        mode=mode,
        replicas=replicas,
        prompts=prompts,
        slots=options.slots,
        steps=options.steps,
        times=times,
        warmup_batches=options.warmup_batches,
        threshold=options.threshold,
        min_version_lag=options.min_version_lag,
        prompt_version_lag=options.prompt_version_lag,
        per_call=options.per_call,
        seed=seed,
    )


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=positive, default=5, help="base case with so many seeds")
    parser.add_argument("--base-replicas", type=int, default=8)
    parser.add_argument("--prompts", type=int, default=512, help="of a step, with that many replicas")
    parser.add_argument("--replicas", default="1,4,16,64,256", help="scaling, prompts growing alike")
    parser.add_argument("--slots", type=int, default=64, help="prompts that one replica generates at a time")
    parser.add_argument("--steps", type=int, default=12, help=f"{SKIPPED} at either end are not measured")
    parser.add_argument("--warmup-batches", type=int, default=3)
    parser.add_argument("--threshold", type=int, default=4, help="max_off_policy_threshold")
    parser.add_argument("--min-version-lag", type=int, default=1)
    parser.add_argument("--prompt-version-lag", type=int, default=0)
    parser.add_argument("--per-call", type=int, default=2, help="dispatch_batch_size")
    for name, spec in Times.__dataclass_fields__.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=float, default=spec.default)
    return parser.parse_args(given)


def main(given: Sequence[str] | None = None) -> None:
    options = arguments(given)
    torch.set_num_threads(1)  # what the controller computes is measured on its thread
    collect_garbage_rarely()  # as the command does
    base: dict[str, list[Outcome]] = {mode: [] for mode in MODES}
    bound = setup_of(options, MODES[0], replicas=options.base_replicas, prompts=options.prompts).bound
    scaled: dict[int, dict[str, Outcome]] = {}
    bounds: dict[int, float] = {}
    counts = [*map(int, options.replicas.split(","))]

    def base_case(seed: int) -> None:
        for mode in MODES:
            setup = setup_of(
                options, mode, replicas=options.base_replicas, prompts=options.prompts, seed=seed
            )
            base[mode].append(simulate(setup))

    def more_replicas(turn: int) -> None:
        replicas = counts[turn]
        prompts = options.prompts * replicas // options.base_replicas
        setups = {mode: setup_of(options, mode, replicas=replicas, prompts=prompts) for mode in MODES}
        scaled[replicas] = {mode: simulate(setup) for mode, setup in setups.items()}
        bounds[replicas] = setups[MODES[0]].bound
        print(f"{replicas} replicas: {scaled[replicas]['decoupled_async'].rounded()}", flush=True)

    with Measurements("simulate_modes", options.repeats) as measured:
        done = measured.repeat(options.repeats, base_case)
        measured.add(base_figures(first_of(done, base), bound))
        measured.repeat(len(counts), more_replicas)
        measured.add(scaling_figures(scaled, bounds))


if __name__ == "__main__":
    main()
