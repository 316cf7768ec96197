"""The records of a training loop: metrics to trackers, lines to the console, totals to its caller."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from neoproto import trace
from neoproto.config import RunConfig
from neoproto.data import DataProto
from neoproto.trainer.checkpoint.folder import CheckpointFolder
from neoproto.trainer.checkpoint.history import VALIDATION, PromptLog
from neoproto.trainer.checkpoint.resume import OWN_LOOP_NONE, StartPoint
from neoproto.trainer.metrics.phases import PhaseClock
from neoproto.trainer.metrics.samples import SampleLog
from neoproto.trainer.metrics.tracking import Tracker
from neoproto.trainer.protocols import Workers
from neoproto.trainer.step import StepSettings
from neoproto.trainer.validation import validate, validation_passes, write_samples


class PromptSource(Protocol):
    """Training prompts, batch by batch, and the held-out ones."""

    @property
    def steps_per_epoch(self) -> int: ...

    def next_batch(self) -> DataProto:
        """The next training batch; a new epoch begins where one ends."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """The position in the training data, of plain types."""
        ...

    @property
    def has_validation(self) -> bool: ...

    def validation_batches(self) -> Iterator[DataProto]:
        """The held-out prompts, batch by batch; the caller releases each."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class StepReport:
    """One finished step, for the console. `seconds_left` extrapolates the mean step time so far."""

    step: int
    total_steps: int
    seconds_left: float
    metrics: Mapping[str, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingResult:
    """What a finished run comes down to.

    Attributes:
        seconds: `timing_s/*` summed over all steps (phases may overlap).
        training_seconds: wall time of the loop, validation included; of what was given up in a restart, none.
        first_validation, last_validation: `val-core/*` before training (empty without) and at the end.
    """

    steps: int
    samples: int
    tokens: int
    training_seconds: float
    seconds: Mapping[str, float]
    first_validation: Mapping[str, float]
    last_validation: Mapping[str, float]


class Show(Protocol):
    """Where a loop shows its progress to a person."""

    def step(self, report: StepReport) -> None: ...

    def validation(self, step: int, metrics: Mapping[str, float]) -> None: ...


class Recorder:
    """Books the steps and validations of one run; its clock starts with it."""

    def __init__(
        self,
        tracker: Tracker,
        show: Show,
        *,
        total_steps: int,
        steps_per_epoch: int,
        num_devices: int,
        gauges: Callable[[], Mapping[str, float]] = dict,
    ) -> None:
        """Args:
        gauges: metrics of that moment, read at the end of each step.
        """
        self._tracker, self._show, self._gauges = tracker, show, gauges
        self._total_steps, self._steps_per_epoch, self._num_devices = (
            total_steps,
            steps_per_epoch,
            num_devices,
        )
        self._start, self._seconds_before = time.perf_counter(), 0.0
        self._first_validation: Mapping[str, float] = {}
        self._last_validation: Mapping[str, float] = {}
        self._seconds: dict[str, float] = {}
        self._tokens = self._samples = 0
        self._stepped_seconds = 0.0

    def step(self, step: int, metrics: Mapping[str, float], clock: PhaseClock, samples: int) -> None:
        """Book a finished step.

        Args:
            metrics: of the step, `perf/total_num_tokens` among them.
            clock: where its seconds went.
            samples: rows it trained on.
        """
        booked = {**metrics, **self._gauges(), **clock.metrics()}
        seconds, tokens = booked["timing_s/step"], booked["perf/total_num_tokens"]
        booked["perf/time_per_step"] = seconds
        booked["perf/throughput"] = tokens / (seconds * self._num_devices)
        booked["training/global_step"] = step
        booked["training/epoch"] = (step - 1) // self._steps_per_epoch
        self._samples += samples
        self._tokens += int(tokens)
        self._book(booked)
        trace.since(f"step {step}", "step", clock.started)
        self._tracker.log(booked, step)
        self._stepped_seconds += seconds
        left = self._stepped_seconds / step * (self._total_steps - step)
        self._show.step(
            StepReport(step=step, total_steps=self._total_steps, seconds_left=left, metrics=booked)
        )

    def validation(self, step: int, metrics: Mapping[str, float], seconds: float) -> None:
        """Book a validation: its scores, and how long it took."""
        if step == 0:
            self._first_validation = dict(metrics)
        self._last_validation = dict(metrics)
        metrics = {**metrics, "timing_s/testing": seconds}
        self._book(metrics)
        self._tracker.log(metrics, step)
        self._show.validation(step, metrics)

    def saved(self, step: int, seconds: float) -> None:
        """Book how long training stood still for a checkpoint."""
        metrics = {"timing_s/save_checkpoint": seconds}
        self._book(metrics)
        self._tracker.log(metrics, step)

    def state_dict(self) -> dict[str, Any]:
        """The totals so far, of plain types."""
        return {
            "training_seconds": self._training_seconds(),
            "stepped_seconds": self._stepped_seconds,
            "seconds": dict(self._seconds),
            "samples": self._samples,
            "tokens": self._tokens,
            "first_validation": dict(self._first_validation),
            "last_validation": dict(self._last_validation),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume with the totals of `state`; the time from then until now does not count."""
        self._start, self._seconds_before = time.perf_counter(), state["training_seconds"]
        self._stepped_seconds, self._seconds = state["stepped_seconds"], dict(state["seconds"])
        self._samples, self._tokens = state["samples"], state["tokens"]
        self._first_validation = dict(state["first_validation"])
        self._last_validation = dict(state["last_validation"])

    def result(self) -> TrainingResult:
        """The run so far, as if it ended now."""
        return TrainingResult(
            steps=self._total_steps,
            samples=self._samples,
            tokens=self._tokens,
            training_seconds=self._training_seconds(),
            seconds=dict(self._seconds),
            first_validation=self._first_validation,
            last_validation=self._last_validation,
        )

    def _training_seconds(self) -> float:
        return self._seconds_before + time.perf_counter() - self._start

    def _book(self, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            if name.startswith("timing_s/"):
                self._seconds[name] = self._seconds.get(name, 0.0) + value


class Validator:
    """Validates when it is due, on whatever weights the replicas serve then."""

    def __init__(
        self,
        config: RunConfig,
        workers: Workers,
        prompts: PromptSource,
        recorder: Recorder,
        *,
        run_dir: Path,
        total_steps: int,
    ) -> None:
        self._workers, self._prompts, self._recorder = workers, prompts, recorder
        self._trainer, self._run_dir, self._total_steps = config.trainer, run_dir, total_steps
        self._passes = validation_passes(config.actor_rollout_ref.rollout.val_kwargs)

    def due(self, step: int) -> bool:
        """Whether to validate after this step; 0 is before the first."""
        trainer = self._trainer
        if not self._prompts.has_validation:
            return False
        if step == 0:
            return trainer.val_before_train
        return step == self._total_steps or (trainer.test_freq > 0 and step % trainer.test_freq == 0)

    async def run(self, step: int) -> None:
        """Generate and score the held-out prompts; the samples go to the run folder."""
        clock = PhaseClock()
        metrics, samples = await validate(
            self._workers,
            self._prompts.validation_batches(),
            self._passes,
            step=step,
            timeout=self._trainer.timeouts.validation,
            clock=clock,
        )
        write_samples(self._run_dir / VALIDATION, step, samples)
        self._recorder.validation(step, metrics, clock.metrics()["timing_s/testing"])


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingParts:
    """What every trainer is handed: it owns the loop and nothing else.

    Attributes:
        settings: what a PPO step needs of the configuration.
        prompt_log: which prompts each step trained on.
        sample_log: the samples it trained on.
        total_steps: training steps of the whole run.
        start: where it starts.
        checkpoints: where checkpoints are saved; None saves none.
        loop: which trainer loop it is, for a checkpoint to be resumed by the same one.
    """

    config: RunConfig
    workers: Workers
    prompts: PromptSource
    settings: StepSettings
    recorder: Recorder
    validator: Validator
    prompt_log: PromptLog
    sample_log: SampleLog
    run_dir: Path
    total_steps: int
    start: StartPoint
    checkpoints: CheckpointFolder | None
    loop: str = OWN_LOOP_NONE


def training_parts(
    config: RunConfig,
    workers: Workers,
    prompts: PromptSource,
    *,
    tracker: Tracker,
    show: Show,
    run_dir: Path,
    total_steps: int,
    gauges: Callable[[], Mapping[str, float]] = dict,
    start: StartPoint | None = None,
    checkpoints: CheckpointFolder | None = None,
    prompt_log: PromptLog | None = None,
    sample_log: SampleLog | None = None,
    loop: str = OWN_LOOP_NONE,
) -> TrainingParts:
    """The parts of a run; its clock starts now, and its totals are those of `start`.

    Without `checkpoints` none are saved, without the logs no file lists what was trained on.
    `gauges` are those of its `Recorder`.
    """
    start = start or StartPoint()
    recorder = Recorder(
        tracker,
        show,
        total_steps=total_steps,
        steps_per_epoch=prompts.steps_per_epoch,
        num_devices=workers.num_devices,
        gauges=gauges,
    )
    settings = StepSettings.from_config(config)
    if start.state is not None:
        recorder.load_state_dict(start.state.recorder)
        if settings.kl is not None:
            settings.kl.load_state_dict(start.state.kl)
    validator = Validator(config, workers, prompts, recorder, run_dir=run_dir, total_steps=total_steps)
    return TrainingParts(
        config=config,
        workers=workers,
        prompts=prompts,
        settings=settings,
        recorder=recorder,
        validator=validator,
        prompt_log=prompt_log or PromptLog(),
        sample_log=sample_log or SampleLog(),
        run_dir=run_dir,
        total_steps=total_steps,
        start=start,
        checkpoints=checkpoints,
        loop=loop,
    )
