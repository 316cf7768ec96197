"""One training run, from a checked configuration to a trained model in the run folder.

prepare ─> runtime (hosts, store) ─> worker groups ─> trainer loop ─> final model ─> everything closed
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

import torch

from meshes.applied import check_applied_job
from meshes.topology import compile_topology
from neoproto.config import RunConfig
from neoproto.config.schema import OPTIONAL_ROLES
from neoproto.errors import DeadlineExceeded, NeoProtoError, first_line
from neoproto.run.console import RunConsole
from neoproto.run.folder import make_run_folder, open_run_log
from neoproto.run.plan import show_plan
from neoproto.run.prepare import PreparedRun, prepare
from neoproto.run.prompts import RunPrompts
from neoproto.run.recipes import REGISTRY, Recipe, recipes
from neoproto.run.trainers import train
from neoproto.runtime import Runtime, WorkerGroup
from neoproto.runtime.placement import Placement
from neoproto.trainer.phases import PhaseClock
from neoproto.trainer.protocols import Workers
from neoproto.trainer.record import TrainingParts, TrainingResult, training_parts
from neoproto.trainer.tracking import JsonlTracker, TensorBoardTracker, Tracker, Trackers

log = logging.getLogger("neoproto.run")


def run(config: RunConfig, console: RunConsole | None = None) -> TrainingResult:
    """Train as `config` says.

    Raises:
        ConfigError: an input is wrong; no worker process was started.
        NeoProtoError, or a worker's own exception: the run failed; everything has been closed.
    """
    console = console or RunConsole(quiet="console" not in config.trainer.logger)
    placement, prepared = prepared_run(config, console)
    folder = make_run_folder(config)
    open_run_log(folder / "run.log")
    console.say(f"run folder: {folder}")
    for note in prepared.notes:
        console.say(f"note: {note}")
    return RunSession(prepared, placement, folder, console).train()


def dry_run(config: RunConfig, console: RunConsole | None = None) -> None:
    """Check everything that `run` would, and print what it would do.

    Raises:
        ConfigError: an input is wrong.
    """
    console = console or RunConsole()
    placement, prepared = prepared_run(config, console)
    recipes(prepared, placement)
    show_plan(prepared, placement, console)


def prepared_run(config: RunConfig, console: RunConsole) -> tuple[Placement, PreparedRun]:
    """Everything that is checked before a run folder is made."""
    placement = place(config)
    device = next(model.device_type for model in placement.models if model.worker == "rollout")
    return placement, prepare(config, device, console.stage)


def place(config: RunConfig) -> Placement:
    """Compile the topology for this machine, or for the applied job.

    Raises:
        TopologyError: with every violation.
        ConfigError: there is no such job, or its meshes are not the topology's clusters.
    """
    gpus = torch.cuda.device_count()
    current = config.runtime.monarch.job_mode == "current"
    placement = compile_topology(
        config.resolved_topology(),
        roles_needed=config.roles,
        roles_allowed=OPTIONAL_ROLES,
        device_type="gpu" if gpus else "cpu",
        local_gpus=None if current else gpus,
    )
    if current:
        check_applied_job({one.name: one.nnodes for one in placement.clusters})
    return placement


class RunSession:
    """The wiring of one run: knows everybody, does nothing of their work."""

    def __init__(
        self, prepared: PreparedRun, placement: Placement, folder: Path, console: RunConsole
    ) -> None:
        self._prepared, self._placement, self._folder, self._console = prepared, placement, folder, console
        self._config = prepared.config
        # Made before anything is started: options that contradict each other are refused here.
        self._recipes = recipes(prepared, placement)

    def train(self) -> TrainingResult:
        """Start everything, train, write the model, close everything."""
        console, config = self._console, self._config
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
            with Trackers(*self._trackers()) as trackers, console.steps(self._prepared.total_steps):
                result = train(self._parts(workers, trackers), groups[REGISTRY])
            model_dir = self._folder / "model"
            with console.stage("writing the model"):
                self._save(workers, model_dir)
            with console.stage("closing"):
                runtime.close()
        console.finish(result, self._folder, model_dir)
        return result

    def _parts(self, workers: Workers, tracker: Tracker) -> TrainingParts:
        config, prepared = self._config, self._prepared
        return training_parts(
            config,
            workers,
            RunPrompts(prepared.loader, prepared.validation, config.data.val_batch_size),
            tracker=tracker,
            show=self._console,
            run_dir=self._folder,
            total_steps=prepared.total_steps,
        )

    def _trackers(self) -> list[Tracker]:
        """`metrics.jsonl` is always written: reports and comparisons read it."""
        trackers: list[Tracker] = [JsonlTracker(self._folder / "metrics.jsonl")]
        if "tensorboard" in self._config.trainer.logger:
            trackers.append(TensorBoardTracker(self._folder / "tensorboard"))
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

    def _save(self, workers: Workers, folder: Path) -> None:
        """The policy as a Hugging Face folder."""
        timeout = self._config.trainer.timeouts.save
        asyncio.run(PhaseClock().call("save", workers.actor, "save_hf", str(folder), timeout=timeout))
