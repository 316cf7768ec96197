"""One training run, from a checked configuration to a trained model in the run folder.

checks ─> run folder ─> runtime (hosts, store) ─> inputs ─> session: workers, training, model ─> all closed
                            ▲                                  │
                            └──── trainer.on_failure=restart ──┘

Processes take seconds to start and prompts take seconds to read, so the former start first. No worker does
anything before all inputs are known to be right: if one is wrong, the processes end, and no new folder stays.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from meshes.common.machine import tmp_note
from neoproto.config import RunConfig
from neoproto.errors import ConfigError
from neoproto.run.checks import check_run
from neoproto.run.console import RunConsole
from neoproto.run.environment import expected_workers
from neoproto.run.folder import completed_steps, nearest_folder, open_run_log, remove_new_folder, run_folder
from neoproto.run.resuming import ResumePoints
from neoproto.run.tracing import tracing, worker_environment
from neoproto.runtime import Runtime
from neoproto.runtime.placement import Placement
from neoproto.runtime.signals import held_signals
from neoproto.trainer.checkpoint.restarts import Restarts
from neoproto.trainer.metrics.loggers import open_services

if TYPE_CHECKING:
    from neoproto.run.trainers import Loop
    from neoproto.trainer.metrics.record import TrainingResult


def run(
    config: RunConfig, console: RunConsole | None = None, own_loop: Loop | None = None
) -> TrainingResult | None:
    """Train as `config` says.

    Args:
        own_loop: takes the place of the loop that `trainer.mode` names.

    Returns:
        What the run came down to; None if the folder's run is complete and nothing was done.

    Raises:
        ConfigError: an input is wrong; no worker process was started.
        NeoProtoError, or a worker's own exception: the run failed; everything has been closed.
    """
    console = console or RunConsole(quiet="console" not in config.trainer.logger)
    checked = check_run(config)
    before = nearest_folder(config)
    with run_folder(config) as folder, ExitStack() as stack:
        open_run_log(folder / "run.log")
        runtimes: list[Runtime] = []

        def start() -> Runtime:
            env = worker_environment(config, folder)
            return start_runtime(config, checked.placement, folder, env, console)

        if completed_steps(folder) is None:  # else there is nothing to start, unless it is to be longer now
            runtimes.append(stack.enter_context(start()))
        # An exception that a signal raises while native code is imported may be lost in there.
        with held_signals():
            # This brings torch: a second or two, for which the hosts' processes have not had to wait.
            from neoproto.run.session import RunSession, prepared_run
        try:
            prepared, given = prepared_run(checked, console, own_loop)
        except (ConfigError, KeyboardInterrupt, SystemExit):
            stack.close()  # first what writes into the folder
            remove_new_folder(folder, before)
            raise
        console.say(f"run folder: {folder}")
        points = ResumePoints(prepared, folder, given, console.stage)
        steps = points.complete()
        if steps is not None:
            more = "set a larger trainer.total_training_steps to train further"
            console.say(f"this run is complete: {steps} steps are trained, the model is in model/; {more}")
            return None
        for note in (*prepared.notes, *filter(None, [tmp_note()])):
            console.say(f"note: {note}")
        stack.enter_context(tracing(config, folder, console.say))
        services = stack.enter_context(open_services(config, folder, console.say))
        session = RunSession(prepared, checked.placement, folder, console, points, services, own_loop)

        def train(begin: Callable[[], None]) -> TrainingResult:
            runtime = runtimes.pop() if runtimes else start()
            return session.train(runtime, begin)

        return Restarts(config, points.newest, console.say).run(train)


def start_runtime(
    config: RunConfig, placement: Placement, folder: Path, env: dict[str, str], console: RunConsole
) -> Runtime:
    """Start the hosts and the store of a run or an evaluation.

    Args:
        folder: gets the logs of the processes.
        env: what all of them begin with.
    """
    settings = config.runtime.model_copy(update={"run_dir": str(folder), "env_vars": env})
    with console.stage("starting hosts and store"):
        return Runtime.from_config(
            settings, placement=placement, expected=expected_workers(config, placement)
        )
