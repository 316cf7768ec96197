"""The run folder: its making, its lock, and the small files in it that outlive a start of the run."""

from __future__ import annotations

import contextlib
import faulthandler
import fcntl
import json
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import date
from pathlib import Path

import yaml

from meshes.common.stacks import STACKS_SIGNAL
from neoproto.config import RunConfig
from neoproto.config.saved import to_yaml
from neoproto.errors import ConfigError
from neoproto.files import remove_parts, replace_file, unwritable, user_path
from neoproto.report.reading import read_config
from neoproto.runtime.logfile import LogFileHandler
from neoproto.text import first_line
from neoproto.trainer.checkpoint.folder import Checkpoint
from neoproto.trainer.checkpoint.history import METRICS
from neoproto.trainer.checkpoint.resume import named_damage, read_state

CONFIG, LOCK, EPOCH, COMPLETE = "config.yaml", "run.lock", "weight_epoch", "complete.json"
MODEL = "model"
"""The trained model's folder."""


@contextmanager
def run_folder(config: RunConfig) -> Iterator[Path]:
    """The run's folder, made if need be, and this process's alone until the block is left.

    `runtime.run_dir`, or one named by time below `trainer.default_local_dir`.

    Raises:
        ConfigError: it cannot be made, another run uses it, or it holds a run that is not to be resumed.
    """
    named = config.runtime.run_dir is not None
    field, folder = _place(config)
    with contextlib.ExitStack() as stack:
        with _refused(field, folder):
            folder = folder if named else unused(folder, time.strftime("%Y-%m-%d_%H-%M-%S"))
            folder.mkdir(parents=True, exist_ok=named)
            if not stack.enter_context(_locked(folder / LOCK)):
                raise ConfigError(f"{field}: {folder} is in use by another run")
            _check_run(config, field, folder)
            remove_parts(folder)
        yield folder


def check_folder(config: RunConfig) -> Path | None:
    """Refuse what `run_folder` would, before there is a folder; what is made to find out is gone on return.

    Returns:
        The run's folder, if there is one to resume.

    Raises:
        ConfigError: nothing can be made where it is to be, or it holds a run that is not to be resumed.
    """
    field, folder = _place(config)
    with _refused(field, folder):
        there = nearest_folder(config)
        # By trial: permissions do not show what an account of root's, /proc or a full disk will do.
        os.rmdir(tempfile.mkdtemp(prefix=".neoproto-", dir=there))
        if config.runtime.run_dir is None or there != folder:
            return None
        _check_run(config, field, folder)
        return folder


def nearest_folder(config: RunConfig) -> Path:
    """The folder that `run_folder` makes others in, or that of the run itself if it is there."""
    _, folder = _place(config)
    return next(path for path in (folder, *folder.parents) if path.is_symlink() or path.exists())


def remove_new_folder(folder: Path, before: Path) -> None:
    """Remove a run's folder and what was made to hold it, if there was no more than `before`.

    For a run that has not begun; another run may have come into a folder above, which then stays.
    """
    if folder == before or before not in folder.parents:
        return
    shutil.rmtree(folder, ignore_errors=True)
    with contextlib.suppress(OSError):
        for parent in folder.parents:
            if parent == before:
                break
            parent.rmdir()


def _place(config: RunConfig) -> tuple[str, Path]:
    """The field that sets the run's folder; the folder, or the one that a new one is made in."""
    if config.runtime.run_dir is not None:
        field, typed = "runtime.run_dir", config.runtime.run_dir
        below: tuple[str, ...] = ()
    else:
        field, typed = "trainer.default_local_dir", config.trainer.default_local_dir
        below = (config.trainer.project_name, config.trainer.experiment_name)
    return field, user_path(typed, field=field).absolute().joinpath(*below)


def _check_run(config: RunConfig, field: str, folder: Path) -> None:
    if holds_run(folder) and config.trainer.resume_mode != "auto":
        raise ConfigError(f"{field}: {folder} already holds a run; trainer.resume_mode=auto resumes it")


