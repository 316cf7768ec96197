"""From `trainer.logger` to open trackers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from neoproto.config import RunConfig
from neoproto.errors import ConfigError
from neoproto.trainer.services import MlflowTracker, RunLabels, WandbTracker
from neoproto.trainer.tracking import (
    BackgroundTracker,
    JsonlTracker,
    NotOpened,
    TensorBoardTracker,
    Tracker,
    Trackers,
)

SERVICES: dict[str, Callable[[RunLabels], WandbTracker | MlflowTracker]] = {
    "wandb": WandbTracker,
    "mlflow": MlflowTracker,
}
HINTS = {"wandb": "; WANDB_MODE=offline needs no network and no key", "mlflow": ""}


def open_trackers(config: RunConfig, folder: Path, say: Callable[[str], None]) -> Trackers:
    """Open the trackers of a run. `metrics.jsonl` is always written: reports and comparisons read it.

    Args:
        folder: of the run.
        say: shows a person where a service keeps the metrics, and what becomes of it later.

    Raises:
        ConfigError: a service cannot be opened.
    """
    chosen = config.trainer.logger
    trackers: list[Tracker] = [JsonlTracker(folder / "metrics.jsonl")]
    try:
        if "tensorboard" in chosen:
            trackers.append(TensorBoardTracker(folder / "tensorboard"))
        trackers += [open_service(name, config, folder, say) for name in SERVICES if name in chosen]
    except BaseException:
        Trackers(*trackers).close(failed=True)
        raise
    return Trackers(*trackers)


def open_service(name: str, config: RunConfig, folder: Path, say: Callable[[str], None]) -> BackgroundTracker:
    """Open one service, in a thread of its own.

    Raises:
        ConfigError: it cannot be opened.
    """
    labels = RunLabels(
        project=config.trainer.project_name,
        experiment=config.trainer.experiment_name,
        config=config.model_dump(mode="json"),
        folder=folder,
    )

    def make() -> Tracker:
        tracker = SERVICES[name](labels)
        say(f"{name}: {tracker.place}")
        return tracker

    try:
        return BackgroundTracker(name, make, say)
    except NotOpened as error:
        raise ConfigError(f"trainer.logger: {name} cannot be used: {error}{HINTS[name]}") from error
