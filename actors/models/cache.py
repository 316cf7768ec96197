"""The folder that models are kept in which the program makes itself. What is in it is always whole."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from neoproto.errors import ConfigError
from neoproto.files import user_path

__all__ = ["cache_folder", "ensure_folder", "is_whole", "models_folder", "no_progress_bar"]


def cache_folder(environment: Mapping[str, str] = os.environ) -> Path:
    """`$NEOPROTO_CACHE`, or `$XDG_CACHE_HOME/neoproto`, or `~/.cache/neoproto`.

    Raises:
        ConfigError: none is named, and no home folder is known.
    """
    if chosen := environment.get("NEOPROTO_CACHE"):
        return user_path(chosen, field="NEOPROTO_CACHE")
    base = environment.get("XDG_CACHE_HOME")
    if base:
        return Path(base) / "neoproto"
    try:
        return Path.home() / ".cache" / "neoproto"
    except RuntimeError:
        raise ConfigError(
            f"HOME is not set and user {os.getuid()} has no home folder; set NEOPROTO_CACHE to a folder"
        ) from None


def models_folder(cache_dir: Path | None = None) -> Path:
    """Where models lie in the cache."""
    return (cache_dir or cache_folder()) / "models"


def is_whole(folder: Path, files: Sequence[str]) -> bool:
    """Whether the folder has all these files, as far as it can be looked into."""
    try:
        return all((folder / name).is_file() for name in files)
    except OSError:
        return False


def ensure_folder(
    name: str, files: Sequence[str], make: Callable[[Path], object], cache_dir: Path | None = None
) -> Path:
    """The model's folder, made if the cache does not have it.

    It is made beside its place and renamed into it, so a folder in the cache is always whole. Of two makers
    at once the first wins, and both get the same folder.

    Args:
        name: of the folder; has all that the model depends on.
        files: what a whole folder has at least.
        make: writes the model to a folder that it is given and that is not there yet.
        cache_dir: instead of `cache_folder()`.

    Raises:
        ConfigError: the cache cannot be written.
    """
    models = models_folder(cache_dir)
    folder = models / name
    if is_whole(folder, files):
        return folder
    try:
        models.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(
            prefix=".making-", dir=models, ignore_cleanup_errors=True
        ) as scratch:
            made = Path(scratch, "model")
            make(made)
            _move_into_place(made, folder, files, Path(scratch, "damaged"))
    except OSError as error:
        raise ConfigError(
            f"the model cache {models} cannot be written ({error.strerror or error}); "
            "set NEOPROTO_CACHE to another folder"
        ) from error
    return folder


def _move_into_place(made: Path, folder: Path, files: Sequence[str], aside: Path) -> None:
    """Rename `made` to `folder`, unless another maker was first; a damaged folder there is put aside."""
    if folder.exists() and not is_whole(folder, files):
        folder.rename(aside)
    try:
        made.rename(folder)
    except OSError:
        if not is_whole(folder, files):
            raise
        shutil.rmtree(made)


@contextmanager
def no_progress_bar() -> Iterator[None]:
    """Around the writing of a model: transformers draws a bar even for a single file."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
