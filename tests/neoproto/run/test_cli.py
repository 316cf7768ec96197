"""The command in process: exit codes, the one line on stderr, and what is printed."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
import yaml

from neoproto.config import load_config
from neoproto.errors import NonFiniteLoss, StackError
from neoproto.run import cli, launch
from neoproto.run.cli import main
from neoproto.run.compose import compose
from neoproto.runtime import Runtime
from neoproto.runtime.signals import Terminated
from neoproto.trainer.metrics import services
from tests.neoproto.run.command import Capture, FakeRuntime, ended, refused
from tests.neoproto.run.inputs import json_lines, overrides, words

pytestmark = pytest.mark.usefixtures("no_processes")


@pytest.fixture(params=["run", "dry run"])
def dry(request: pytest.FixtureRequest) -> list[str]:
    """What has to be refused by both."""
    return ["dry_run=true"] if request.param == "dry run" else []


def test_good_input_gets_as_far_as_the_runtime(capsys: Capture, model: Path, train_file: Path) -> None:
    """So that the tests below are about what they say: this is where all of them would have gone on."""
    code, out, errors = ended(capsys, *overrides(model, train_file))
    (log,) = Path.cwd().glob("outputs/neoproto/ppo/*/run.log")
    assert code == 1
    assert errors == f"error: InputAcceptedError: workers were started (details: {log})\n"
    assert f"run folder: {log.parent}\n" in out
    assert "Traceback" in log.read_text()


def test_completion_is_a_command_of_its_own(capsys: Capture) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["dry_run=true", "--shell-completion", "install=bash"])
    assert caught.value.code == 2
    assert "--shell-completion install=bash is a command of its own" in capsys.readouterr().err


def test_help_names_the_configurations(capsys: Capture) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--help"])
    out = capsys.readouterr().out
    assert caught.value.code == 0
    for text in ("python -m neoproto.run", "--config-name", "--config-dir", "ppo_monarch, grpo_monarch"):
        assert text in out


def test_an_unknown_option_is_argparses_business(capsys: Capture) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--nope"])
    assert caught.value.code == 2
    assert "--nope" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["ppo_monarch", "grpo_monarch"])
def test_a_printed_configuration_is_one_that_runs(capsys: Capture, tmp_path: Path, name: str) -> None:
    typed = ["--config-name", name, "trainer.seed=7", "actor_rollout_ref.model.path='a: b'"]
    code, out, errors = ended(capsys, *typed, "--cfg", "job")
    assert (code, errors) == (0, "")
    assert yaml.safe_load(out)["trainer"]["seed"] == 7
    (tmp_path / "printed.yaml").write_text(out)
    again = compose("printed", [], tmp_path)
    assert load_config(again) == load_config(yaml.safe_load(out))
    assert load_config(again).actor_rollout_ref.model.path == "a: b"


def test_options_and_values_may_be_mixed(capsys: Capture) -> None:
    code, out, _ = ended(capsys, "trainer.seed=1", "--cfg", "job", "data.seed=2", "-cn", "grpo_monarch")
    printed = yaml.safe_load(out)
    assert code == 0
    assert (printed["trainer"]["seed"], printed["data"]["seed"]) == (1, 2)
    assert printed["algorithm"]["adv_estimator"] == "grpo"


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (NonFiniteLoss("loss: nan\nand more"), 1, "error: loss: nan (details: {log})\n"),
        (ZeroDivisionError("by zero"), 1, "error: ZeroDivisionError: by zero (details: {log})\n"),
        (SystemExit(0), 1, "error: the run was left by SystemExit: 0 ({here}) (details: {log})\n"),
        (SystemExit(), 1, "error: the run was left by SystemExit ({here}) (details: {log})\n"),
        (GeneratorExit(), 1, "error: the run was left by GeneratorExit ({here}) (details: {log})\n"),
        (KeyboardInterrupt(), 1, "error: the run was left by KeyboardInterrupt ({here}) (details: {log})\n"),
        (None, 130, "interrupted; everything of the run is closed\n"),
        (
            Terminated(signal.SIGTERM),
            143,
            "ended by SIGTERM; everything of the run is closed\n",
        ),
        (Terminated(signal.SIGHUP), 129, "ended by SIGHUP; everything of the run is closed\n"),
        (Terminated(signal.SIGPIPE), 141, "ended by SIGPIPE; everything of the run is closed\n"),
    ],
)
def test_a_run_that_fails_ends_with_one_line_and_its_code(
    capsys: Capture,
    monkeypatch: pytest.MonkeyPatch,
    model: Path,
    train_file: Path,
    error: BaseException | None,
    code: int,
    said: str,
) -> None:
    """No error is a real Ctrl-C."""

    def fail(*_: Any, **__: Any) -> None:
        if error is None:
            signal.raise_signal(signal.SIGINT)
            return
        raise error

    here = f"{__file__}, line {fail.__code__.co_firstlineno + 4}"

    monkeypatch.setattr(Runtime, "from_config", fail)
    got, _, errors = ended(capsys, *overrides(model, train_file))
    (log,) = Path.cwd().glob("outputs/neoproto/ppo/*/run.log")
    assert (got, errors) == (code, said.format(log=log, here=here))


def test_a_wrong_stack_is_refused_by_name(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise StackError("torchmonarch is not installed (known: ==0.7.0): pip install torchmonarch==0.7.0")

    monkeypatch.setattr(cli, "check_stack", refuse)
    monkeypatch.setattr(launch, "run", lambda *_: pytest.fail("went on"))
    assert refused(capsys).startswith("torchmonarch is not installed")


def test_a_folder_that_holds_a_run_is_refused(
    capsys: Capture, tmp_path: Path, model: Path, train_file: Path
) -> None:
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "metrics.jsonl").touch()
    words_typed = [f"runtime.run_dir={tmp_path}/old", "trainer.resume_mode=disable"]
    text = refused(capsys, *overrides(model, train_file, *words_typed))
    assert text.startswith(f"runtime.run_dir: {tmp_path}/old already holds a run; trainer.resume_mode=auto")


def test_a_run_without_a_checkpoint_starts_from_the_beginning(
    capsys: Capture, tmp_path: Path, model: Path, train_file: Path
) -> None:
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "metrics.jsonl").touch()
    _, out, errors = ended(capsys, *overrides(model, train_file, f"runtime.run_dir={tmp_path}/old"))
    assert "InputAcceptedError" in errors
    assert "note: this folder's run has no checkpoint: starting from the beginning, its metrics are" in out


def test_the_backend_and_the_folder_are_checked_before_there_is_one(
    capsys: Capture, tmp_path: Path, model: Path, train_file: Path, dry: list[str]
) -> None:
    typed = [*overrides(model, train_file), *dry]
    assert (
        refused(capsys, *typed, "runtime.backend=ray")
        == "runtime.backend: no backend 'ray'; there is monarch"
    )
    text = refused(capsys, *typed, f"runtime.run_dir={train_file}")
    assert text == f"runtime.run_dir: cannot write to {train_file}: Not a directory"


def test_what_a_folders_run_cannot_go_on_with_is_said(
    capsys: Capture, tmp_path: Path, model: Path, train_file: Path, dry: list[str]
) -> None:
    old = tmp_path / "old"
    step = old / "checkpoints" / "global_step_1"
    step.mkdir(parents=True)
    (step / "manifest.json").write_text("{}")
    (old / "config.yaml").write_text("as: it was\n")
    code, _, errors = ended(capsys, *overrides(model, train_file), f"runtime.run_dir={old}", *dry)
    assert code == 2
    assert f"{step}/manifest.json: cannot be read" in errors
    (old / "complete.json").write_text("[]")
    text = refused(capsys, *overrides(model, train_file), f"runtime.run_dir={old}", *dry)
    assert text.startswith(f"{old}/complete.json is damaged: TypeError")
    assert (old / "config.yaml").read_text() == "as: it was\n"


def test_a_complete_run_says_so_and_starts_nothing(
    capsys: Capture, tmp_path: Path, model: Path, train_file: Path
) -> None:
    typed = overrides(model, train_file, f"runtime.run_dir={tmp_path}/old", "trainer.total_training_steps=4")
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "complete.json").write_text('{"steps": 4}')
    code, out, errors = ended(capsys, *typed)
    assert (code, errors) == (0, "")
    assert out.splitlines()[-1].startswith(
        "this run is complete: 4 steps are trained, the model is in model/;"
    )
    assert FakeRuntime.made == 0
    code, _, errors = ended(capsys, *typed, "trainer.total_training_steps=5")
    assert (code, "InputAcceptedError" in errors) == (1, True)


@pytest.mark.parametrize(
    ("name", "said"), [("nowhere", "no such folder:"), ("here", "no checkpoint (global_ste")]
)
def test_a_path_without_a_checkpoint_leaves_no_run_folder(
    capsys: Capture, tmp_path: Path, model: Path, train_file: Path, name: str, said: str, dry: list[str]
) -> None:
    typed = [*dry, "trainer.resume_mode=path", f"trainer.resume_from_path={tmp_path}/{name}"]
    text = refused(capsys, *overrides(model, train_file, *typed))
    assert text.startswith(f"trainer.resume_from_path: {said}")
    assert text.endswith(f" {tmp_path}/{name}")


def test_a_printed_configuration_is_checked_too(capsys: Capture) -> None:
    code, out, errors = ended(capsys, "trainer.sed=1", "--cfg", "job")
    assert (code, errors) == (2, "error: trainer.sed: unknown key; did you mean 'seed'?\n")
    assert yaml.safe_load(out)["trainer"]["sed"] == 1, "printed, to be looked at"


def test_too_few_prompts_are_refused_before_a_model_is_made(
    capsys: Capture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("neoproto.run.prepare.model_folder", lambda *_: pytest.fail("a model was made"))
    rows = json_lines(tmp_path / "few.jsonl", words(16))
    said = refused(capsys, "data=files", f"data.train_files={rows}")
    assert said == "data.train_batch_size=64: the data have only 16 prompts"


def test_without_arguments_it_says_what_it_is_about_to_do(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cli, "execute", lambda *_: 0)
    assert ended(capsys)[1].startswith("no arguments: training ppo_monarch, the default task and model")
    assert ended(capsys, "--config-name", "ppo_monarch") == (0, "", "")


@pytest.mark.parametrize(
    ("name", "mode", "said"),
    [
        ("run", [], "runtime.run_dir={}"),
        ("a run", ["trainer.resume_mode=disable"], "'runtime.run_dir={}' trainer.resume_mode=auto"),
    ],
)
def test_an_interrupted_run_says_how_to_resume_it(
    capsys: Capture,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    model: Path,
    train_file: Path,
    name: str,
    mode: list[str],
    said: str,
) -> None:
    folder = tmp_path / name

    def interrupt(*_: Any, **__: Any) -> None:
        step = folder / "checkpoints" / "global_step_20"
        step.mkdir(parents=True)
        (step / "manifest.json").write_text("{}")
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(FakeRuntime, "model_resource_pool", interrupt)
    code, _, errors = ended(capsys, *overrides(model, train_file, f"runtime.run_dir={folder}", *mode))
    assert (code, errors) == (
        130,
        "interrupted; everything of the run is closed; "
        f"the same command with {said.format(folder)} resumes it from step 20\n",
    )


def test_a_missing_package_is_said_before_anything_is_made(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    model: Path,
    train_file: Path,
) -> None:
    found = services.find_spec
    missing: Any = lambda name: None if name == "wandb" else found(name)  # noqa: E731
    monkeypatch.setattr(services, "find_spec", missing)
    assert main(overrides(model, train_file, "trainer.logger=[console,wandb]")) == 2
    assert capsys.readouterr().err == (
        "error: trainer.logger: 'wandb' is chosen but not installed; pip install wandb\n"
    )
    assert list(Path().iterdir()) == []
