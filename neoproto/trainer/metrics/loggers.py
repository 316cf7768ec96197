"""The services of `trainer.logger` for one run, whose training may begin more than once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from neoproto.config import RunConfig
from neoproto.errors import ConfigError
from neoproto.trainer.metrics.background import BackgroundTracker, NotOpened
from neoproto.trainer.metrics.service_runs import ServiceRuns
from neoproto.trainer.metrics.services import MlflowTracker, RunLabels, WandbTracker

SERVICES: dict[str, Callable[[RunLabels], WandbTracker | MlflowTracker]] = {
    "wandb": WandbTracker,
    "mlflow": MlflowTracker,
}
HINTS = {"wandb": "; WANDB_MODE=offline needs no network and no key", "mlflow": ""}


class Services:
    """The open services as one tracker of the loop, which does not end with it: `with` closes them."""

    def __init__(self, trackers: Sequence[BackgroundTracker], runs: ServiceRuns) -> None:
        self._trackers, self._runs = tuple(trackers), runs

    def begin(self, step: int) -> None:
        """A start of the run begins, from `step`. To be called before `metrics.jsonl` is cut."""
        if self._trackers or self._runs.exists:  # without services too: a later start may have them again
            self._runs.begin(step)
        for tracker in self._trackers:
            tracker.begin(self._runs.starts)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        for tracker in self._trackers:
            tracker.log(metrics, step)

    def close(self) -> None:
        """The loop has ended; another may follow."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for tracker in self._trackers:
            tracker.close(failed=kind is not None)


def open_services(config: RunConfig, folder: Path, print_line: Callable[[str], None]) -> Services:
    """Open the services that are chosen, each in a thread of its own.

    Args:
        folder: of the run.
        print_line: shows a person a line: where a service keeps the metrics, and what becomes of it later.

    Raises:
        ConfigError: one cannot be opened; the others are closed. Or `services.json` is damaged.
    """
    runs = ServiceRuns(folder)
    opened: list[BackgroundTracker] = []
    try:
        for name in SERVICES:
            if name in config.trainer.logger:
                opened.append(open_service(name, config, folder, runs, print_line))
    except ConfigError:
        for tracker in opened:
            tracker.close(failed=True)
        raise
    return Services(opened, runs)


def open_service(
    name: str, config: RunConfig, folder: Path, runs: ServiceRuns, print_line: Callable[[str], None]
) -> BackgroundTracker:
    """Raises ConfigError: the service cannot be opened."""
    labels = RunLabels(
        project=config.trainer.project_name,
        experiment=config.trainer.experiment_name,
        config=config.model_dump(mode="json"),
        folder=folder,
        runs=runs,
    )

    def make() -> WandbTracker | MlflowTracker:
        tracker = SERVICES[name](labels)
        print_line(f"{name}: {tracker.place}")
        return tracker

    try:
        return BackgroundTracker(name, make, print_line)
    except NotOpened as error:
        raise ConfigError(f"trainer.logger: {name} cannot be used: {error}{HINTS[name]}") from error
