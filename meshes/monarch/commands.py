"""The commands by which hosts start processes: a fresh one, or one that is forked from the warm parent."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from meshes.common.bootstrap import LOG_VARIABLE
from meshes.common.warm import make_plan
from meshes.common.warm_stub import PLAN_VARIABLE, stub_arguments
from neoproto.private_api import monarch as private
from neoproto.runtime.backend import Preload

_FRESH = ("-P", "-m", "neoproto", "meshes.monarch.bootstrap")
"""-P: what lies in the folder that the host was started in is nothing to import."""

_ENTRY = "meshes.monarch.bootstrap:main_of_forked"


def fresh_command(log_path: Path, env: Mapping[str, str]) -> Any:
    """How to start a process whose output goes to `log_path`. It has its host's environment, and `env`."""
    return _command(log_path, env, _FRESH)


class WarmCommands:
    """Commands of a run whose hosts have a warm parent each, where there is something to preload."""

    def __init__(self, log_dir: Path, env_vars: Mapping[str, str], expected: Sequence[Preload]) -> None:
        """Start nothing yet.

        Args:
            log_dir: folder of the parents' logs.
            env_vars: the run's environment, which the parents have too.
            expected: what groups that will be started need.
        """
        self._log_dir, self._env_vars = str(log_dir), env_vars
        self._plan = self._planned(expected) if expected else None

    def starting(self, log_path: Path, env: Mapping[str, str]) -> Any:
        """A fresh process. The host's parent is started with it, to be warm by the time it is needed."""
        if self._plan is None:
            return fresh_command(log_path, env)
        arguments = stub_arguments((LOG_VARIABLE,), (), _FRESH)
        return _command(log_path, {**env, PLAN_VARIABLE: self._plan}, arguments)

    def forked(self, log_path: Path, env: Mapping[str, str], own: Mapping[str, str], preload: Preload) -> Any:
        """A process that is forked from the host's parent, or a fresh one where that cannot be.

        Args:
            env: environment of every process on its host.
            own: environment of this one beside that.
        """
        plan = self._plan or self._planned([preload])
        # The first process starts the parent, which has nothing that is that one's own: processes of
        # the store, for one, are known by the log that they write.
        names = [LOG_VARIABLE, *(name for name, value in own.items() if self._env_vars.get(name) != value)]
        arguments = stub_arguments(names, preload.modules, _FRESH)
        return _command(log_path, {**env, **own, PLAN_VARIABLE: plan}, arguments)

    def _planned(self, groups: Sequence[Preload]) -> str:
        return make_plan(self._log_dir, _ENTRY, [(one.modules, one.env) for one in groups]).to_text()


def _command(log_path: Path, env: Mapping[str, str], arguments: Sequence[str]) -> Any:
    base: dict[str, str | None] = {LOG_VARIABLE: str(log_path), "PYTHONUNBUFFERED": "1"}
    return private.bootstrap_command(sys.executable, list(arguments), {**base, **env})
