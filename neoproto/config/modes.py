"""Options of the asynchronous trainers: what runs ahead of training, and how stale it may get."""

from __future__ import annotations

from typing import Literal

from neoproto.config.base import Count, Seconds, Section, Size


class SeparateAsyncConfig(Section):
    """Rollout on its own devices; the trainer pushes weights into all replicas at once."""

    num_warmup_batches: Size = 1
    """Batches enqueued before the first step, besides its own: so far rollout runs ahead."""
    parameter_sync_step: Count = 1
    """Weights are published after every so many training steps."""
    init_timeout: Seconds = 180.0
    """Seconds until every replica must serve the first version."""
    max_inflight_prompts: Count | None = None
    """Prompts generated at once, over all replicas; null = all that are enqueued."""
    dispatch_poll_interval: Seconds = 0.02
    """Seconds between two looks of the dispatcher at what is ready."""
    dispatch_batch_size: Count = 32
    """Most prompts of one call to a replica; results arrive call by call."""


class DecoupledAsyncConfig(SeparateAsyncConfig):
    """Rollout on its own devices; replicas pull weights when they choose, the trainer only publishes."""

    min_version_lag: Count = 1
    """A replica loads a version once it is so many publishes behind; below
    `trainer.replay_buffer.max_off_policy_threshold`."""
    prompt_version_lag: Size = 0
    """How many publishes older than what replicas are sure to load a prompt may start on. 0 = it waits until
    a replica has read and loaded the newest; 1 = it need not wait, and its samples are one publish older."""
    poll_interval: Seconds = 0.25
    """Seconds after which a replica asks the registry again; new versions are also announced at once."""
    version_aware_routing: bool = True
    """Start a prompt once a replica serves the version it asks for; false = once all of them do."""


class ReplayBufferConfig(Section):
    """Finished groups that wait to be trained on."""

    max_off_policy_threshold: Count = 2
    """How many publishes before the newest a group's oldest trajectory may have started."""
    max_off_policy_strategy: Literal["drop", "wait"] = "drop"
    """drop = too old groups are dropped and as many new prompts are enqueued; wait = no batch is taken
    while a group is being generated that would be too old for the next one."""
    max_tries: Count = 3
    """A prompt whose replica died is given to another one so often."""
