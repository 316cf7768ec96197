"""Training by hand: the steps of a run, taken one at a time from a notebook or a script.

config = compose_run("ppo_monarch", ["+smoke=tiny"])
runtime = Runtime.from_config(config)
trainer = InteractiveTrainer(config, runtime)     # workers, first weights
done = await trainer.step()                       # or trainer.step().result()
done.metrics["critic/score/mean"], done.batch
trainer.close()                                   # its workers; the runtime stays open
runtime.close()
"""

from __future__ import annotations

import threading
import warnings
import weakref
from collections.abc import Callable, Coroutine, Iterator, Mapping
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self, cast

from rich.console import Console

from neoproto.config import RunConfig
from neoproto.data import DataProto
from neoproto.errors import ConfigError
from neoproto.files import user_path
from neoproto.run.checks import check_run
from neoproto.run.console import PLAIN_WIDTH, RunConsole
from neoproto.run.folder import close_run_log, open_run_log, run_folder
from neoproto.run.resuming import ResumePoints
from neoproto.run.session import RunSession, RunWorkers, prepared_run
from neoproto.run.stepping import Order, StepThread
from neoproto.run.trainers import no_process_failure
from neoproto.runtime import Runtime, WorkerGroup
from neoproto.stack import check_stack
from neoproto.tables import table_html
from neoproto.trainer.metrics.loggers import open_services
from neoproto.trainer.metrics.record import StepReport
from neoproto.trainer.sync import SyncSteps, release

DRAIN_S, RELEASE_S = 1.0, 10.0
"""How long workers may finish their calls, and how long releasing them may take."""
RUNTIME_CLOSES_S = 5.0
"""How long a checkpoint that is being written is waited for when the runtime closes."""

