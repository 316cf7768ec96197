"""What the root of a run and its workers know of it alike."""

from __future__ import annotations

from pathlib import Path

from neoproto.runtime.placement import Placement
from neoproto.runtime.pool import ResourcePool, model_pool


class RuntimeBase:
    """Base of `Runtime` and of a worker's `AttachedRuntime`."""

    def __init__(self, run_id: str, run_dir: Path, placement: Placement | None) -> None:
        self._run_id, self._run_dir, self._placement = run_id, run_dir, placement

    @property
    def run_id(self) -> str:
        """The run's mark, in the environment of all its processes as NEOPROTO_RUN_ID."""
        return self._run_id

    @property
    def run_dir(self) -> Path:
        """The run's folder, on the controller's machine; workers write to `logs/<group>/` in it."""
        return self._run_dir

    @property
    def placement(self) -> Placement | None:
        """The compiled topology, if the configuration has one."""
        return self._placement

    def model_resource_pool(self, name: str) -> ResourcePool:
        """The pool, or view of a pool, of a model of the topology.

        Raises:
            ValueError: the topology has no such model.
        """
        return model_pool(self._placement, name)
