"""Options of `trainer` and `weights`: the loop around the algorithm, and how weights reach rollout."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from neoproto.config.base import AsStrings, Count, Seconds, Section

Logger = Literal["console", "jsonl", "tensorboard"]
Interval = Annotated[int, Field(ge=-1)]


class TimeoutsConfig(Section):
    """Deadline of each kind of call, in seconds from its submission. None waits for ever."""

    start: Seconds = 180.0
    """Spawning a worker group and loading its model."""
    generate: Seconds = 300.0
    """Generating one training batch."""
    reward: Seconds = 120.0
    """Scoring one batch."""
    log_prob: Seconds = 300.0
    """Log-probs of one batch, of the policy or of the reference model."""
    values: Seconds = 300.0
    """Values of one batch."""
    update: Seconds = 600.0
    """Training on one batch."""
    weights: Seconds = 120.0
    """Publishing weights, and loading them."""
    validation: Seconds = 600.0
    """Generating one validation batch."""
    save: Seconds = 120.0
    """Writing the final Hugging Face folder."""


class TrainerConfig(Section):
    """The training loop."""

    mode: Literal["sync"] = "sync"
    """The trainer drives rollout and weights itself, step by step."""
    total_epochs: Count = 1
    """Passes over the training data."""
    total_training_steps: Count | None = None
    """Steps to run; null = what `total_epochs` makes. A number wins over epochs; data repeats as needed."""
    seed: int = 0
    """Seed of everything random that has no seed of its own."""
    val_before_train: bool = True
    """Validate the untrained policy too, where there is a validation set."""
    test_freq: Interval = -1
    """Validate after every so many steps; -1 or 0 = at the end only."""
    logger: Annotated[tuple[Logger, ...], AsStrings] = ("console", "jsonl")
    """Where metrics go: the terminal, metrics.jsonl, TensorBoard's event files."""
    project_name: Annotated[str, Field(min_length=1)] = "neoproto"
    """First folder level below `default_local_dir`."""
    experiment_name: Annotated[str, Field(min_length=1)] = "ppo"
    """Second folder level; each run has its own folder below it."""
    default_local_dir: Annotated[str, Field(min_length=1)] = "outputs"
    """Where run folders are made, from the folder the command is typed in."""
    nnodes: Count | None = None
    """Nodes of the preset topology; null = 1."""
    n_gpus_per_node: Count | None = None
    """Devices per node of the preset topology (process slots on CPU); null = 1."""
    device_type: Literal["auto", "cpu", "gpu"] = "auto"
    """auto = gpu if this machine has one."""
    save_freq: Literal[-1] = -1
    """Checkpoints while training: none yet."""
    resume_mode: Literal["disable"] = "disable"
    """Resuming from a checkpoint: not yet."""
    timeouts: TimeoutsConfig = TimeoutsConfig()
    """Deadlines."""


class WeightsConfig(Section):
    """How weight versions travel from the policy to rollout."""

    rollout_dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """Type of the published weights; null = `rollout.dtype`."""
    bucket_mib: Annotated[int, Field(gt=0, le=65536)] = 64
    """Weights are put into the store in buckets of at most so many MiB (a larger weight has its own)."""