_live: weakref.WeakSet[Runtime] = weakref.WeakSet()
"""Runtimes that have a trainer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepDone:
    """A finished training step.

    Attributes:
        step, total_steps: its number, from 1, and how many the configuration has.
        metrics: what `metrics.jsonl` has of it.
        batch: what it trained on, as references into the store, `response_text` among the columns. It can be
            read until the next step has ended; `batch.inline()` is a copy that stays.
    """

    step: int
    total_steps: int
    metrics: Mapping[str, float]
    batch: DataProto

    def _repr_html_(self) -> str:
        rows = [(name, f"{value:.4g}") for name, value in sorted(self.metrics.items()) if _is_shown(name)]
        return table_html(f"step {self.step} of {self.total_steps}", (), rows)


class InteractiveTrainer:
    """The workers of a `sync` run on a runtime, and its steps when they are asked for.

    What is ordered is done on a thread of its own, in order. `await trainer.step()` and
    `trainer.step().result()` wait for it; where such a wait is interrupted, the step continues.

    The run folder is the runtime's, and is written as a run's is (metrics, validation samples, checkpoints
    when they are due): reports read it, and a later trainer in the same `runtime.run_dir` resumes from its
    newest checkpoint. A failed step, or the death of a process that is not replaced, ends the trainer; the
    runtime stays open.

    Attributes:
        config: as given.
    """

    def __init__(self, config: RunConfig, runtime: Runtime) -> None:
        """Check everything, start the workers, have them serve the first weights. Blocks until then.

        Raises:
            ConfigError: an input is wrong, or cannot be had step by step; nothing was started.
            RuntimeError: the runtime has a trainer.
            NeoProtoError, or a worker's own exception: the start failed; its workers are released.
        """
        self.config, self._runtime = config, runtime
        self._console = _Console()
        self._lock = threading.Lock()
        self._kept: tuple[DataProto, DataProto] | None = None
        self._run_workers: RunWorkers | None = None
        with ExitStack() as stack:
            stack.enter_context(_only_trainer(runtime))
            check_stack()
            check_stepwise(config)
            self._start(stack)
            self._thread.began.result()
            runtime.before_close(self._runtime_closes)
            self._resources = stack.pop_all()

    def _start(self, stack: ExitStack) -> None:
        """Open everything; the stack holds what has to be closed."""
        runtime, console = self._runtime, self._console
        here = self.config.runtime.model_copy(update={"run_dir": str(runtime.run_dir)})
        config = self.config.model_copy(update={"runtime": here})
        with warnings.catch_warnings():
            # Of transformers' tqdm, which misses a package for progress bars in notebooks; none is shown.
            warnings.filterwarnings("ignore", message="IProgress not found")
            checked = check_run(config)
            prepared, given = prepared_run(checked, console)
        if runtime.placement != checked.placement:
            raise ConfigError(
                "topology: the runtime was made with another one; Runtime.from_config(config) takes this one"
            )
        for note in prepared.notes:
            console.say(f"note: {note}")
        folder = stack.enter_context(run_folder(config))
        stack.callback(close_run_log, open_run_log(folder / "run.log"))
        services = stack.enter_context(open_services(config, folder, console.say))
        points = ResumePoints(prepared, folder, given, console.stage)
        self._session = session = RunSession(prepared, checked.placement, folder, console, points, services)
        start = points.next()
        if (origin := points.describe(start)) is not None:
            console.say(f"note: {origin}")
        stack.callback(self._release_groups)
        self._run_workers = started = session.start_workers(runtime, start)
        session.mark_begun(start)
        parts = session.parts(started, stack.enter_context(session.trackers(start)), start)
        self._step, self._parts = start.step, parts
        stack.callback(self._release_batch)
        self._thread = StepThread(self._parts, self._others(), self._keep)
        stack.callback(self._thread.close)

    def _others(self) -> dict[str, Callable[[], Coroutine[Any, Any, Any]]]:
        started = self._started_workers
        failure = started.process_failure(self._runtime)
        return {
            "the supervision of the replicas": started.supervisor.run,
            "the watch over processes": lambda: no_process_failure(failure),
        }

    @property
    def groups(self) -> dict[str, WorkerGroup]:
        """Its worker groups now, by name; a replica of rollout that was restarted is another group."""
        started = self._started_workers
        replicas = [cast(WorkerGroup, replica.process.group) for replica in started.replicas.replicas]
        return {group.name: group for group in (*started.groups.values(), *replicas)}

    def step(self) -> Order[StepDone]:
        """Order the next PPO step, with the validation and the checkpoint that are due after it.

        Raises:
            ValueError: all steps of the configuration were ordered.
        """
        with self._lock:
            total = self._parts.total_steps
            if self._step >= total:
                raise ValueError(
                    f"all {total} steps are taken; set a larger trainer.total_training_steps for more "
                    "(the learning rate decays over that number too)"
                )
            self._step += 1
            step = self._step

            async def take(steps: SyncSteps) -> StepDone:
                await steps.take(step)
                report = self._console.report
                assert report is not None, "a step reports"
                assert self._kept is not None, "a step leaves its batch"
                return StepDone(
                    step=step, total_steps=total, metrics=dict(report.metrics), batch=self._kept[0]
                )

            return self._thread.order(f"step {step} of {total}", take)

    def validate(self) -> Order[Mapping[str, float]]:
        """Order a validation on the newest weights: `val-core/…` metrics. Samples go to the run folder.

        Raises:
            ValueError: there are no validation prompts.
        """
        if not self._parts.prompts.has_validation:
            raise ValueError("data.val_files is null: there are no validation prompts")
        step = self._step

        async def run(_: SyncSteps) -> Mapping[str, float]:
            await self._parts.validator.run(step)
            return dict(self._console.validated)

        return self._thread.order(f"validation after step {step}", run, trains=False)

    def save_model(self, folder: str | Path) -> Order[Path]:
        """Order the policy as it is then, as a Hugging Face folder."""
        path = user_path(str(folder), field="folder").absolute()

        async def save(_: SyncSteps) -> Path:
            await self._session.save(self._started_workers.workers, path)
            return path

        return self._thread.order(f"model to {path.name}", save, trains=False)

    def close(self) -> None:
        """Give up a step under way, release the workers. Twice is a no-op; `Runtime.close` does it too."""
        self._resources.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _repr_html_(self) -> str:
        rows = [
            ("steps", f"{self._step} of {self._parts.total_steps}"),
            ("run folder", str(self._parts.run_dir)),
            ("worker groups", ", ".join(self.groups)),
        ]
        return table_html(type(self).__name__, (), rows)

    @property
    def _started_workers(self) -> RunWorkers:
        assert self._run_workers is not None, "all workers have started"
        return self._run_workers

    def _runtime_closes(self) -> None:
        self._thread.close(RUNTIME_CLOSES_S)
        self.close()

    def _keep(self, batch: DataProto, prompts: DataProto) -> None:
        """Keep the batch of the newest step, which refers to its prompts."""
        self._release_batch()
        self._kept = batch, prompts

    def _release_batch(self) -> None:
        if self._kept is not None:
            release(*self._kept)
            self._kept = None

    def _release_groups(self) -> None:
        """All at once, and later those that still start.

        A notebook keeps the exception of a failed start, and with it its groups: they would not go by
        themselves. Threads by hand: at the end of an interpreter pools take no more work.
        """
        groups = set(self.groups.values()) if self._run_workers is not None else set()
        for future in self._session.starting:
            if not future.done():
                future.add_done_callback(_release_later)
            elif (group := _started(future)) is not None:
                groups.add(group)
        threads = [threading.Thread(target=group.close, args=(DRAIN_S,), daemon=True) for group in groups]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(RELEASE_S)


def _started(future: Future[WorkerGroup]) -> WorkerGroup | None:
    """The group of a start that has ended, if it made one."""
    return None if future.cancelled() or future.exception() is not None else future.result()


def _release_later(future: Future[WorkerGroup]) -> None:
    if (group := _started(future)) is not None:
        group.close(0.0)


def check_stepwise(config: RunConfig) -> None:
    """Raises ConfigError: the configuration has what steps by hand cannot do."""
    trainer = config.trainer
    problems = []
    if trainer.mode != "sync":
        problems.append(f"trainer.mode: only sync can be trained step by step, got {trainer.mode}")
    if trainer.on_failure != "fail":
        problems.append("trainer.on_failure: only fail works step by step, got restart")
    if trainer.trace:
        problems.append("trainer.trace: a trace is written by python -m neoproto.run only")
    if problems:
        raise ConfigError(*problems)


@contextmanager
def _only_trainer(runtime: Runtime) -> Iterator[None]:
    """Raises RuntimeError: the runtime has a trainer."""
    if runtime in _live:
        raise RuntimeError(
            "this runtime has a live InteractiveTrainer already: use it, or close it first with its close(); "
            "runtime.close() closes it too, if its name is lost"
        )
    _live.add(runtime)
    try:
        yield
    finally:
        _live.discard(runtime)


def _is_shown(name: str) -> bool:
    """The metrics that a person looks at first; all are in `StepDone.metrics`."""
    shown = ("critic/score/mean", "critic/vf_loss", "response_length/mean", "training/rollout_probs_diff_max")
    return name in shown or name.startswith(("actor/", "perf/t"))


class _Console(RunConsole):
    """Prints what takes long, and keeps the metrics for those who ordered them."""

    def __init__(self) -> None:
        plain = Console(
            highlight=False, soft_wrap=True, width=PLAIN_WIDTH, force_terminal=False, force_jupyter=False
        )
        super().__init__(plain)
        self.report: StepReport | None = None
        self.validated: Mapping[str, float] = {}

    def step(self, report: StepReport) -> None:
        self.report = report

    def validation(self, step: int, metrics: Mapping[str, float]) -> None:
        self.validated = metrics
