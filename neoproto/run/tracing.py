"""The trace of one run: opened in this process, asked of the workers, merged when all is closed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from neoproto import trace
from neoproto.config import RunConfig
from neoproto.errors import ConfigError

CONTROLLER = "controller"


@contextmanager
def tracing(config: RunConfig, folder: Path, say: Callable[[str], None]) -> Iterator[None]:
    """Trace this process inside the block, with `trainer.trace`; afterwards merge what all wrote.

    A failure to merge is only printed: the run is over by then.

    Raises:
        ConfigError: the trace cannot be written.
    """
    if not config.trainer.trace:
        yield
        return
    try:
        trace.open_process(CONTROLLER, folder / trace.PARTS)
    except OSError as error:
        raise ConfigError(f"trainer.trace: cannot write to {folder}: {error.strerror or error}") from error
    try:
        yield
    finally:
        trace.close_process()
        try:
            merged = trace.merge_parts(folder)
        except (OSError, ValueError) as error:
            say(f"warning: the trace was not merged: {error}")
        else:
            if merged is not None:
                say(f"trace: {merged.path} ({merged.events} events of {merged.lanes} processes)")


def worker_environment(config: RunConfig, folder: Path) -> dict[str, str]:
    """`runtime.env_vars`, and for a trace where workers write theirs."""
    env = dict(config.runtime.env_vars)
    return env | {trace.FOLDER_VARIABLE: str(folder / trace.PARTS)} if config.trainer.trace else env
