"""Checkpoints as folders: written under another name, named when they are whole, verified before use.

    begin   ─> .global_step_N.TOKEN.partial/   workers and controller write, and sync what they wrote
    commit  ─> manifest.json ─> global_step_N/ ─> latest_checkpointed_iteration.txt ─> old ones removed
    newest  ─> the highest global_step_N with a manifest        sweep ─> what a killed run left is removed

A kill at any point leaves the newest checkpoint as it was, or the new one whole. Nothing here reads what is
in the files.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from neoproto.errors import CheckpointError
from neoproto.files import replace_file, sync, write_synced

CHECKPOINTS = "checkpoints"
"""The folder of a run that holds them."""
MANIFEST = "manifest.json"
LATEST = "latest_checkpointed_iteration.txt"
_FORMAT = 1
_NAME = re.compile(r"global_step_(\d+)")
_VERIFIERS = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoint:
    """A whole checkpoint: after which step it was taken, and its folder."""

    step: int
    path: Path


class CheckpointFolder:
    """The checkpoints of one run. One process at a time may use it; see `neoproto.run.folder`.

    Args:
        root: the folder they lie in; made when it is needed.
        keep: how many are kept, >= 1; None keeps all.

    Raises:
        ValueError: `keep` below 1.
    """

    def __init__(self, root: Path, keep: int | None = None) -> None:
        if keep is not None and keep < 1:
            raise ValueError(f"at least one checkpoint is kept, got keep={keep}")
        self.root, self._keep = root, keep

    def begin(self, step: int) -> Path:
        """A new, empty folder to write a checkpoint into; `commit` gives it its name.

        Its name is new too: what a process of a killed run may still be writing goes elsewhere.
        """
        if not self.root.is_dir():
            self.root.mkdir(parents=True, exist_ok=True)
            sync(self.root.parent)
        partial = self.root / f".global_step_{step}.{secrets.token_hex(4)}.partial"
        _mkdir(partial)
        return partial

    def commit(self, partial: Path, step: int, digests: Mapping[str, str]) -> Checkpoint:
        """Make what was written to `partial` the newest checkpoint, then remove those beyond `keep`.

        Args:
            digests: relative name -> SHA-256 (hex) of every file in it, each synced by whoever wrote it.

        Raises:
            CheckpointError: the files are not those of `digests`.
            OSError: the disk.
        """
        found = _files(partial)
        if found.keys() != digests.keys():
            raise CheckpointError(
                f"{partial} holds {sorted(found.keys() - digests.keys())} without a digest, and lacks "
                f"{sorted(digests.keys() - found.keys())}"
            )
        files = {name: {"sha256": digests[name], "size": found[name]} for name in sorted(digests)}
        for folder in sorted({(partial / name).parent for name in files} - {partial}):
            sync(folder)
        manifest = {"format": _FORMAT, "step": step, "files": files}
        write_synced(partial / MANIFEST, (json.dumps(manifest, indent=1) + "\n").encode())
        sync(partial)
        target = self.root / f"global_step_{step}"
        if target.exists():  # the same step of a history that was given up
            self._discard(target)
        _rename(partial, target)
        sync(self.root)
        self._point_to(step)
        self._prune()
        return Checkpoint(step=step, path=target)

    def all(self) -> list[Checkpoint]:
        """The whole ones, oldest first."""
        return _whole(self.root)

    def newest(self) -> Checkpoint | None:
        """The one to resume from."""
        return max(self.all(), key=lambda one: one.step, default=None)

    def sweep(self) -> None:
        """Remove what an earlier run left half-written or half-removed."""
        if self.root.is_dir():
            for path in sorted(self.root.iterdir()):
                if path.name.startswith("."):
                    self._discard(path)

    def _point_to(self, step: int) -> None:
        """Write the newest step into the file that verl's tools read."""
        replace_file(self.root / LATEST, f"{step}\n".encode(), synced=True)

    def _prune(self) -> None:
        if self._keep is not None:
            for old in self.all()[: -self._keep]:
                self._discard(old.path)

    def _discard(self, path: Path) -> None:
        """Rename first: a checkpoint that is half removed must not look like one, and whoever still writes
        into it under its old name finds nothing."""
        if path.is_dir():
            gone = self.root / f".{path.name.lstrip('.').split('.')[0]}.{secrets.token_hex(4)}.removed"
            _rename(path, gone)
            _remove_tree(gone)
        else:
            _unlink(path)


def locate(path: Path) -> Checkpoint | None:
    """The checkpoint that a person means: its own folder, or the newest of a run folder; None if neither."""
    name = _NAME.fullmatch(path.name)
    if name is not None and (path / MANIFEST).is_file():
        return Checkpoint(step=int(name[1]), path=path)
    found = _whole(path / CHECKPOINTS) or _whole(path)
    return found[-1] if found else None


def problems(checkpoint: Checkpoint) -> list[str]:
    """What is wrong with a checkpoint's files, a sentence each: read whole and compared with its manifest."""
    path = checkpoint.path / MANIFEST
    try:
        manifest = json.loads(path.read_bytes())
        files: dict[str, dict[str, Any]] = manifest["files"]
        wanted = {name: (int(entry["size"]), str(entry["sha256"])) for name, entry in files.items()}
        if (manifest["format"], manifest["step"]) != (_FORMAT, checkpoint.step):
            return [
                f"{path}: got format {manifest['format']} of step {manifest['step']}, "
                f"wanted format {_FORMAT} of step {checkpoint.step}"
            ]
    except (
        OSError,
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
        OverflowError,  # a size without end
        RecursionError,  # lists in lists, thousands of them
    ) as error:
        return [f"{path}: cannot be read: {type(error).__name__}: {error}"]
    with ThreadPoolExecutor(_VERIFIERS, thread_name_prefix="verify") as threads:
        found = threads.map(lambda item: _problem(checkpoint.path / item[0], *item[1]), wanted.items())
    return [text for text in found if text is not None]


def digest(path: Path) -> str:
    """SHA-256 of a file, hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _problem(path: Path, size: int, sha256: str) -> str | None:
    try:
        if (got := path.stat().st_size) != size:
            return f"{path}: has {got} bytes, wanted {size}"
        if digest(path) != sha256:
            return f"{path}: its bytes are not those that were written (SHA-256 differs)"
    except OSError as error:
        return f"{path}: {error.strerror or error}"
    return None


def _whole(root: Path) -> list[Checkpoint]:
    names = [(_NAME.fullmatch(path.name), path) for path in root.iterdir()] if root.is_dir() else []
    found = [
        Checkpoint(step=int(name[1]), path=path)
        for name, path in names
        if name is not None and (path / MANIFEST).is_file()
    ]
    return sorted(found, key=lambda one: one.step)


def _files(root: Path) -> dict[str, int]:
    """Relative name -> size of every file below."""
    return {str(path.relative_to(root)): path.stat().st_size for path in root.rglob("*") if not path.is_dir()}


# What changes the disk, a step each, as in `neoproto.files`: tests of crashes stop after every one of them.


def _mkdir(path: Path) -> None:
    path.mkdir()


def _rename(path: Path, target: Path) -> None:
    path.rename(target)


def _unlink(path: Path) -> None:
    path.unlink(missing_ok=True)


def _rmdir(path: Path) -> None:
    path.rmdir()


def _remove_tree(root: Path) -> None:
    for folder, _, names in os.walk(root, topdown=False):
        for name in names:
            _unlink(Path(folder) / name)
        _rmdir(Path(folder))
