"""The command in process: short names, and that bad input starts no process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from neoproto.config import load_config
from neoproto.eval import session
from neoproto.eval.cli import expanded, main
from neoproto.run.compose import compose
from neoproto.run.folder import EPOCH
from neoproto.runtime import Runtime
from neoproto.trainer.checkpoint.history import METRICS
from neoproto.trainer.validation import ValidationSample
from tests.neoproto.run.inputs import json_lines, model_folder, words


def test_short_names_are_written_out_and_other_keys_kept() -> None:
    assert expanded(["model=a=b", "n=4", "data.seed=1"]) == [
        "trainer.experiment_name=eval",
        "actor_rollout_ref.model.path=a=b",
        "actor_rollout_ref.rollout.val_kwargs.n=4",
        "data.seed=1",
    ]


@pytest.mark.parametrize("mark", ["+", "++"])
def test_short_names_may_have_pluses(mark: str) -> None:
    assert expanded([f"{mark}model=a"])[1:] == ["actor_rollout_ref.model.path=a"]
    assert expanded([f"{mark}data.seed=1"])[1:] == [f"{mark}data.seed=1"]


@pytest.mark.parametrize("mark", ["", "++"])
def test_files_to_evaluate_on_are_enough(mark: str) -> None:
    overrides = expanded([f"{mark}data.val_files=x.jsonl", "trainer.experiment_name=mine"])
    config = load_config(compose("ppo_monarch", overrides))
    assert config.data.val_files == config.data.train_files == ("x.jsonl",)
    assert config.trainer.experiment_name == "mine"
    assert "data=files" not in expanded(["data=words", "data.val_files=x"])


@pytest.fixture
def nothing_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("Runtime.from_config was called")

    monkeypatch.setattr(Runtime, "from_config", refuse)
    monkeypatch.chdir(tmp_path)


@pytest.mark.usefixtures("nothing_starts")
@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("model=missing", "actor_rollout_ref.model.path: no such folder"),
        ("data.val_files=missing.jsonl", "data.val_files: missing.jsonl does not exist"),
        ("n=0", "actor_rollout_ref.rollout.val_kwargs.n"),
        ("k=3", "k: "),
        ("data.max_response_length=100", "positions"),
        ("data.val_files=5", "error: data.val_files: wanted a string or a list of strings, got 5 (int)"),
        ("data.val_files=[]", "error: data.val_files: "),
        ("data.val_files=[1,a]", "error: data.val_files[0]: wanted a string, got 1 (int)"),
        ("+data.val_files=missing.jsonl", "data.val_files"),
        ("++data.val_files=missing.jsonl", "data.val_files: missing.jsonl does not exist"),
        ("++model=/nope", "actor_rollout_ref.model.path: no such folder"),
    ],
)
def test_bad_input_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], override: str, said: str
) -> None:
    model = model_folder(tmp_path / "m")
    files = json_lines(tmp_path / "val.jsonl", words(3))
    typed = [f"model={model}", f"data.val_files={files}", "data.max_prompt_length=16"]
    code = main([*typed, "data.max_response_length=4", override])
    printed = capsys.readouterr().err
    assert code == 2, printed
    assert said in printed
    assert printed.count("\n") == 1, printed
    assert "train_files" not in printed
    assert not (tmp_path / "outputs").exists()


@pytest.mark.usefixtures("nothing_starts")
@pytest.mark.parametrize("file", [METRICS, EPOCH])
@pytest.mark.parametrize("dry", [False, True])
def test_the_folder_of_a_training_run_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], file: str, dry: bool
) -> None:
    files, run = json_lines(tmp_path / "val.jsonl", words(3)), tmp_path / "run"
    run.mkdir()
    (run / file).write_text("0\n")
    typed = [f"model={model_folder(tmp_path / 'm')}", f"data.val_files={files}", f"runtime.run_dir={run}"]
    assert main([*typed, f"dry_run={dry}"]) == 2
    said = f"error: runtime.run_dir: {run} holds a training run; wanted another folder\n"
    assert capsys.readouterr().err == said
    assert [path.name for path in run.iterdir()] == [file]


@pytest.mark.usefixtures("nothing_starts")
def test_the_date_that_a_template_tells_is_kept_in_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, files = model_folder(tmp_path / "m"), json_lines(tmp_path / "val.jsonl", words(3))
    template = model / "chat_template.jinja"
    template.write_text("{{ strftime_now('%d%m') }}" + template.read_text())
    typed = [f"model={model}", f"data.val_files={files}", f"runtime.run_dir={tmp_path / 'run'}"]
    typed += ["data.max_prompt_length=32", "data.max_response_length=4"]
    monkeypatch.setattr(session, "open_run_log", lambda _: None)
    for day in ("2026-02-28", "2026-03-01"):
        monkeypatch.setattr("neoproto.run.prepare.today", lambda day=day: day)
        assert main(typed) == 1  # when the runtime is to be started
        written = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
        assert str(written["data"]["date"]) == "2026-02-28"


@pytest.mark.usefixtures("nothing_starts")
def test_a_dry_run_only_checks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = model_folder(tmp_path / "m")
    files = json_lines(tmp_path / "val.jsonl", words(3))
    typed = [f"model={model}", f"data.val_files={files}", "n=8", "dry_run=true"]
    assert main([*typed, "data.max_prompt_length=16", "data.max_response_length=4"]) == 0
    printed = capsys.readouterr().out
    assert "mean@8: 3 questions x 8 answers" in printed
    assert "nothing was started" in printed
    assert not (tmp_path / "outputs").exists()


def sample(
    uid: str, vote: str | None, accuracy: float, label: str = "mean@2", source: str = "s"
) -> ValidationSample:
    return ValidationSample(
        step=0,
        label=label,
        uid=uid,
        data_source=source,
        prompt="",
        answer="words of its own",
        ground_truth="",
        score=accuracy,
        accuracy=accuracy,
        vote=vote,
    )


def test_metrics_by_data_source_and_way_of_sampling() -> None:
    samples = [
        sample("a", "3", 1),
        sample("a", "3", 1),
        sample("b", "4", 0),
        sample("b", "", 0),
        sample("a", "3", 1, "greedy"),
        sample("b", "5", 0, "greedy"),
    ]
    assert session.metrics_of(samples) == {
        "s/greedy/mean@1": 0.5,
        "s/sampled/mean@2": 0.5,
        "s/sampled/pass@1": 0.5,
        "s/sampled/pass@2": 0.5,
        "s/sampled/maj@2": 0.5,
    }


def test_there_is_no_majority_where_the_judge_tells_no_votes() -> None:
    told = [sample("a", None, 0), sample("a", "3", 1)]
    untold = [sample("b", None, accuracy, source="t") for accuracy in (0, 1)]
    metrics = session.metrics_of([*told, *untold, sample("b", None, 1, "greedy", source="t")])
    assert metrics["s/sampled/maj@2"] == 0.5
    assert not [name for name in metrics if name.startswith("t/") and "maj" in name]
    assert session.without_majority(metrics) == ["t/sampled"]


def test_without_arguments_it_says_what_it_is_about_to_do(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("neoproto.eval.cli.execute", lambda _: 0)
    assert main([]) == 0
    assert capsys.readouterr().out.startswith("no arguments: measuring the built-in model")