@contextmanager
def _refused(field: str, folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ConfigError(f"{field}: cannot write to {folder}: {error.strerror or error}") from error


def holds_run(folder: Path) -> bool:
    """Whether a run in this folder got as far as its first metrics."""
    return (folder / METRICS).exists()


def unused(parent: Path, name: str) -> Path:
    """`parent/name`, or with a number behind it where two runs start in one second."""
    candidates = (parent / (f"{name}_{number}" if number else name) for number in range(1000))
    return next(path for path in candidates if not path.exists())


def earlier_date(config: RunConfig, checkpoint: Checkpoint | None = None) -> str | None:
    """The date in the prompts of an earlier start.

    It is read from the run's folder, or from the checkpoint that the run begins with; None if neither does.

    Raises:
        ConfigError: the folder's configuration, or the checkpoint's state, cannot be read.
    """
    if config.runtime.run_dir is not None:
        path = user_path(config.runtime.run_dir, field="runtime.run_dir").absolute() / CONFIG
        if path.is_file():
            with named_damage(path):
                told = read_config(path).get("data", {}).get("date")
                return None if told is None else date.fromisoformat(told).isoformat()
    return None if checkpoint is None else read_state(checkpoint).loader.get("date")


def write_config(folder: Path, config: RunConfig) -> None:
    """The resolved configuration, in a form that `--config-dir` takes back; a different one is set aside.

    Raises:
        ConfigError: it cannot be written, or holds what YAML has no word for.
    """
    path = folder / CONFIG
    try:
        data = to_yaml(config.model_dump()).encode()
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: cannot be written: {first_line(error)}") from error
    with unwritable(path):
        if path.exists():
            if path.read_bytes() == data:
                return
            path.replace(_superseded(folder))
        replace_file(path, data, synced=True)


def _superseded(folder: Path) -> Path:
    """config.superseded.yaml, config.superseded.1.yaml, and so on: each is kept."""
    numbers = ("", *(f".{number}" for number in range(1, 10_000)))
    return next(
        path for number in numbers if not (path := folder / f"config.superseded{number}.yaml").exists()
    )


def next_epoch(folder: Path, at_least: int = 0) -> int:
    """The epoch of the weight versions of a start: one that no start in this folder had, and `at_least`.

    Raises:
        ConfigError: the file that has the last one is damaged.
    """
    path = folder / EPOCH
    with named_damage(path):
        before = int(path.read_bytes()) if path.exists() else -1
    epoch = max(before + 1, at_least)
    replace_file(path, f"{epoch}\n".encode(), synced=True)
    return epoch


def mark_complete(folder: Path, steps: int) -> None:
    """So many steps are trained and the model is written."""
    replace_file(folder / COMPLETE, (json.dumps({"steps": steps}) + "\n").encode(), synced=True)


def mark_incomplete(folder: Path) -> None:
    (folder / COMPLETE).unlink(missing_ok=True)


def completed_steps(folder: Path) -> int | None:
    """How many steps a complete run has; None if there is none in the folder.

    Raises:
        ConfigError: the file with that number is damaged.
    """
    path = folder / COMPLETE
    with named_damage(path):
        return int(json.loads(path.read_bytes())["steps"]) if path.exists() else None


def open_run_log(path: Path) -> LogFileHandler:
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
    return handler


def close_run_log(handler: LogFileHandler) -> None:
    """What a process does that continues after its run."""
    logging.getLogger("neoproto").removeHandler(handler)
    faulthandler.unregister(STACKS_SIGNAL)
    handler.close()


@contextmanager
def _locked(path: Path) -> Iterator[bool]:
    """Whether the lock was free. The system releases it when this process ends, however it does; processes
    that it starts do not inherit it."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True
    finally:
        os.close(descriptor)
