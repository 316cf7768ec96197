"""The synchronous trainer: every step generates on the weights of the step before.

for each step:  generate ─> annotate ─> estimate ─> update ─> publish version n ─> every replica loads it
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from neoproto.config import RunConfig
from neoproto.data import DataProto
from neoproto.trainer.phases import PhaseClock
from neoproto.trainer.protocols import Workers
from neoproto.trainer.step import StepSettings, ppo_step
from neoproto.trainer.store_metrics import store_metrics
from neoproto.trainer.tracking import Tracker
from neoproto.trainer.validation import validate, validation_passes, write_samples
from neoproto.weights import WeightVersion


class PromptSource(Protocol):
    """Training prompts, batch by batch, and the held-out ones."""

    @property
    def steps_per_epoch(self) -> int: ...

    def next_batch(self) -> DataProto:
        """The next training batch; a new epoch begins where one ends."""
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
        training_seconds: wall time of the loop, validation included.
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
    """Where a loop tells a person how it goes."""

    def step(self, report: StepReport) -> None: ...

    def validation(self, step: int, metrics: Mapping[str, float]) -> None: ...


class SyncTrainer:
    """Owns the loop; everything else (workers, prompts, trackers, console) is handed in."""

    def __init__(
        self,
        config: RunConfig,
        workers: Workers,
        prompts: PromptSource,
        settings: StepSettings,
        *,
        tracker: Tracker,
        run_dir: Path,
        total_steps: int,
        show: Show,
    ) -> None:
        self._config, self._workers, self._prompts, self._settings = config, workers, prompts, settings
        self._tracker, self._run_dir, self._total_steps, self._show = tracker, run_dir, total_steps, show
        self._limits = config.trainer.timeouts
        self._version = WeightVersion(epoch=0, n=0)
        self._first_validation: Mapping[str, float] = {}
        self._last_validation: Mapping[str, float] = {}
        self._seconds: dict[str, float] = {}
        self._tokens = self._samples = 0
        self._stepped_seconds = 0.0

    async def run(self) -> TrainingResult:
        """Train for `total_steps` steps.

        Consumes: prompts. Waits for: worker calls, each with its deadline. Produces: metrics, validation
        samples, weight versions. Unblocked by: a result, an error or the deadline of the call it waits for.
        """
        start = time.perf_counter()
        trainer = self._config.trainer
        await self._sync_weights(PhaseClock())
        if trainer.val_before_train and self._prompts.has_validation:
            await self._validate(0)
        for step in range(1, self._total_steps + 1):
            await self._step(step)
            last = step == self._total_steps
            due = last or (trainer.test_freq > 0 and step % trainer.test_freq == 0)
            if due and self._prompts.has_validation:
                await self._validate(step)
        return TrainingResult(
            steps=self._total_steps,
            samples=self._samples,
            tokens=self._tokens,
            training_seconds=time.perf_counter() - start,
            seconds=dict(self._seconds),
            first_validation=self._first_validation,
            last_validation=self._last_validation,
        )

    async def _step(self, step: int) -> None:
        clock = PhaseClock()
        prompts = self._prompts.next_batch()
        prompts.meta_info |= {"step": step, "validate": False}
        batch, figures = await ppo_step(self._workers, prompts, self._settings, clock)
        await self._sync_weights(clock)
        self._samples += len(batch)
        batch.release()
        prompts.release()
        figures |= clock.metrics()
        seconds, tokens = figures["timing_s/step"], figures["perf/total_num_tokens"]
        figures["perf/time_per_step"] = seconds
        figures["perf/throughput"] = tokens / (seconds * self._workers.num_devices)
        figures["training/global_step"] = step
        figures |= await store_metrics()
        figures["training/epoch"] = (step - 1) // self._prompts.steps_per_epoch
        self._tokens += int(tokens)
        self._book(figures)
        self._tracker.log(figures, step)
        self._stepped_seconds += seconds
        left = self._stepped_seconds / step * (self._total_steps - step)
        self._show.step(
            StepReport(step=step, total_steps=self._total_steps, seconds_left=left, metrics=figures)
        )

    async def _sync_weights(self, clock: PhaseClock) -> None:
        """Publish the policy's weights as the next version; return when every replica serves them."""
        limit = self._limits.weights
        manifest = await clock.call(
            "update_weights", self._workers.actor, "publish_weights", self._version, timeout=limit
        )
        await clock.call("update_weights", self._workers.rollout, "load_weights", manifest, timeout=limit)
        await clock.call(
            "update_weights", self._workers.actor, "retire_weights", self._version, timeout=limit
        )
        self._version = self._version.next()

    async def _validate(self, step: int) -> None:
        clock = PhaseClock()
        figures, samples = await validate(
            self._workers,
            self._prompts.validation_batches(),
            validation_passes(self._config.actor_rollout_ref.rollout.val_kwargs),
            step=step,
            timeout=self._limits.validation,
            clock=clock,
        )
        write_samples(self._run_dir / "validation", step, samples)
        if step == 0:
            self._first_validation = figures
        self._last_validation = figures
        figures = figures | {"timing_s/testing": clock.metrics()["timing_s/testing"]}
        self._book(figures)
        self._tracker.log(figures, step)
        self._show.validation(step, figures)

    def _book(self, figures: Mapping[str, float]) -> None:
        for name, value in figures.items():
            if name.startswith("timing_s/"):
                self._seconds[name] = self._seconds.get(name, 0.0) + value
