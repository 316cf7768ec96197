from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from neoproto.config import RunConfig, load_config
from neoproto.errors import ConfigError
from neoproto.trainer.metrics import loggers
from neoproto.trainer.metrics.loggers import open_services
from neoproto.trainer.metrics.service_runs import RunStart
from neoproto.trainer.metrics.services import RunLabels


def config(*names: str) -> RunConfig:
    trainer = {"logger": list(names), "project_name": "letters", "experiment_name": "first"}
    return load_config({"trainer": trainer, "data": {"train_files": ["x.jsonl"]}})


class FakeService:
    made: RunLabels
    newest: FakeService
    failed: bool | None = None
    place = "somewhere"

    def __init__(self, labels: RunLabels) -> None:
        FakeService.made, FakeService.newest = labels, self
        self.rows: list[int] = []

    def begin(self, starts: Sequence[RunStart]) -> None:
        self.rows.append(-starts[-1].step)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self.rows.append(step)

    def close(self, failed: bool) -> None:
        self.failed = failed


class Refusing(FakeService):
    def __init__(self, labels: RunLabels) -> None:
        raise OSError("no key")


def test_a_service_outlives_a_loop_and_is_told_how_the_run_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(loggers.SERVICES, "mlflow", FakeService)

    def run() -> None:
        with open_services(config("mlflow"), tmp_path, print) as services:
            for step in (1, 2):
                services.begin(step)
                services.log({"a": 1.0}, step + 1)
                services.close()
            raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        run()
    assert (FakeService.newest.rows, FakeService.newest.failed) == ([-1, 2, -2, 3], True)


def test_a_service_is_told_the_projects_names_and_the_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(loggers.SERVICES, "wandb", FakeService)
    said: list[str] = []
    with open_services(config("console", "wandb"), tmp_path, said.append) as services:
        services.log({"a": 1.0}, 1)
    made = FakeService.made
    assert (made.project, made.experiment, made.folder) == ("letters", "first", tmp_path)
    assert made.config["trainer"]["logger"] == ["console", "wandb"]
    assert said == ["wandb: somewhere"]


def test_a_service_that_refuses_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(loggers.SERVICES, "wandb", Refusing)
    with pytest.raises(ConfigError) as caught:
        open_services(config("wandb"), tmp_path, print)
    assert str(caught.value) == (
        "trainer.logger: wandb cannot be used: OSError: no key; "
        "WANDB_MODE=offline needs no network and no key"
    )


def test_starts_are_noted_for_services_alone_or_where_they_were_noted_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(loggers.SERVICES, "mlflow", FakeService)
    for names, noted in ((("console",), False), (("mlflow",), True), (("console",), True)):
        with open_services(config(*names), tmp_path, print) as services:
            services.begin(0)
        assert (tmp_path / "services.json").exists() == noted
    assert len(services._runs.starts) == 2
