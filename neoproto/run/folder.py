"""The run folder: `config.yaml`, `run.log`, `metrics.jsonl`, `validation/`, `logs/`, `model/`."""

from __future__ import annotations

import faulthandler
import logging
import time
from pathlib import Path

from omegaconf import OmegaConf

from meshes.stacks import STACKS_SIGNAL
from neoproto.config import RunConfig
from neoproto.data.paths import user_path
from neoproto.errors import ConfigError
from neoproto.runtime.logfile import LogFileHandler


def make_run_folder(config: RunConfig) -> Path:
    """Create the run's folder: `runtime.run_dir`, or one named by time below `trainer.default_local_dir`.

    Raises:
        ConfigError: the folder cannot be made, or already holds a run.
    """
    trainer = config.trainer
    if config.runtime.run_dir is not None:
        field = "runtime.run_dir"
        folder = user_path(config.runtime.run_dir, field=field).absolute()
        if (folder / "metrics.jsonl").exists():
            raise ConfigError(f"{field}: {folder} already holds a run")
    else:
        field = "trainer.default_local_dir"
        parent = user_path(trainer.default_local_dir, field=field).absolute()
        parent = parent / trainer.project_name / trainer.experiment_name
        folder = unused(parent, time.strftime("%Y-%m-%d_%H-%M-%S"))
    try:
        folder.mkdir(parents=True, exist_ok=config.runtime.run_dir is not None)
        write_config(folder / "config.yaml", config)
    except OSError as error:
        raise ConfigError(f"{field}: cannot write to {folder}: {error.strerror or error}") from error
    return folder


def unused(parent: Path, name: str) -> Path:
    """`parent/name`, or with a number behind it where two runs start in one second."""
    candidates = (parent / (f"{name}_{number}" if number else name) for number in range(1000))
    return next(path for path in candidates if not path.exists())


def write_config(path: Path, config: RunConfig) -> None:
    """The resolved configuration, in a form that `--config-dir` takes back."""
    path.write_text(OmegaConf.to_yaml(OmegaConf.create(config.model_dump(mode="json"))), encoding="utf-8")


def open_run_log(path: Path) -> None:
    """Send the `neoproto` loggers to `path`, until the process ends: the last traceback is written late.

    SIGUSR2 makes this process write its stacks there, as it makes workers write theirs to their logs.
    """
    handler = LogFileHandler(path, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    assert handler.stream is not None, "opened at once"
    faulthandler.register(STACKS_SIGNAL, file=handler.stream, all_threads=True)
    root = logging.getLogger("neoproto")
    root.addHandler(handler)
    root.setLevel(logging.INFO)
