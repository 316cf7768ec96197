"""One training run, from a checked configuration to a trained model in the run folder.

prepare ─> start point ─> runtime (hosts, store) ─> worker groups ─> trainer loop ─> final model ─> all closed
                ▲                                                         │
                └───────────── trainer.on_failure=restart ────────────────┘
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

import torch

from meshes.topology import compile_topology
from neoproto.config import RunConfig
from neoproto.config.schema import OPTIONAL_ROLES
from neoproto.errors import DeadlineExceeded, NeoProtoError, first_line
from neoproto.run.console import RunConsole
from neoproto.run.folder import mark_complete, mark_incomplete, open_run_log, run_folder
from neoproto.run.prepare import PreparedRun, prepare
from neoproto.run.prompts import RunPrompts
from neoproto.run.recipes import REGISTRY, Recipe, recipes
from neoproto.run.restarts import Restarts
from neoproto.run.starting import Starts, checkpoint_at_path, open_checkpoint
from neoproto.run.trainers import train
from neoproto.runtime import Runtime, WorkerGroup
from neoproto.runtime.placement import Placement
from neoproto.trainer.history import METRICS, PROMPTS, PromptLog
from neoproto.trainer.phases import PhaseClock
from neoproto.trainer.protocols import Workers
from neoproto.trainer.record import TrainingParts, TrainingResult, training_parts
from neoproto.trainer.resume import StartPoint
from neoproto.trainer.tasks import together
from neoproto.trainer.tracking import JsonlTracker, TensorBoardTracker, Tracker, Trackers

log = logging.getLogger("neoproto.run")


def run(config: RunConfig, console: RunConsole | None = None) -> TrainingResult | None:
    """Train as `config` says.

    Returns:
        What the run came down to; None if the folder's run is complete and nothing was done.

    Raises:
        ConfigError: an input is wrong; no worker process was started.
        NeoProtoError, or a worker's own exception: the run failed; everything has been closed.
    """
    console = console or RunConsole(quiet="console" not in config.trainer.logger)
    placement = place(config)
    device = next(model.device_type for model in placement.models if model.worker == "rollout")
    prepared = prepare(config, device, console.stage)
    found = checkpoint_at_path(config)  # before there is a folder: what is wrong with it leaves none
    given = None if found is None else open_checkpoint(found, prepared, console.stage)
    with run_folder(config) as folder:
        open_run_log(folder / "run.log")
        console.say(f"run folder: {folder}")
        starts = Starts(prepared, folder, given, console.stage)
        steps = starts.complete()
        if steps is not None:
            more = "a larger trainer.total_training_steps trains on"
            console.say(f"this run is complete: {steps} steps are trained, the model is in model/; {more}")
            return None
        for note in prepared.notes:
            console.say(f"note: {note}")
        session = RunSession(prepared, placement, folder, console, starts)
        return Restarts(config, starts.newest, console.say).run(session.train)


def place(config: RunConfig) -> Placement:
    """Compile the topology for this machine.

    Raises:
        TopologyError: with every violation.
    """
    gpus = torch.cuda.device_count()
    return compile_topology(
        config.resolved_topology(),
        roles_needed=config.roles,
        roles_allowed=OPTIONAL_ROLES,
        device_type="gpu" if gpus else "cpu",
        local_gpus=gpus if config.runtime.monarch.job_mode == "process" else None,
    )


class RunSession:
    """The wiring of one run: knows everybody, does nothing of their work."""

    def __init__(
        self,
        prepared: PreparedRun,
        placement: Placement,
        folder: Path,
        console: RunConsole,
        starts: Starts,
    ) -> None:
        self._prepared, self._placement, self._folder, self._console = prepared, placement, folder, console
        self._config, self._starts = prepared.config, starts
        # Made before anything is started: options that contradict each other are refused here.
        self._recipes = recipes(prepared, placement)

    def train(self, begin: Callable[[], None]) -> TrainingResult:
        """Start everything, train, write the model, close everything. It may be called again.

        Args:
            begin: called when training begins.
        """
        console, config = self._console, self._config
        start = self._starts.next()
        if (told := self._starts.told(start)) is not None:
            console.say(f"note: {told}")
        settings = {
            "runtime": config.runtime.model_copy(update={"run_dir": str(self._folder)}),
            "topology": config.resolved_topology(),
        }
        with console.stage("starting hosts and store"):
            runtime = Runtime.from_config(settings, placement=self._placement)
        with runtime:
            console.table(runtime.placement_table())
            with console.stage("starting workers"):
                groups = self._start_groups(runtime)
                workers = self._attached(groups)
            if start.folder is not None:
                with console.stage("loading the checkpoint"):
                    self._load(workers, start)
            begin()
            mark_incomplete(self._folder)
            self._starts.cut(start)
            with Trackers(*self._trackers(start)) as trackers, console.steps(self._prepared.total_steps):
                result = train(self._parts(workers, trackers, start), groups[REGISTRY])
            model_dir = self._folder / "model"
            with console.stage("writing the model"):
                self._save(workers, model_dir)
            mark_complete(self._folder, self._prepared.total_steps)
            with console.stage("closing"):
                runtime.close()
        console.finish(result, self._folder, model_dir)
        return result

    def _parts(self, workers: Workers, tracker: Tracker, start: StartPoint) -> TrainingParts:
        config, prepared = self._config, self._prepared
        return training_parts(
            config,
            workers,
            RunPrompts(prepared.loader, prepared.validation, config.data.val_batch_size),
            tracker=tracker,
            show=self._console,
            run_dir=self._folder,
            total_steps=prepared.total_steps,
            start=start,
            checkpoints=self._starts.checkpoints,
            prompt_log=PromptLog(self._folder / PROMPTS),
        )

    def _trackers(self, start: StartPoint) -> list[Tracker]:
        """`metrics.jsonl` is always written: reports and comparisons read it."""
        trackers: list[Tracker] = [JsonlTracker(self._folder / METRICS)]
        if "tensorboard" in self._config.trainer.logger:
            trackers.append(TensorBoardTracker(self._folder / "tensorboard", start.step))
        return trackers

    def _start_groups(self, runtime: Runtime) -> Mapping[str, WorkerGroup]:
        """By role. All groups at once: most of a start is imports and vLLM's own set-up."""
        timeout = self._config.trainer.timeouts.start

        def start(recipe: Recipe) -> WorkerGroup:
            pool = (
                runtime.create_resource_pool(on="controller", name=recipe.name)
                if recipe.model is None
                else runtime.model_resource_pool(recipe.model)
            )
            return runtime.create_worker_group(recipe.workers, on=pool, name=recipe.name, timeout=timeout)

        threads = ThreadPoolExecutor(len(self._recipes), thread_name_prefix="start-workers")
        try:
            futures = {recipe.role: threads.submit(start, recipe) for recipe in self._recipes}
            for future in as_completed(futures.values()):
                future.result()  # the first failure, whoever else is still starting
        except DeadlineExceeded as error:
            more = f"trainer.timeouts.start={timeout:g} is how long workers may take to start"
            raise NeoProtoError(f"{first_line(error)}; {more}") from error
        finally:
            # After a failure or a signal nobody is waited for: closing the runtime ends what still starts.
            threads.shutdown(wait=False, cancel_futures=True)
        return {role: future.result() for role, future in futures.items()}

    def _attached(self, groups: Mapping[str, WorkerGroup]) -> Workers:
        """Tell those who publish and pull weights where the registry is."""
        limit = self._config.trainer.timeouts.weights
        calls = [
            groups[role].submit("attach_registry", (groups[REGISTRY],), timeout=limit)
            for role in ("actor", "rollout")
        ]
        for call in calls:
            call.result()
        return Workers(
            num_devices=self._placement.num_devices,
            rollout=groups["rollout"],
            reward=groups["reward"],
            actor=groups["actor"],
            critic=groups.get("critic"),
            reference=groups.get("reference"),
        )

    def _load(self, workers: Workers, start: StartPoint) -> None:
        """Have policy and critic go on from the checkpoint."""
        assert start.folder is not None
        assert start.state is not None
        limit = self._config.trainer.timeouts.checkpoint
        groups = {"actor": workers.actor, "critic": workers.critic}
        clock, calls = PhaseClock(), []
        for role, group in groups.items():
            if group is None:
                continue
            saved = start.state.ranks[role]
            if saved != group.world_size:
                self._console.say(
                    f"note: the checkpoint of {role} is of {saved} ranks, there are {group.world_size} now: "
                    "weights and optimizer are dealt anew, random generators are seeded anew"
                )
            folder = str(start.folder / role)
            calls.append(clock.call("load", group, "load_checkpoint", folder, timeout=limit))
        asyncio.run(together(*calls))

    def _save(self, workers: Workers, folder: Path) -> None:
        """The policy as a Hugging Face folder."""
        timeout = self._config.trainer.timeouts.save
        asyncio.run(PhaseClock().call("save", workers.actor, "save_hf", str(folder), timeout=timeout))
