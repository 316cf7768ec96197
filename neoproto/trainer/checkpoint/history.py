"""What a run has written down so far, and how it is cut back to where a checkpoint was taken.

Files that grow by a line are cut at the length they had then, samples of later steps set aside.
Nothing is deleted: what is cut goes to `metrics.superseded.jsonl` and its like.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from neoproto.files import sync

METRICS, PROMPTS, VALIDATION, SAMPLES = "metrics.jsonl", "prompts.jsonl", "validation", "samples"
GROWING = (METRICS, PROMPTS)
_STEP = re.compile(r"step_(\d+)\.jsonl")


class PromptLog:
    """Which prompts each step trained on: `{"step": n, "uids": […], "serials": […]}`, a line a step.

    Args:
        path: the file, which is appended to; None writes nothing.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._path = path

    @property
    def on(self) -> bool:
        return self._path is not None

    def log(self, step: int, uids: Sequence[str], serials: Sequence[int] | None = None) -> None:
        """Book a step; `serials` are the tickets' in the asynchronous modes."""
        if self._path is not None:
            row: dict[str, object] = {"step": step, "uids": list(uids)}
            if serials is not None:
                row["serials"] = list(serials)
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row, ensure_ascii=False) + "\n")


def positions(run_dir: Path) -> dict[str, int]:
    """How long each growing file is now, in bytes."""
    return {name: _size(run_dir / name) for name in GROWING}


def sync_history(run_dir: Path) -> None:
    """Sync the growing files to the disk: a checkpoint refers to their content."""
    for name in GROWING:
        if (run_dir / name).exists():
            sync(run_dir / name)


def cut_history(run_dir: Path, at: Mapping[str, int], step: int) -> int:
    """Take back everything after `step`.

    Args:
        at: how long the growing files were then; those not named are cut whole.

    Returns:
        Lines that were set aside.
    """
    lines = sum(_cut(run_dir / name, at.get(name, 0)) for name in GROWING)
    last = step or -1  # from the beginning, the validation of step 0 too
    for folder in (run_dir / VALIDATION, run_dir / SAMPLES):
        for path in sorted(folder.iterdir()) if folder.is_dir() else ():
            name = _STEP.fullmatch(path.name)
            if name is not None and int(name[1]) > last:
                _cut(path, 0)
                path.unlink()
    return lines


def _cut(path: Path, length: int) -> int:
    """Copied first, cut then: a kill in between leaves lines in both, never in neither."""
    if _size(path) <= length:
        return 0
    with path.open("rb") as file:
        file.seek(length)
        rest = file.read()
    superseded = path.with_name(f"{path.stem}.superseded{path.suffix}")
    with superseded.open("ab") as kept:
        kept.write(rest if rest.endswith(b"\n") else rest + b"\n")  # a kill may have cut the last line
    sync(superseded)
    os.truncate(path, length)
    return rest.count(b"\n")


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0
