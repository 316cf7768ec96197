"""Services that keep metrics: Weights & Biases, MLflow. Optional packages, imported when one is opened.

Each is used from one thread only, the one of its `BackgroundTracker`. A run folder has one run in each, also
after a resume or a restart. No service can take a value back: `begin` marks what is superseded.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import secrets
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from neoproto.errors import ConfigError
from neoproto.trainer.metrics.service_runs import RunStart, ServiceRuns

PACKAGES = {"wandb": "wandb", "mlflow": "mlflow-skinny"}
"""What to install for each; MLflow's small package has all that is needed here."""
PARAMS_AT_ONCE, METRICS_AT_ONCE = 100, 1000
LONGEST_PARAM = 500
"""Characters of a configuration value; servers of MLflow refuse longer ones."""
STEP, START = "training/global_step", "training/start"
"""The step of a row; the number of the start that logged it, in rows of the second and later ones."""
FOLDER_STORE = "mlruns"
LONGEST_TAG = 5000
"""Characters of a tag of MLflow; of more starts the newest are kept."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunLabels:
    """What a service gets of a run.

    Attributes:
        config: the resolved configuration, as plain containers.
        folder: of the run; what a service keeps on this machine goes below it.
        runs: which run a service has for this folder already.
    """

    project: str
    experiment: str
    config: Mapping[str, Any]
    folder: Path
    runs: ServiceRuns


def check_installed(loggers: tuple[str, ...]) -> None:
    """Raises ConfigError: a service was chosen whose package is missing; names the install command."""
    missing = [name for name in loggers if name in PACKAGES and find_spec(name) is None]
    if missing:
        raise ConfigError(
            *(
                f"trainer.logger: {name!r} is chosen but not installed; pip install {PACKAGES[name]}"
                for name in missing
            )
        )


@contextmanager
def temporary_files_in(folder: Path) -> Iterator[None]:
    """Make temporary folders there inside the block.

    Importing wandb makes two. A controller that is killed leaves them, and nothing of a run may stay outside
    its folder.
    """
    folder.mkdir(exist_ok=True)
    before, tempfile.tempdir = tempfile.tempdir, str(folder)
    try:
        yield
    finally:
        tempfile.tempdir = before


class WandbTracker:
    """A run of Weights & Biases. Its variables count: `WANDB_MODE=offline`, an own server, a key.

    W&B's own step may never fall, or a row is dropped. So it is the step of the run plus the number of steps
    that were superseded, and charts take `training/global_step` for their horizontal axis.
    """

    def __init__(self, labels: RunLabels) -> None:
        with temporary_files_in(labels.folder / "wandb"):
            import wandb

        known = labels.runs.of("wandb").get("id")
        run_id = os.environ.get("WANDB_RUN_ID") or known or secrets.token_hex(4)
        labels.runs.keep("wandb", {"id": run_id})
        self._run: Any = wandb.init(
            project=labels.project,
            name=labels.experiment,
            config=dict(labels.config),
            dir=str(labels.folder),
            id=run_id,
            resume=None if "WANDB_RESUME" in os.environ else "allow",
            settings=wandb.Settings(console="off", silent=True),
        )
        self._run.define_metric("*", step_metric=STEP)
        self._start = self._shift = 0
        offline = bool(self._run.offline)
        self.place = f"{self._run.settings.sync_dir} (wandb sync uploads it)" if offline else self._run.url

    def begin(self, starts: Sequence[RunStart]) -> None:
        self._start, self._shift = starts[-1].start, sum(start.superseded for start in starts)
        if len(starts) > 1:
            self._run.config.update({"starts": [asdict(one) for one in starts]}, allow_val_change=True)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        row = finite(metrics) | {STEP: step} | started(self._start)
        self._run.log(row, step=step + self._shift)

    def close(self, failed: bool) -> None:
        self._run.finish(exit_code=int(failed))


class MlflowTracker:
    """A run of MLflow, in the experiment named by the project.

    At `MLFLOW_TRACKING_URI`, or in files below the run's folder. MLflow's global state is not touched.
    """

    def __init__(self, labels: RunLabels) -> None:
        given = os.environ.get("MLFLOW_TRACKING_URI")
        uri = given or (labels.folder / FOLDER_STORE).absolute().as_uri()
        if not given:
            # MLflow has to be set to use its file store; a database needs more packages.
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        from mlflow.tracking import MlflowClient

        self.place = re.sub(r"//[^/@]*@", "//", uri)  # without a password
        self._client: Any = MlflowClient(tracking_uri=uri)
        self._start = 0
        # The store in the folder is kept by its name: the folder may be moved.
        # Others by a digest: a URI may hold a password, and run folders are shared.
        where = {"uri": hashlib.sha256(given.encode()).hexdigest()[:16] if given else FOLDER_STORE}
        known = labels.runs.of("mlflow")
        run = self._known(known["id"]) if known.get("uri") == where["uri"] and "id" in known else None
        if run is None:
            experiment = self._experiment(labels.project)
            run = self._client.create_run(experiment, run_name=labels.experiment)
        else:
            self._client.update_run(run.info.run_id, status="RUNNING")
        self._run_id: str = run.info.run_id
        labels.runs.keep("mlflow", where | {"id": self._run_id})
        self._client.set_tag(self._run_id, "run_folder", str(labels.folder))
        self._log_params(labels.config, run.data.params)

    def begin(self, starts: Sequence[RunStart]) -> None:
        self._start = starts[-1].start
        if len(starts) > 1:
            newest = [asdict(one) for one in starts]
            while len(text := json.dumps(newest)) > LONGEST_TAG:
                del newest[0]
            self._client.set_tag(self._run_id, "starts", text)
        if lines := [superseded_line(start) for start in starts if start.superseded]:
            self._client.set_tag(self._run_id, "superseded", "; ".join(lines)[-LONGEST_TAG:])

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        values = finite(metrics) | started(self._start)
        rows = [Metric(mlflow_name(name), value, now, step) for name, value in values.items()]
        for start in range(0, len(rows), METRICS_AT_ONCE):
            self._client.log_batch(self._run_id, metrics=rows[start : start + METRICS_AT_ONCE])

    def close(self, failed: bool) -> None:
        self._client.set_terminated(self._run_id, "FAILED" if failed else "FINISHED")

    def _log_params(self, config: Mapping[str, Any], known: Mapping[str, str]) -> None:
        """A parameter of MLflow cannot be changed: the new value of one that differs is a tag."""
        from mlflow.entities import Param, RunTag

        values = {mlflow_name(key): value[:LONGEST_PARAM] for key, value in flattened(config)}
        params = [Param(name, value) for name, value in values.items() if name not in known]
        tags = [
            RunTag(f"changed.{name}", value)
            for name, value in values.items()
            if known.get(name, value) != value
        ]
        for start in range(0, len(params), PARAMS_AT_ONCE):
            self._client.log_batch(self._run_id, params=params[start : start + PARAMS_AT_ONCE])
        for start in range(0, len(tags), PARAMS_AT_ONCE):
            self._client.log_batch(self._run_id, tags=tags[start : start + PARAMS_AT_ONCE])

    def _known(self, run_id: str) -> Any:
        """The run of that id; None if it was deleted."""
        from mlflow.exceptions import MlflowException

        try:
            run = self._client.get_run(run_id)
        except MlflowException as error:
            if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                raise
            return None
        return run if run.info.lifecycle_stage == "active" else None

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


def started(start: int) -> dict[str, float]:
    """The number of the start that logs a row, from the second on: it tells rows of one step apart."""
    return {START: float(start)} if start > 1 else {}


def superseded_line(start: RunStart) -> str:
    """For a person: which values to leave out."""
    at = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(start.time))
    return f"steps {start.first} to {start.last} as logged before {at}: taken again by start {start.start}"


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
