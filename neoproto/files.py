"""Paths that a person typed, and files that cannot be written."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Literal

from neoproto.errors import ConfigError


def user_path(text: str | Path, *, field: str) -> Path:
    """The path, with `~` and `~name` at its beginning replaced by that person's home folder.

    Nothing need be there.

    Args:
        field: the configuration key it comes from, for messages.

    Raises:
        ConfigError: there is no such person, or no home folder is known; no file can have this path, or it
            cannot be looked at.
    """
    try:
        path = Path(text).expanduser()
        path.stat()
    except RuntimeError:
        who = Path(text).parts[0]
        raise ConfigError(f"{field}: {text}: no home folder is known for {who}") from None
    except (FileNotFoundError, NotADirectoryError):
        pass
    except OSError as error:  # a name too long, a loop of links, a folder that may not be entered
        raise ConfigError(f"{field}: {text}: {error.strerror or error}") from error
    except ValueError as error:  # a zero byte
        raise ConfigError(f"{field}: {str(text)!r}: {error}") from error
    return path


_KINDS = (
    (stat.S_ISDIR, "folder"),
    (stat.S_ISREG, "file"),
    (stat.S_ISFIFO, "named pipe"),
    (stat.S_ISSOCK, "socket"),
)


def wrong_kind(path: Path, wanted: Literal["file", "folder"]) -> str | None:
    """What is wrong with a path at which there is something else than the wanted kind; else None."""
    try:
        mode = path.stat().st_mode
    except OSError:
        return None
    found = next((name for test, name in _KINDS if test(mode)), "device")
    return None if found == wanted else f"{path} is a {found}, a {wanted} is needed"


@contextmanager
def named_errors(path: Path) -> Iterator[None]:
    """Have an `OSError` of the block name the file: one of writing, unlike one of opening, does not."""
    try:
        yield
    except OSError as error:
        if error.errno is not None:  # else it shows nothing but its own text
            error.filename = error.filename or str(path)
        raise


def is_full(folder: Path) -> bool:
    """Whether nothing can be written there any more: a process may die of that, and cannot say so."""
    with suppress(OSError):
        return os.statvfs(folder).f_bavail == 0
    return False
