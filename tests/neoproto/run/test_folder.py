"""The run's folder: where it is, what is in it from the start, and when it is refused."""

from __future__ import annotations

import logging
import signal
from pathlib import Path

import pytest

from neoproto.config import RunConfig, load_config
from neoproto.errors import ConfigError
from neoproto.run.compose import compose, compose_run
from neoproto.run.folder import make_run_folder, open_run_log, unused


def config(**runtime: str) -> RunConfig:
    return load_config({"runtime": runtime, "trainer": {"project_name": "p", "experiment_name": "e"}})


def test_a_run_gets_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    first, second = make_run_folder(config()), make_run_folder(config())
    assert first.parent == second.parent == tmp_path / "outputs" / "p" / "e"
    assert first != second
    assert first.is_absolute()


def test_two_runs_in_one_second_are_told_apart(tmp_path: Path) -> None:
    for expected in ("x", "x_1", "x_2"):
        folder = unused(tmp_path, "x")
        assert folder == tmp_path / expected
        folder.mkdir()


def test_a_folder_that_is_named_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert make_run_folder(config(run_dir="~/mine")) == tmp_path / "mine"
    assert make_run_folder(config(run_dir="~/mine")) == tmp_path / "mine", (
        "a run that did not start left no metrics"
    )


def test_a_folder_with_a_run_in_it_is_refused(tmp_path: Path) -> None:
    folder = make_run_folder(config(run_dir=str(tmp_path)))
    (folder / "metrics.jsonl").touch()
    with pytest.raises(ConfigError, match=f"^runtime.run_dir: {tmp_path} already holds a run$"):
        make_run_folder(config(run_dir=str(tmp_path)))


@pytest.mark.parametrize("name", ["runtime.run_dir", "trainer.default_local_dir"])
def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").touch()
    wrong = tmp_path / "file" / "below"
    section, key = name.split(".")
    with pytest.raises(ConfigError, match=f"^{name}: cannot write to {wrong}.*: Not a directory$"):
        make_run_folder(load_config({section: {key: str(wrong)}}))


def test_the_configuration_in_the_folder_is_one_that_runs(tmp_path: Path) -> None:
    """Whole and resolved: the same run can be started from it alone."""
    typed = [
        "trainer.seed=7",
        "data.train_files=[a.jsonl,b.jsonl]",
        f"runtime.run_dir={tmp_path}",
        "+smoke=tiny",
    ]
    mine = compose_run("ppo_monarch", [*typed, "runtime.env_vars.A=b", "topology=split_ppo"])
    make_run_folder(mine)
    assert load_config(compose("config", [], tmp_path)) == mine


@pytest.mark.usefixtures("run_log")
def test_the_log_takes_what_the_package_says(tmp_path: Path) -> None:
    open_run_log(tmp_path / "run.log")
    logging.getLogger("neoproto.anything").info("hello")
    logging.getLogger("elsewhere").info("not ours")
    try:
        raise ValueError("bad")
    except ValueError:
        logging.getLogger("neoproto.run").exception("failed")
    text = (tmp_path / "run.log").read_text()
    assert "INFO neoproto.anything: hello\n" in text
    assert "ValueError: bad" in text
    assert "not ours" not in text


@pytest.mark.usefixtures("run_log")
def test_the_controller_says_where_it_is_when_it_is_asked(tmp_path: Path) -> None:
    open_run_log(tmp_path / "run.log")
    signal.raise_signal(signal.SIGUSR2)
    text = (tmp_path / "run.log").read_text()
    assert "test_the_controller_says_where_it_is_when_it_is_asked" in text
