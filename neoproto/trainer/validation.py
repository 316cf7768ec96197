"""Validation: the held-out prompts, generated on the newest weights and scored."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from neoproto.config import ValKwargsConfig
from neoproto.data import DataProto
from neoproto.trainer.metrics.phases import PhaseClock
from neoproto.trainer.metrics.samples import question, write_rows
from neoproto.trainer.protocols import Samplers


@dataclass(frozen=True, kw_only=True, slots=True)
class ValidationPass:
    """One way of drawing answers.

    Attributes:
        label: last part of the metric's name, e.g. `greedy` or `mean@1`.
        greedy: take the most likely token instead of sampling.
        samples: answers a prompt.
    """

    label: str
    greedy: bool
    samples: int


def validation_passes(options: ValKwargsConfig) -> list[ValidationPass]:
    """Sampled answers, greedy ones, or both, by `rollout.val_kwargs`."""
    passes = []
    if options.do_sample:
        passes.append(ValidationPass(label=f"mean@{options.n}", greedy=False, samples=options.n))
    if options.also_greedy or not options.do_sample:
        passes.append(ValidationPass(label="greedy", greedy=True, samples=1))
    return passes


FAILURES = ("", "timeout", "error")
"""What the values of `reward_failed` mean."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ValidationSample:
    """One answer as it is written to the run folder.

    Attributes:
        vote: what was compared with the ground truth: equal votes are one answer, "" is none; None where its
            judge does not report one.
        failure: one of `FAILURES`, "" with a score.
    """

    step: int
    label: str
    uid: str
    data_source: str
    prompt: str
    answer: str
    ground_truth: str
    score: float
    accuracy: float
    vote: str | None = None
    failure: str = ""


async def validate(
    workers: Samplers,
    batches: Iterable[DataProto],
    passes: Sequence[ValidationPass],
    *,
    step: int,
    timeout: float,
    clock: PhaseClock,
) -> tuple[dict[str, float], list[ValidationSample]]:
    """Metrics (`accuracy_metrics`, and `failure_metrics` if there are any), and every sample.

    Each call's deadline is `timeout` seconds from its submission.
    """
    samples: list[ValidationSample] = []
    for batch in batches:
        for one in passes:
            meta = {"validate": True, "greedy": one.greedy, "n": one.samples, "step": step, "keep_text": True}
            prompts = batch.select()
            prompts.meta_info |= meta
            generated = workers.rollout.within(timeout).generate_sequences(prompts)
            answers = await clock.wait("testing", generated)
            judged = workers.reward.within(timeout).compute_score(answers)
            scores = await clock.wait("testing", judged)
            samples += collect_samples(answers.union(scores), step, one.label)
            scores.release()
            answers.release()
        batch.release()
    return accuracy_metrics(samples) | failure_metrics(samples), samples


def collect_samples(batch: DataProto, step: int, label: str) -> list[ValidationSample]:
    """Read the columns of scored answers into rows for people."""
    names = ["uid", "data_source", "raw_prompt", "reward_model", "response_text", "acc", "token_level_scores"]
    if "vote" in batch:
        names.append("vote")
    if "reward_failed" in batch:
        names.append("reward_failed")
    columns: dict[str, Any] = dict(batch.materialize(names))
    failed = np.asarray(columns.get("reward_failed", np.zeros(len(batch), dtype=np.int8)))
    totals = np.asarray(columns["token_level_scores"]).sum(1)
    return [
        ValidationSample(
            step=step,
            label=label,
            uid=str(columns["uid"][row]),
            data_source=str(columns["data_source"][row]),
            prompt=question(columns["raw_prompt"][row]),
            answer=str(columns["response_text"][row]),
            ground_truth=str(columns["reward_model"][row].get("ground_truth")),
            score=float(totals[row]),
            accuracy=float(columns["acc"][row]),
            vote=columns["vote"][row] if "vote" in columns else None,
            failure=FAILURES[int(failed[row])],
        )
        for row in range(len(batch))
    ]


def accuracy_metrics(samples: Sequence[ValidationSample]) -> dict[str, float]:
    """Mean accuracy for each data source and pass, `val-core/{data_source}/acc/{label}`."""
    groups: dict[str, list[float]] = {}
    for sample in samples:
        groups.setdefault(f"val-core/{sample.data_source}/acc/{sample.label}", []).append(sample.accuracy)
    return {name: sum(values) / len(values) for name, values in sorted(groups.items())}


def failure_metrics(samples: Sequence[ValidationSample]) -> dict[str, float]:
    """Answers that got no score and count as wrong, `val-aux/reward/{timeouts,errors}`; {} without any."""
    counts = {f"val-aux/reward/{kind}s": sum(one.failure == kind for one in samples) for kind in FAILURES[1:]}
    return {name: float(count) for name, count in counts.items()} if any(counts.values()) else {}


def write_samples(folder: Path, step: int, samples: Sequence[ValidationSample]) -> Path:
    """Write them as `samples.write_rows` does."""
    return write_rows(folder, step, map(asdict, samples))
