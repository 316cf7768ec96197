"""The run's folder: where it is, what is in it from the start, and when it is refused."""

from __future__ import annotations

import logging
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from neoproto.config import RunConfig, load_config
from neoproto.errors import ConfigError
from neoproto.run.compose import compose, compose_run
from neoproto.run.folder import (
    check_folder,
    completed_steps,
    earlier_date,
    holds_run,
    mark_complete,
    mark_incomplete,
    next_epoch,
    open_run_log,
    run_folder,
    unused,
    write_config,
)


def config(run_dir: str | None = None, **trainer: Any) -> RunConfig:
    names = {"project_name": "p", "experiment_name": "e"}
    return load_config({"runtime": {"run_dir": run_dir}, "trainer": names | trainer})


def made(of: RunConfig) -> Path:
    with run_folder(of) as folder:
        return folder


def test_a_run_gets_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    first, second = made(config()), made(config())
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
    assert made(config("~/mine")) == tmp_path / "mine"
    assert made(config("~/mine")) == tmp_path / "mine", "a run that did not start left no metrics"


@pytest.mark.parametrize(
    "mode", [{"resume_mode": "disable"}, {"resume_mode": "path", "resume_from_path": "x"}]
)
def test_a_folder_with_a_run_in_it_is_gone_on_with_or_refused(tmp_path: Path, mode: dict[str, str]) -> None:
    folder = made(config(str(tmp_path)))
    assert not holds_run(folder)
    assert made(config(str(tmp_path), **mode)) == folder
    (folder / "metrics.jsonl").touch()
    assert holds_run(folder)
    said = f"^runtime.run_dir: {tmp_path} already holds a run; trainer.resume_mode=auto resumes it$"
    with pytest.raises(ConfigError, match=said):
        made(config(str(tmp_path), **mode))
    assert made(config(str(tmp_path))) == folder


def test_what_a_killed_writer_left_is_removed(tmp_path: Path) -> None:
    program = (
        "import os, pathlib, sys\n"
        "from neoproto import files\n"
        "files._rename = lambda *_: os.kill(os.getpid(), 9)\n"
        "files.replace_file(pathlib.Path(sys.argv[1]), b'x')\n"
    )
    killed = subprocess.run([sys.executable, "-c", program, str(tmp_path / "config.yaml")], check=False)
    assert killed.returncode == -signal.SIGKILL
    assert len(list(tmp_path.iterdir())) == 1
    theirs = tmp_path / ".download.part"
    theirs.touch()
    made(config(str(tmp_path)))
    assert [path.name for path in tmp_path.iterdir() if path.suffix == ".part"] == [theirs.name]


HOLD = """\
import sys, time
from neoproto.config import load_config
from neoproto.run.folder import run_folder
with run_folder(load_config({"runtime": {"run_dir": sys.argv[1]}})):
    import subprocess
    subprocess.Popen(["sleep", "30"], stdout=subprocess.DEVNULL)
    print("held", flush=True)  # a child that is being started has the lock for a moment
    time.sleep(30)
"""


def test_two_runs_cannot_use_one_folder(tmp_path: Path) -> None:
    """Whatever becomes of the first: with its process the lock goes, and not with what it started."""
    said = f"^runtime.run_dir: {tmp_path} is in use by another run$"
    with run_folder(config(str(tmp_path))), pytest.raises(ConfigError, match=said):
        made(config(str(tmp_path)))
    made(config(str(tmp_path)))
    other = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert other.stdout is not None
    with other.stdout as said:
        assert said.readline() == "held\n"
        with pytest.raises(ConfigError, match="in use"):
            made(config(str(tmp_path)))
        other.kill()
        other.wait()
    made(config(str(tmp_path)))


@pytest.mark.parametrize("name", ["runtime.run_dir", "trainer.default_local_dir"])
@pytest.mark.parametrize(
    ("below", "said"),
    [
        ("file", "cannot write to {wrong}.*: (Not a directory|File exists)$"),
        ("file/below", "cannot write to {wrong}.*: Not a directory$"),
        ("link", "cannot write to {wrong}.*: (No such file or directory|File exists)$"),
        ("n" * 300, "{wrong}: File name too long$"),
        ("/proc/below", "cannot write to /proc/below.*: No such file or directory$"),
    ],
)
def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path, name: str, below: str, said: str) -> None:
    """By the check before, which leaves nothing, as well."""
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to("nowhere/at/all")
    wrong = str(tmp_path / below)
    section, key = name.split(".")
    asked = load_config({section: {key: wrong}})
    for refuse in (check_folder, made):
        with pytest.raises(ConfigError, match=f"^{name}: {said.format(wrong=wrong)}"):
            refuse(asked)
        assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "link"]


