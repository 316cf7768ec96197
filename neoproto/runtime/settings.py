"""What the runtime needs of a configuration: a plain mapping or the typed models, read the same way."""

from __future__ import annotations

import datetime
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from neoproto.config import RunConfig
from neoproto.errors import ConfigError

_MISSING = object()


@dataclass(frozen=True, kw_only=True, slots=True)
class RuntimeSettings:
    """Attributes:
    backend: a name in the backend registry.
    run_id: the run's mark, unique on the machine.
    run_dir: the run's folder, absolute.
    env_vars: environment of every worker process.
    topology: the `topology` block as given, of a run's whole configuration the preset without one; else None.
    options: the backend's own block.
    """

    backend: str
    run_id: str
    run_dir: Path
    env_vars: dict[str, str]
    topology: Any
    options: dict[str, Any]

    @classmethod
    def from_config(cls, config: Any) -> RuntimeSettings:
        """Read `runtime` and `topology` of a mapping or an object with such attributes.

        Raises:
            ConfigError: `runtime.env_vars` is not a mapping of text to text, `runtime.run_dir` is empty.
        """
        backend = str(lookup(config, "runtime.backend", "monarch"))
        env_vars = lookup(config, "runtime.env_vars", {}) or {}
        if not isinstance(env_vars, Mapping) or not all(isinstance(key, str) for key in env_vars):
            raise ConfigError(f"runtime.env_vars: must map names to values, got {env_vars!r}")
        run_id = uuid.uuid4().hex[:12]
        run_dir = lookup(config, "runtime.run_dir", None)
        if run_dir == "":  # no name for the working folder, though a Path takes it for one
            raise ConfigError("runtime.run_dir: wanted a folder or null, got ''")
        if run_dir is None:
            stamp = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
            run_dir = Path("outputs") / "runtime" / f"{stamp}-{run_id}"
        return cls(
            backend=backend,
            run_id=run_id,
            run_dir=Path(run_dir).absolute(),
            env_vars={key: str(value) for key, value in env_vars.items()},
            topology=config.resolved_topology()
            if isinstance(config, RunConfig)
            else lookup(config, "topology", None),
            options={
                "job_mode": str(lookup(config, f"runtime.{backend}.job_mode", "process")),
                "store_name_prefix": str(
                    lookup(config, f"runtime.{backend}.object_store.store_name_prefix", "neoproto")
                ),
                "store_timeout_s": float(lookup(config, f"runtime.{backend}.object_store.timeout_s", 60.0)),
                "stopped_timeout_s": float(lookup(config, "runtime.stopped_timeout", 10.0)),
                "store_strategy": str(lookup(config, f"runtime.{backend}.object_store.strategy", "host")),
            },
        )


def lookup(config: Any, path: str, default: Any) -> Any:
    """The value at a dotted path, through keys and attributes; `default` where the path ends early."""
    for name in path.split("."):
        config = (
            config.get(name, _MISSING) if isinstance(config, Mapping) else getattr(config, name, _MISSING)
        )
        if config is _MISSING or config is None:
            return default
    return config
