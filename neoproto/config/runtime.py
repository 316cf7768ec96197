"""Options of `runtime`: the control plane and its store."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from neoproto.config.base import EnvName, Name, Plain, Seconds, Section, Text


class ObjectStoreConfig(Section):
    """The one object store of a run: an index, volumes and shared-memory segments of our own, which answer
    TorchStore's endpoints, so that stock TorchStore clients read and write the same keys."""

    store_name_prefix: Name = "neoproto"
    """The store is named {prefix}_{run}."""
    timeout_s: Seconds = 60.0
    """Deadline of one store operation, in seconds."""
    strategy: Literal["host", "local_rank"] = "host"
    """One storage volume per host, or one per local rank."""


class MonarchConfig(Section):
    """Options of the Monarch backend."""

    job_mode: Literal["process", "current"] = "process"
    """process = private hosts on this machine, ended with the run; current = the hosts of the job that
    `monarch apply` has started in this folder, which outlive it."""
    private_api: bool = True
    """false = only Monarch's public API is used, which is slower: for a release of Monarch whose private API
    is another. `neoproto/private_api/monarch.py` lists what is used of it, and what is done without it."""
    object_store: ObjectStoreConfig = ObjectStoreConfig()
    """The store."""


class RuntimeConfig(Section):
    """The control plane."""

    backend: Text = "monarch"
    """Name of a registered backend."""
    run_dir: Text | None = None
    """The run's folder; null = a new one below `trainer.default_local_dir`."""
    stopped_timeout: Seconds = 10.0
    """A process of this machine that has been stopped by a signal for so many seconds is ended; it counts as
    dead then."""
    env_vars: dict[EnvName, Plain] = Field(default_factory=dict)
    """Environment of every worker process, set at spawn before any import."""
    warm_parent: bool = True
    """Whether workers without a GPU are forked from a process on their host that has imported what they need.
    false: each is started afresh. A worker whose environment differs in what imports read always is."""
    monarch: MonarchConfig = MonarchConfig()
    """The default backend's options."""

    @property
    def hosts_are_here(self) -> bool:
        """Whether the run makes all hosts, on this machine; else it attaches to those that are there."""
        return self.monarch.job_mode == "process"