def test_the_check_before_tells_whether_there_is_a_folder(tmp_path: Path) -> None:
    unnamed = load_config({"trainer": {"default_local_dir": str(tmp_path)}})
    assert check_folder(unnamed) is None
    assert check_folder(config(str(tmp_path / "a" / "b"))) is None
    assert list(tmp_path.iterdir()) == []
    assert check_folder(config(str(tmp_path))) == tmp_path
    (tmp_path / "metrics.jsonl").touch()
    assert check_folder(config(str(tmp_path))) == tmp_path
    with pytest.raises(ConfigError, match=f"^runtime.run_dir: {tmp_path} already holds a run"):
        check_folder(config(str(tmp_path), resume_mode="disable"))


def test_the_configuration_in_the_folder_is_one_that_runs(tmp_path: Path) -> None:
    """Whole and resolved: the same run can be started from it alone."""
    typed = [
        "trainer.seed=7",
        "data.train_files=[a.jsonl,b.jsonl]",
        f"runtime.run_dir={tmp_path}",
        "+smoke=tiny",
    ]
    mine = compose_run("ppo_monarch", [*typed, "runtime.env_vars.A=b", "topology=split_ppo"])
    write_config(made(mine), mine)
    assert load_config(compose("config", [], tmp_path)) == mine


def test_configurations_before_are_set_aside_and_all_are_kept(tmp_path: Path) -> None:
    """Of a file that is no text too."""
    assert list(made(config(str(tmp_path))).glob("config*")) == [], "it is written once the start is known"
    (tmp_path / "config.yaml").write_bytes(b"\xff\xfe")
    kept = [b"\xff\xfe"]
    for seed in (1, 1, 2, 3):
        write_config(tmp_path, config(seed=seed))
        if (now := (tmp_path / "config.yaml").read_bytes()) != kept[-1]:
            kept.append(now)
    names = ("config.superseded.yaml", "config.superseded.1.yaml", "config.superseded.2.yaml", "config.yaml")
    assert [(tmp_path / name).read_bytes() for name in names] == kept
    assert b"seed: 3" in kept[-1]


def test_a_configuration_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").mkdir()
    with pytest.raises(ConfigError, match=f"^{tmp_path}/config.yaml: cannot be written: Is a directory$"):
        write_config(tmp_path, config())


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("complete.json", b""),
        ("complete.json", b"[]"),
        ("complete.json", b"{}"),
        ("complete.json", b'{"steps": 1e999}'),
        ("complete.json", b"\xff"),
        ("weight_epoch", b"x"),
        ("weight_epoch", b"\xff"),
        ("weight_epoch", b""),
    ],
)
def test_a_small_file_that_is_damaged_is_named(tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=f"^{tmp_path}/{name} is damaged: [A-Z][A-Za-z]+Error: [^\n]+$"):
        completed_steps(tmp_path) if name == "complete.json" else next_epoch(tmp_path)


def test_no_two_starts_have_one_epoch(tmp_path: Path) -> None:
    assert [next_epoch(tmp_path) for _ in range(3)] == [0, 1, 2]
    assert next_epoch(tmp_path, at_least=7) == 7
    assert next_epoch(tmp_path, at_least=3) == 8
    assert [path.name for path in tmp_path.iterdir()] == ["weight_epoch"]


def test_a_run_is_complete_until_it_is_gone_on_with(tmp_path: Path) -> None:
    assert completed_steps(tmp_path) is None
    mark_incomplete(tmp_path)
    mark_complete(tmp_path, 6)
    assert completed_steps(tmp_path) == 6
    mark_incomplete(tmp_path)
    assert completed_steps(tmp_path) is None


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


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("data: 3", "is damaged: "),
        ("data: {date: soon}", "is damaged: ValueError: "),
        ("a: [", ":1: not YAML"),
    ],
)
def test_a_configuration_without_a_day_that_can_be_read_is_named(
    tmp_path: Path, content: str, said: str
) -> None:
    assert earlier_date(config(str(tmp_path))) is None
    (tmp_path / "config.yaml").write_text(content)
    with pytest.raises(ConfigError) as caught:
        earlier_date(config(str(tmp_path)))
    assert said in str(caught.value)
    assert str(caught.value).startswith(f"{tmp_path}/config.yaml")
    (tmp_path / "config.yaml").write_text("data: {date: 2026-02-28}")
    assert earlier_date(config(str(tmp_path))) == "2026-02-28"
    (tmp_path / "config.yaml").write_text("data: {}")
    assert earlier_date(config(str(tmp_path))) is None
