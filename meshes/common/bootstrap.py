"""The beginning and the end of every process of a run: its output goes to its log from the first line on."""

from __future__ import annotations

import atexit
import contextlib
import errno
import faulthandler
import io
import os
import sys
import tempfile
from typing import Any, NoReturn

from meshes.common.stacks import STACKS_SIGNAL

LOG_VARIABLE = "NEOPROTO_LOG_FILE"
FOLDER_VARIABLE = "NEOPROTO_WORKING_FOLDER"
"""Where the run was started, for hosts that were started elsewhere; ignored where there is no such folder."""
PARENT_VARIABLE = "NEOPROTO_WARM_PARENT"
"""In a forked worker: the process that it was forked from."""


def prepare() -> None:
    """Send file descriptors 1 and 2 to the log, and make stacks readable on a signal."""
    if path := os.environ.get(LOG_VARIABLE):
        open_log(path)
    settle()
    faulthandler.enable(file=sys.stderr, all_threads=True)
    faulthandler.register(STACKS_SIGNAL, file=sys.stderr, all_threads=True)


def open_log(path: str) -> None:
    """Send file descriptors 1 and 2 to a file, and what Python prints too."""
    os.makedirs(os.path.dirname(path), exist_ok=True)
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    sys.stdout, sys.stderr = text_log(1), text_log(2)


def settle() -> None:
    """What imports find beside the environment: the run's working folder, and a home folder."""
    folder = os.environ.get(FOLDER_VARIABLE, "")
    if os.path.isdir(folder):
        os.chdir(folder)
    ensure_home()


def ensure_home() -> None:
    """A user without a home folder gets the run's temporary one: vLLM would make a folder called `~`."""
    if os.path.expanduser("~") == "~":
        os.environ["HOME"] = tempfile.gettempdir()


class LogFile(io.FileIO):
    """Drops what a full disk does not take.

    A worker must not fail by a line of its log: what writes the metrics ends the run, and names the disk.
    """

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            return memoryview(data).nbytes


def text_log(number: int) -> io.TextIOWrapper:
    """What Python prints by, unbuffered, to a file descriptor that leads to a log."""
    raw: Any = LogFile(number, "wb", closefd=False)
    return io.TextIOWrapper(raw, encoding="utf-8", errors="backslashreplace", write_through=True)


def leave(code: object) -> NoReturn:
    """End the process without taking the interpreter apart: with torch in it that takes a second of a core.

    Monarch has stopped the actors by now. What was registered with `atexit` runs; threads are not joined.
    """
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code if isinstance(code, int) else 0 if code is None else 1)
