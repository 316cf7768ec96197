"""What the runtime needs of a configuration: plain containers or typed models, read equally strictly."""

from __future__ import annotations

import datetime
import os
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from pydantic import BaseModel

from neoproto.config import RunConfig, RuntimeConfig, RuntimeRoot, load_runtime
from neoproto.config.load import load_section
from neoproto.errors import ConfigError
from neoproto.text import shown_with_type


@dataclass(frozen=True, kw_only=True, slots=True)
class RuntimeSettings:
    """What a `Runtime` is made with.

    Attributes:
        backend: a name in the backend registry.
        run_id: the run's mark, unique on the machine.
        run_dir: the run's folder, absolute.
        env_vars: environment of every worker process.
        warm_parent: whether workers are forked from a process that has imported what they need.
        topology: the `topology` block as given; a whole run's preset, if it has none; else None.
        hosts_are_here: see `RuntimeConfig`.
    options: the backend's own block.
    """

    backend: str
    run_id: str
    run_dir: Path
    env_vars: dict[str, str]
    warm_parent: bool
    topology: Any
    hosts_are_here: bool
    options: dict[str, Any]

    @classmethod
    def from_config(cls, config: Any) -> RuntimeSettings:
        """Read `runtime` and `topology` of a mapping or an object with such attributes, or `runtime` alone.

        The topology is checked when it is compiled, not here.

        Raises:
            ConfigError: with one sentence for each option of `runtime` that is unknown or has a wrong value.
        """
        runtime, topology = _sections(config)
        run_id = uuid.uuid4().hex[:12]
        stamp = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
        run_dir = runtime.run_dir or Path("outputs") / "runtime" / f"{stamp}-{run_id}"
        store = runtime.monarch.object_store
        return cls(
            backend=runtime.backend,
            run_id=run_id,
            run_dir=Path(run_dir).absolute(),
            env_vars=dict(runtime.env_vars),
            warm_parent=runtime.warm_parent,
            topology=topology,
            hosts_are_here=runtime.hosts_are_here,
            options={
                "job_mode": runtime.monarch.job_mode,
                "private_api": runtime.monarch.private_api,
                "store_name_prefix": store.store_name_prefix,
                "store_timeout_s": store.timeout_s,
                "stopped_timeout_s": runtime.stopped_timeout,
                "store_strategy": store.strategy,
            },
        )


def _sections(config: Any) -> tuple[RuntimeConfig, Any]:
    """`runtime`, validated, and `topology` as it was given."""
    if isinstance(config, RunConfig):
        return config.runtime, config.resolved_topology()
    if isinstance(config, RuntimeConfig):
        return config, None
    given = config if isinstance(config, Mapping) else _attributes(config)
    if given is None:
        raise ConfigError(
            "configuration: wanted a mapping with `runtime` and `topology`, or with what `runtime` holds, "
            f"got {shown_with_type(config, 120)}"
        )
    own, whole = RuntimeConfig.model_fields.keys(), RunConfig.model_fields.keys()
    if given.keys() & own and not given.keys() & whole:
        return load_section(RuntimeConfig, _plain(given)), None
    topology = given.get("topology")
    rest = {key: value for key, value in given.items() if key != "topology"}
    return load_runtime(_plain(rest)).runtime, topology


def _attributes(config: Any) -> dict[str, Any] | None:
    """Of an object with a `runtime` or a `topology`; None if it has neither."""
    names = [name for name in RuntimeRoot.model_fields if hasattr(config, name)]
    return {name: getattr(config, name) for name in names} or None


def _plain(value: Any) -> Any:
    """A tree of mappings, sequences and namespaces as the strict reader wants it; all else is left alone."""
    if isinstance(value, BaseModel):
        return value.model_dump()
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, SimpleNamespace):
        value = vars(value)
    if isinstance(value, Mapping):
        return {key: _plain(one) for key, one in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return [_plain(one) for one in value]
    return value
