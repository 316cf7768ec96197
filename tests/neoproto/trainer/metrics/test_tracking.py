from __future__ import annotations

import errno
import io
import json
import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from neoproto.trainer.metrics.tracking import JsonlTracker, TensorBoardTracker, Trackers, append


def test_jsonl_rows_are_on_disk_before_close(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    tracker = JsonlTracker(path)
    tracker.log({"a/b": 1.5, "c": math.nan}, 3)
    row = json.loads(path.read_text())
    assert row.pop("time") > 0
    assert row == {"step": 3, "a/b": 1.5, "c": None}
    tracker.close()


def test_metrics_that_cannot_be_written_are_an_error_with_the_path() -> None:
    tracker = JsonlTracker(Path("/dev/full"))
    with pytest.raises(OSError, match=r"No space left on device: '/dev/full'$"):
        tracker.log({"a": 1.0}, 1)
    tracker.close()


class NearlyFull(io.FileIO):
    """Takes a few bytes at a time, and then no more."""

    room = 10

    def write(self, data: Any) -> int:
        if not self.room:
            raise OSError(errno.ENOSPC, "No space left on device")
        taken = super().write(data[: min(4, self.room)]) or 0
        self.room -= taken
        return taken


def test_a_row_is_whole_or_not_there(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b"before\n")
    with NearlyFull(path, "ab") as file:
        append(file, b"fits\n")
        with pytest.raises(OSError, match="No space left"):
            append(file, b"does not fit\n")
    assert path.read_bytes() == b"before\nfits\n"


def test_tensorboard_writes_event_files(tmp_path: Path) -> None:
    tracker = TensorBoardTracker(tmp_path)
    tracker.log({"actor/pg_loss": 0.25}, 1)
    tracker.close()
    (events,) = tmp_path.glob("events.out.tfevents.*")
    assert b"actor/pg_loss" in events.read_bytes()


def test_tensorboard_hides_what_earlier_files_show_of_later_steps(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for start, values in ((0, {0: 0.5, 7: 7.0}), (0, {0: 0.0, 1: 1.0, 2: 2.0, 3: 3.0}), (1, {2: 20.0})):
        tracker = TensorBoardTracker(tmp_path, start)
        for step, value in values.items():
            tracker.log({"a": value}, step)
        tracker.close()
        time.sleep(1.1)  # files are named, and read in order, by the second
    shown = EventAccumulator(str(tmp_path)).Reload().Scalars("a")
    assert [(event.step, event.value) for event in shown] == [(0, 0.0), (1, 1.0), (2, 20.0)]


class Closing:
    def __init__(self, error: OSError | None = None) -> None:
        self.closed, self.error = False, error

    def log(self, metrics: Mapping[str, float], step: int) -> None: ...

    def close(self) -> None:
        self.closed = True
        if self.error:
            raise self.error


def test_every_tracker_is_closed_although_one_fails() -> None:
    broken, fine = Closing(OSError("disk full")), Closing()
    with pytest.raises(OSError, match="disk full"), Trackers(broken, fine):
        pass
    assert fine.closed
