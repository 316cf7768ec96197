"""Where metrics go: a list of trackers, each fed the same flat mapping once a step."""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

from neoproto.files import named_errors


class Tracker(Protocol):
    """One destination of metrics. `log` may be called with validation metrics of the same step again."""

    def log(self, metrics: Mapping[str, float], step: int) -> None: ...

    def close(self) -> None: ...


class JsonlTracker:
    """One JSON object a line: `{"step": n, "time": unix seconds, name: value, …}`.

    Written at once, so that a killed run keeps its lines; a line that does not fit on the disk is taken back.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = path.open("ab", buffering=0)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        row: dict[str, Any] = {"step": step, "time": round(time.time(), 3)}
        # JSON has no NaN; a metric that does not exist at this step (an empty group, say) is null.
        row |= {name: value if math.isfinite(value) else None for name, value in metrics.items()}
        with named_errors(self._path):
            append(self._file, (json.dumps(row) + "\n").encode())

    def close(self) -> None:
        self._file.close()


def append(file: io.FileIO, data: bytes) -> None:
    """Write at a file's end: all of it, or nothing.

    Raises:
        OSError: of writing; the file is as it was.
    """
    end = file.seek(0, os.SEEK_END)
    try:
        while data:
            data = data[file.write(data) :]
    except OSError:
        with contextlib.suppress(OSError):  # the first one is the cause
            file.truncate(end)
        raise


class TensorBoardTracker:
    """Event files for TensorBoard in `folder`; what earlier ones show of steps after `step` is hidden."""

    def __init__(self, folder: Path, step: int = 0) -> None:
        # torch's writer pulls TensorBoard in, a second of import that only those who ask for it should pay.
        from torch.utils.tensorboard import SummaryWriter

        # From the beginning too: a start without a checkpoint may follow one that came some way.
        self._writer: Any = SummaryWriter(log_dir=str(folder), purge_step=step + 1 if step else 0)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class Trackers:
    """All trackers of a run as one; closes each, whatever the others do."""

    def __init__(self, *trackers: Tracker) -> None:
        self._trackers = trackers

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        for tracker in self._trackers:
            tracker.log(metrics, step)

    def close(self) -> None:
        errors = []
        for tracker in self._trackers:
            try:
                tracker.close()
            except OSError as error:
                errors.append(error)
        if errors:
            raise errors[0]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
