"""Paths that a person typed, and files that cannot be written."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from neoproto.errors import ConfigError


def user_path(text: str | Path, *, field: str) -> Path:
    """The path, with `~` and `~name` at its beginning replaced by that person's home folder.

    Args:
        field: the configuration key it comes from, for messages.

    Raises:
        ConfigError: there is no such person, or no home folder is known.
    """
    try:
        return Path(text).expanduser()
    except RuntimeError:
        who = Path(text).parts[0]
        raise ConfigError(f"{field}: {text}: no home folder is known for {who}") from None


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
