"""What a loop told its tracker and its console."""

from __future__ import annotations

from collections.abc import Mapping

from neoproto.trainer.metrics.record import StepReport


class Recorder:
    """Tracker and console at once."""

    def __init__(self) -> None:
        self.logged: list[tuple[int, dict[str, float]]] = []
        self.reports: list[StepReport] = []
        self.validations: list[tuple[int, dict[str, float]]] = []

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self.logged.append((step, dict(metrics)))

    def close(self) -> None: ...

    def step(self, report: StepReport) -> None:
        self.reports.append(report)

    def validation(self, step: int, metrics: Mapping[str, float]) -> None:
        self.validations.append((step, dict(metrics)))

    def steps_logged(self) -> list[tuple[int, dict[str, float]]]:
        return [(step, row) for step, row in self.logged if "training/global_step" in row]
