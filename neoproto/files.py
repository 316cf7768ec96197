"""Paths that a person typed, and files and folders that appear whole or not at all.

replace_file   beside it ─> (synced) ─> renamed ─> (its folder synced)
new_folder     beside it ─> filled by the caller ─> renamed
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
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


@contextmanager
def unwritable(what: object) -> Iterator[None]:
    """Turn an `OSError` of the block into one for the user.

    Args:
        what: the path, or the option that names it with the path.

    Raises:
        ConfigError: "WHAT: cannot be written: REASON".
    """
    try:
        yield
    except OSError as error:
        raise ConfigError(f"{what}: cannot be written: {error.strerror or error}") from error


def sync(path: Path) -> None:
    """Have the disk hold a file's bytes, or a folder's names."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_synced(path: Path, *data: bytes | memoryview) -> None:
    """Write a new file; it is on the disk when this returns, its name is not."""
    _write(path, *data)
    sync(path)


_PART = ".part"


def remove_parts(folder: Path) -> None:
    """Remove what processes killed inside `replace_file` have left in a folder that is ours alone."""
    for scratch in folder.glob(f".*{_PART}"):
        if re.fullmatch(rf"\..+\.\d+{re.escape(_PART)}", scratch.name):
            _unlink(scratch)


def replace_file(path: Path, *data: bytes | memoryview, synced: bool = False) -> None:
    """Give a file new content. A reader finds the old content or the new one, whenever this process stops.

    Args:
        data: the content, in pieces.
        synced: the same holds if the machine stops.

    Raises:
        OSError: names the file, or the one beside it; the file is as it was.
    """
    # Of this process: two that write the same file do not write each other's half.
    scratch = path.with_name(f".{path.name}.{os.getpid()}{_PART}")
    with named_errors(path):
        try:
            if synced:
                write_synced(scratch, *data)  # before the name leads to it
            else:
                _write(scratch, *data)
            _rename(scratch, path)
        except BaseException:
            with suppress(OSError):  # the first error is the cause
                _unlink(scratch)
            raise
        if synced:
            sync(path.parent)


@contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """Name a folder for the block to make and fill, which is `target` after the block, or gone if that fails.

    It lies in a folder of its own beside `target`: one that is there already belongs to someone else.

    Raises:
        OSError: there is something else at `target`.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix=".making-", dir=target.parent, ignore_cleanup_errors=True) as scratch:
        made = Path(scratch, "made")
        yield made
        made.rename(target)


def is_full(folder: Path) -> bool:
    """Whether nothing can be written there any more: a process may die of that without a message."""
    with suppress(OSError):
        return os.statvfs(folder).f_bavail == 0
    return False


# What changes the disk, a step each: tests of crashes stop after every one of them.


def _write(path: Path, *data: bytes | memoryview) -> None:
    with path.open("wb") as file:
        for piece in data:
            file.write(piece)


def _rename(path: Path, target: Path) -> None:
    path.rename(target)


def _unlink(path: Path) -> None:
    path.unlink(missing_ok=True)
