"""The session of a run: its inputs, and its worker groups, trainer loop and model on a runtime.

launch.py ─> prepare ─> start point ─> worker groups ─> trainer loop ─> final model ─> all closed
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from meshes.common.machine import tmp_note
from neoproto.config import RunConfig
from neoproto.run.checks import CheckedRun, check_run
from neoproto.run.console import RunConsole
from neoproto.run.folder import MODEL, check_folder, earlier_date, mark_complete, mark_incomplete
from neoproto.run.groups import REGISTRY, GroupSpec, run_groups, start_group, start_groups
from neoproto.run.handles import CriticHandle, PolicyHandle, ReferenceHandle, RewardHandle, TrainedHandle
from neoproto.run.plan import check_shared_memory, show_plan
from neoproto.run.prepare import PreparedRun, prepare
from neoproto.run.prompts import RunPrompts
from neoproto.run.resuming import Opened, ResumePoints, open_checkpoint
from neoproto.run.rollout import start_replica, supervised
from neoproto.run.trainers import Loop, loop_code, train
from neoproto.runtime import RemoteCall, Runtime, WorkerGroup
from neoproto.runtime.failures import ProcessFailure
from neoproto.runtime.placement import Placement
from neoproto.trainer.checkpoint.history import METRICS, PROMPTS, SAMPLES, PromptLog
from neoproto.trainer.checkpoint.resume import StartPoint
from neoproto.trainer.metrics.loggers import Services
from neoproto.trainer.metrics.phases import PhaseClock
from neoproto.trainer.metrics.record import TrainingParts, TrainingResult, training_parts
from neoproto.trainer.metrics.samples import SampleLog
from neoproto.trainer.metrics.tracking import JsonlTracker, TensorBoardTracker, Tracker, Trackers
from neoproto.trainer.protocols import Workers
from neoproto.trainer.replicas import ReplicaSet
from neoproto.trainer.supervision import Supervisor

log = logging.getLogger("neoproto.run")


def dry_run(config: RunConfig, console: RunConsole | None = None, own_loop: Loop | None = None) -> None:
    """Check everything that a run would, and print what it would do.

    Raises:
        ConfigError: an input is wrong.
    """
    console = console or RunConsole()
    checked = check_run(config)
    prepared, given = prepared_run(checked, console, own_loop)
    run_groups(prepared, checked.placement)
    if (folder := check_folder(config)) is not None:
        points = ResumePoints(prepared, folder, given, console.stage)
        if points.complete() is None:
            points.open()
    show_plan(prepared, checked.placement, console)
    if (note := tmp_note()) is not None:
        console.say(f"note: {note}")


def prepared_run(
    checked: CheckedRun, console: RunConsole, own_loop: Loop | None = None
) -> tuple[PreparedRun, Opened | None]:
    """Read and check the inputs of a run; with the checkpoint of elsewhere, if it is to start from one.

    Raises:
        ConfigError: an input is wrong.
    """
    config, found = checked.config, checked.elsewhere
    device = next(model.device_type for model in checked.placement.models if model.worker == "rollout")
    prepared = prepare(config, device, console.stage, lambda: earlier_date(config, found))
    prepared = replace(prepared, loop=loop_code(own_loop))
    if config.runtime.hosts_are_here:
        check_shared_memory(config, prepared.model_dir, console)
    return prepared, None if found is None else open_checkpoint(found, prepared, console.stage)


@dataclass(frozen=True, kw_only=True, slots=True)
class RunWorkers:
    """The processes of one start of a run.

    Attributes:
        groups: by role, rollout's replicas apart.
        supervisor: keeps the replicas alive while it runs.
        workers: what the trainer sees of them all.
    """

    groups: Mapping[str, WorkerGroup]
    replicas: ReplicaSet
    supervisor: Supervisor
    workers: Workers

    def process_failure(self, runtime: Runtime) -> ProcessFailure:
        """Fails when a process dies that nobody replaces."""
        return runtime.watch_failures([group.name for group in self.groups.values()])


class RunSession:
    """The wiring of one run: knows everybody, does nothing of their work."""

    def __init__(
        self,
        prepared: PreparedRun,
        placement: Placement,
        folder: Path,
        console: RunConsole,
        points: ResumePoints,
        services: Services,
        own_loop: Loop | None = None,
    ) -> None:
        self._prepared, self._placement, self._folder, self._console = prepared, placement, folder, console
        self._config, self._points, self._services = prepared.config, points, services
        self._own_loop = own_loop
        # Made before a worker is started: options that contradict each other are refused here.
        self._specs = run_groups(prepared, placement)
        self.starting: list[Future[WorkerGroup]] = []
        """The groups of the newest start, to be released if it fails."""

    def train(self, runtime: Runtime, begin: Callable[[], None]) -> TrainingResult:
        """Start the workers, train, write the model, close everything. It may be called again.

        Args:
            runtime: it is closed at the end, whatever that is.
            begin: called when training begins.
        """
        console = self._console
        with runtime:
            start = self._points.next()
            if (note := self._points.describe(start)) is not None:
                console.say(f"note: {note}")
            console.table(runtime.placement_table())
            started = self.start_workers(runtime, start)
            begin()
            self.mark_begun(start)
            with self.trackers(start) as trackers, console.steps(self._prepared.total_steps):
                parts = self.parts(started, trackers, start)
                result = train(
                    parts,
                    started.replicas,
                    started.supervisor,
                    started.process_failure(runtime),
                    self._own_loop,
                )
            model_dir = self._folder / MODEL
            with console.stage("writing the model"):
                asyncio.run(self.save(started.workers, model_dir))
            mark_complete(self._folder, self._prepared.total_steps)
            with console.stage("closing"):
                runtime.close()
        console.finish(result, self._folder, model_dir)
        return result

    def start_workers(self, runtime: Runtime, start: StartPoint) -> RunWorkers:
        """Start all processes, and have policy and critic go on from the checkpoint, if it is one; blocks."""
        with self._console.stage("starting workers"):
            groups, started = self._start_groups(runtime)
            replicas, supervisor = supervised(
                runtime, self._spec("rollout"), started, groups[REGISTRY], self._config, self._console.say
            )
            workers = self._attached(groups, replicas)
        if start.folder is not None:
            with self._console.stage("loading the checkpoint"):
                self._load(groups, start)
        return RunWorkers(groups=groups, replicas=replicas, supervisor=supervisor, workers=workers)

    def mark_begun(self, start: StartPoint) -> None:
        """Training begins: from now on the folder's run is not complete, and has nothing after `start`."""
        mark_incomplete(self._folder)
        self._services.begin(start.step)
        self._points.cut(start)

    def parts(self, started: RunWorkers, tracker: Tracker, start: StartPoint) -> TrainingParts:
        """What the trainer is handed."""
        config, prepared = self._config, self._prepared
        return training_parts(
            config,
            started.workers,
            RunPrompts(prepared.loader, prepared.validation, config.data.val_batch_size),
            tracker=tracker,
            show=self._console,
            run_dir=self._folder,
            total_steps=prepared.total_steps,
            gauges=started.replicas.metrics,
            start=start,
            checkpoints=self._points.checkpoints,
            prompt_log=PromptLog(self._folder / PROMPTS),
            sample_log=SampleLog(self._folder / SAMPLES if config.trainer.log_samples else None),
            loop=prepared.loop,
        )

    def trackers(self, start: StartPoint) -> Trackers:
        """`metrics.jsonl` is always written: reports and comparisons read it."""
        trackers: list[Tracker] = [JsonlTracker(self._folder / METRICS), self._services]
        if "tensorboard" in self._config.trainer.logger:
            trackers.append(TensorBoardTracker(self._folder / "tensorboard", start.step))
        return Trackers(*trackers)

    def _spec(self, role: str) -> GroupSpec:
        return next(spec for spec in self._specs if spec.role == role)

    def _start_groups(self, runtime: Runtime) -> tuple[Mapping[str, WorkerGroup], Sequence[WorkerGroup]]:
        """The groups by role, rollout's apart, and the replicas of rollout, a group of one process each."""
        timeout = self._config.trainer.timeouts.start
        rollout = self._spec("rollout")
        others = [spec for spec in self._specs if spec is not rollout]
        count = next(model for model in self._placement.models if model.worker == "rollout").world_size
        started = start_groups(
            [
                *(partial(start_replica, runtime, rollout, index, timeout) for index in range(count)),
                *(partial(start_group, runtime, spec, timeout) for spec in others),
            ],
            runtime.watch_failures([spec.name for spec in self._specs]),
            timeout,
            self.starting,
        )
        by_role = zip((spec.role for spec in others), started[count:], strict=True)
        return dict(by_role), started[:count]

    def _attached(self, groups: Mapping[str, WorkerGroup], replicas: ReplicaSet) -> Workers:
        """Tell the policy, which publishes weights, where the registry is; replicas learn it later."""
        limit = self._config.trainer.timeouts.weights
        policy = PolicyHandle(groups["actor"])
        policy.within(limit).attach_registry(groups[REGISTRY]).result()
        return Workers(
            num_devices=self._placement.num_devices,
            rollout=replicas,
            reward=RewardHandle(groups["reward"]),
            actor=policy,
            critic=CriticHandle(groups["critic"]) if "critic" in groups else None,
            reference=ReferenceHandle(groups["reference"]) if "reference" in groups else None,
        )

    def _load(self, groups: Mapping[str, WorkerGroup], start: StartPoint) -> None:
        """Have policy and critic go on from the checkpoint."""
        assert start.folder is not None
        assert start.state is not None
        limit = self._config.trainer.timeouts.checkpoint
        calls = []
        for role, group in ((role, groups[role]) for role in ("actor", "critic") if role in groups):
            saved = start.state.ranks[role]
            if saved != group.world_size:
                self._console.say(
                    f"note: the checkpoint of {role} is of {saved} ranks, there are {group.world_size} now: "
                    "weights and optimizer are divided again, random generators are seeded again"
                )
            calls.append(TrainedHandle(group).within(limit).load_checkpoint(str(start.folder / role)))
        with PhaseClock().phase("load", "wait"):
            RemoteCall.gather(calls).result()

    async def save(self, workers: Workers, folder: Path) -> None:
        """Write the policy as a Hugging Face folder."""
        timeout = self._config.trainer.timeouts.save
        await PhaseClock().wait("save", workers.actor.within(timeout).save_hf(str(folder)))
