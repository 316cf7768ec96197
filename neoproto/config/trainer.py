"""Options of `trainer` and `weights`: the loop around the algorithm, and how weights reach rollout."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from neoproto.config.base import (
    AsStrings,
    AtMostMax,
    Count,
    FolderName,
    Name,
    NonNegativeSeconds,
    Plain,
    Seconds,
    Section,
    Seed,
    Size,
    Text,
)
from neoproto.config.modes import DecoupledAsyncConfig, ReplayBufferConfig, SeparateAsyncConfig
from neoproto.config.topology import DevicesPerNode, Nodes
from neoproto.weights.transports import TRANSPORTS

if TYPE_CHECKING:
    TransportName = str
else:
    TransportName = Literal[(*TRANSPORTS,)]

Logger = Literal["console", "jsonl", "tensorboard", "wandb", "mlflow"]
Interval = Annotated[int, Field(ge=-1), AtMostMax]


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
    checkpoint: Seconds = 300.0
    """Copying what a checkpoint needs to host memory; then, beside training, writing it; and loading one."""


class TrainerConfig(Section):
    """The training loop."""

    mode: Literal["sync", "separate_async", "decoupled_async"] = "sync"
    """sync = generate, train, publish, one after the other; separate_async = rollout runs ahead on its own
    devices, the trainer updates it; decoupled_async = the same, but replicas pull weights by themselves."""
    separate_async: SeparateAsyncConfig = SeparateAsyncConfig()
    """Options of that mode."""
    decoupled_async: DecoupledAsyncConfig = DecoupledAsyncConfig()
    """Options of that mode."""
    replay_buffer: ReplayBufferConfig = ReplayBufferConfig()
    """Finished groups, in both asynchronous modes."""
    total_epochs: Count = 1
    """Passes over the training data."""
    total_training_steps: Count | None = None
    """Steps to run; null = what `total_epochs` makes. A number rules epochs (a shipped one does not, where
    you set epochs alone); data repeats as needed."""
    seed: Seed = 0
    """Seed of everything random that has no seed of its own."""
    val_before_train: bool = True
    """Validate the untrained policy too, where there is a validation set."""
    test_freq: Interval = -1
    """Validate after every so many steps; -1 or 0 = at the end only."""
    logger: Annotated[tuple[Logger, ...], AsStrings] = ("console", "jsonl")
    """Where metrics go: the terminal, metrics.jsonl (always), TensorBoard's event files, wandb, MLflow."""
    log_samples: bool = False
    """Write every training sample to samples/step_N.jsonl: text, score, tokens with log-probs and weight
    versions."""
    trace: bool = False
    """Write trace.json: what each process did when, for chrome://tracing and ui.perfetto.dev."""
    project_name: FolderName = "neoproto"
    """First folder level below `default_local_dir`; project of wandb, experiment of MLflow."""
    experiment_name: FolderName = "ppo"
    """Second folder level, each run has its own folder below it; name of the run for wandb and MLflow."""
    default_local_dir: Text = "outputs"
    """Where run folders are made, from the folder the command is typed in."""
    nnodes: Nodes | None = None
    """Nodes of the preset topology; null = 1."""
    n_gpus_per_node: DevicesPerNode | None = None
    """Devices per node of the preset topology (process slots on CPU); null = 1."""
    device_type: Literal["auto", "cpu", "gpu"] = "auto"
    """auto = gpu if this machine has one."""
    max_replica_restarts: Size = 3
    """How often one rollout replica may be restarted before the run fails."""
    heartbeat_interval: Seconds = 2.0
    """Seconds between two heartbeats of a rollout replica; below `heartbeat_timeout`."""
    heartbeat_timeout: Seconds = 20.0
    """A replica that answers none for so many seconds is ended and restarted."""
    save_freq: Interval = 20
    """Save a checkpoint after every so many steps, and after the last; -1 or 0 = none."""
    max_ckpt_to_keep: Count | None = 2
    """Checkpoints kept, the newest; null = all."""
    resume_mode: Literal["auto", "disable", "path"] = "auto"
    """auto = a run in a folder that has checkpoints (`runtime.run_dir`) resumes from the newest; disable = a
    folder that holds a run is refused; path = from `resume_from_path`, in a new folder."""
    resume_from_path: Plain | None = None
    """A checkpoint's folder, or that of a run, whose newest is taken; needs `resume_mode=path`."""
    accept_changed_code: bool = False
    """true = resume although the reward, your estimator or your trainer loop is not the one that the
    checkpoint was saved with; false = such a checkpoint is refused."""
    on_failure: Literal["fail", "restart"] = "fail"
    """When a process of the run dies or does not answer: fail = the run ends; restart = the run restarts
    from the newest checkpoint."""
    max_restarts: Size = 3
    """Restarts in a row without a new checkpoint in between; one more failure ends the run."""
    timeouts: TimeoutsConfig = TimeoutsConfig()
    """Deadlines."""


class WeightsConfig(Section):
    """How weight versions travel from the policy to rollout."""

    device: Literal["cpu"] = "cpu"
    """Where published versions wait: in host memory."""
    transport: TransportName = Field(default="auto", description=f"{TRANSPORTS.help}.")
    num_slots: Annotated[int, Field(ge=2, le=64)] = 3
    """Versions kept at once; the next publish waits until no replica reads the oldest."""
    rollout_dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """Type of the published weights; null = `rollout.dtype`."""
    lease_ttl: Seconds = 30.0
    """A reader that is silent for so many seconds counts as gone."""
    registry_name: Name = "registry"
    """Name of the worker group that keeps the list of versions."""
    pause_mode: Literal["abort", "keep"] = "abort"
    """Requests that are still running when weights are loaded: abort = stopped and continued from their
    partial output; keep = frozen and continued, their cache recomputed."""
    drain_timeout: NonNegativeSeconds = 5.0
    """Before that, let requests end for so many seconds, so that a response has one version; 0 = not."""
    bucket_mib: Annotated[int, Field(gt=0, le=65536)] = 64
    """Weights are put into the store in buckets of at most so many MiB (a larger weight has its own)."""
