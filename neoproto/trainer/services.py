"""Services that keep metrics: Weights & Biases, MLflow. Optional packages, imported when one is opened.

Each is used from one thread only, the one of its `BackgroundTracker`.
"""

from __future__ import annotations

import json
import math
import os
import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from neoproto.errors import ConfigError

PACKAGES = {"wandb": "wandb", "mlflow": "mlflow-skinny"}
"""What to install for each; MLflow's small package has all that is needed here."""
PARAMS_AT_ONCE, METRICS_AT_ONCE = 100, 1000
LONGEST_PARAM = 500
"""Characters of a configuration value; servers of MLflow refuse longer ones."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunLabels:
    """What a service is told of a run.

    Attributes:
        config: the resolved configuration, as plain containers.
        folder: of the run; what a service keeps on this machine goes below it.
    """

    project: str
    experiment: str
    config: Mapping[str, Any]
    folder: Path


def check_installed(loggers: tuple[str, ...]) -> None:
    """Raises ConfigError: a service was chosen whose package is missing; says what to type."""
    missing = [name for name in loggers if name in PACKAGES and find_spec(name) is None]
    if missing:
        raise ConfigError(
            *(
                f"trainer.logger: {name!r} is chosen but not installed; pip install {PACKAGES[name]}"
                for name in missing
            )
        )


class WandbTracker:
    """A run of Weights & Biases. Its variables count: `WANDB_MODE=offline`, an own server, a key."""

    def __init__(self, labels: RunLabels) -> None:
        import wandb

        self._run: Any = wandb.init(
            project=labels.project,
            name=labels.experiment,
            config=dict(labels.config),
            dir=str(labels.folder),
            settings=wandb.Settings(console="off", silent=True),
        )
        offline = bool(self._run.offline)
        self.place = f"{self._run.settings.sync_dir} (wandb sync uploads it)" if offline else self._run.url

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self._run.log(finite(metrics), step=step)

    def close(self, failed: bool) -> None:
        self._run.finish(exit_code=int(failed))


class MlflowTracker:
    """A run of MLflow, in the experiment named by the project.

    At `MLFLOW_TRACKING_URI`, or in files below the run's folder. MLflow's global state is not touched.
    """

    def __init__(self, labels: RunLabels) -> None:
        uri = os.environ.get("MLFLOW_TRACKING_URI")
        if not uri:
            uri = (labels.folder / "mlruns").absolute().as_uri()
            # MLflow wants to be told that its file store is meant; a database needs more packages.
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        from mlflow.entities import Param
        from mlflow.tracking import MlflowClient

        self.place = uri
        self._client: Any = MlflowClient(tracking_uri=uri)
        experiment = self._experiment(labels.project)
        self._run_id: str = self._client.create_run(experiment, run_name=labels.experiment).info.run_id
        self._client.set_tag(self._run_id, "run_folder", str(labels.folder))
        params = [Param(mlflow_name(key), value[:LONGEST_PARAM]) for key, value in flattened(labels.config)]
        for start in range(0, len(params), PARAMS_AT_ONCE):
            self._client.log_batch(self._run_id, params=params[start : start + PARAMS_AT_ONCE])

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        rows = [Metric(mlflow_name(name), value, now, step) for name, value in finite(metrics).items()]
        for start in range(0, len(rows), METRICS_AT_ONCE):
            self._client.log_batch(self._run_id, metrics=rows[start : start + METRICS_AT_ONCE])

    def close(self, failed: bool) -> None:
        self._client.set_terminated(self._run_id, "FAILED" if failed else "FINISHED")

    def _experiment(self, name: str) -> str:
        from mlflow.exceptions import MlflowException

        found = self._client.get_experiment_by_name(name)
        if found is None:
            try:
                return str(self._client.create_experiment(name))
            except MlflowException:
                # Another run made it at the same moment, or it cannot be made: then there still is none.
                found = self._client.get_experiment_by_name(name)
                if found is None:
                    raise
        return str(found.experiment_id)


def finite(metrics: Mapping[str, float]) -> dict[str, float]:
    """Without what is NaN or infinite, which services draw badly or refuse."""
    return {name: float(value) for name, value in metrics.items() if math.isfinite(value)}


def mlflow_name(name: str) -> str:
    """MLflow's names have letters, digits and `_-. /:`; an `@` is spelled as verl spells it there."""
    return re.sub(r"[^\w\-. /:]", "_", name.replace("@", "_at_"), flags=re.ASCII)


def flattened(tree: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Dotted keys and their values as text; lists are values."""
    if isinstance(tree, Mapping) and tree:
        for key, value in tree.items():
            yield from flattened(value, f"{prefix}.{key}" if prefix else str(key))
    else:
        yield prefix, tree if isinstance(tree, str) else json.dumps(tree, default=str, ensure_ascii=False)
