"""The command in process: exit codes, the one line on stderr, and that bad input starts no process."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from neoproto.config import load_config
from neoproto.errors import NonFiniteLoss, StackError
from neoproto.run import cli, session
from neoproto.run.cli import main
from neoproto.run.compose import compose
from neoproto.runtime import Runtime
from neoproto.runtime.signals import Terminated
from tests.neoproto.run.inputs import json_lines, model_folder, overrides, parquet, row, words

Capture = pytest.CaptureFixture[str]
TOO_WIDE = """\
defaults: [ppo_monarch, _self_]
topology:
  clusters: [{name: c, nnodes: 1, n_gpus_per_node: 2, device_type: cpu}]
  device_pools: [{name: p, cluster: c, nnodes: 1, n_gpus_per_node: 4}]
  models:
    - {name: actor, worker: actor, resource_pool: p, device_range: [0, 2]}
    - {name: rollout, worker: rollout, resource_pool: p, device_range: [2, 4]}
    - {name: critic, worker: critic, resource_pool: p, device_range: [0, 2]}
"""


class InputAcceptedError(Exception):
    """The input was accepted."""


@pytest.fixture(autouse=True)
def no_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run_log: None) -> None:
    """Nothing is started, whatever the input; the working folder is an empty one."""

    def refuse(*_: Any, **__: Any) -> None:
        raise InputAcceptedError("Runtime.from_config was called")

    monkeypatch.setattr(Runtime, "from_config", refuse)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")


@pytest.fixture(params=["run", "dry run"])
def dry(request: pytest.FixtureRequest) -> list[str]:
    """What has to be refused by both."""
    return ["dry_run=true"] if request.param == "dry run" else []


def ended(capsys: Capture, *argv: str) -> tuple[int, str, str]:
    code = main(argv)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def refused(capsys: Capture, *argv: str) -> str:
    """The one line that bad input ends with."""
    code, _, errors = ended(capsys, *argv)
    assert code == 2, errors
    assert errors.endswith("\n")
    assert errors.count("\n") == 1, errors
    assert errors.startswith("error: ")
    assert list(Path.cwd().iterdir()) == [], "bad input leaves no run folder"
    return errors.removeprefix("error: ").rstrip("\n")


def test_good_input_gets_as_far_as_the_runtime(capsys: Capture, model: Path, train_file: Path) -> None:
    """So that the tests below are about what they say: this is where all of them would have gone on."""
    code, out, errors = ended(capsys, *overrides(model, train_file))
    (log,) = Path.cwd().glob("outputs/neoproto/ppo/*/run.log")
    assert code == 1
    assert errors == f"error: InputAcceptedError: Runtime.from_config was called (details: {log})\n"
    assert f"run folder: {log.parent}\n" in out
    assert "Traceback" in log.read_text()


# -- bad input ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words_typed", "said"),
    [
        (["trainer.sed=1"], "trainer.sed: unknown key; did you mean 'seed'?"),
        (["nope.x=1"], "nope: unknown key"),
        (["data.train_batch_size=few"], "data.train_batch_size: wanted an integer, got 'few' (str)"),
        (["data.train_batch_size"], "data.train_batch_size: cannot be read as key=value"),
        (["--config-name", "nope"], "--config-name nope: no such config among the shipped ones"),
        (["--config-dir", "nowhere"], "--config-dir: no such folder: nowhere"),
        (
            ["actor_rollout_ref.actor.ppo_mini_batch_size=3", "critic.ppo_mini_batch_size=4"],
            "actor_rollout_ref.actor.ppo_mini_batch_size: got 3 prompts, wanted a divisor of "
            "data.train_batch_size=4 prompts",
        ),
        (
            [
                "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=5",
                "critic.ppo_micro_batch_size_per_gpu=16",
            ],
            "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu: got 5 samples, wanted a divisor of the 16",
        ),
    ],
)
def test_a_wrong_value_is_one_line(
    capsys: Capture, model: Path, train_file: Path, words_typed: list[str], said: str
) -> None:
    options = [word for word in words_typed if word.startswith("--") or "=" not in word]
    values = [word for word in words_typed if word not in options]
    assert refused(capsys, *options, *overrides(model, train_file, *values)).startswith(said)


def test_files_are_asked_for(capsys: Capture) -> None:
    assert refused(capsys, "data=files") == "data.train_files: wanted a file or null, got an empty list"


def test_a_topology_that_does_not_fit(capsys: Capture, tmp_path: Path, model: Path, train_file: Path) -> None:
    (tmp_path / "wide.yaml").write_text(TOO_WIDE)
    typed = overrides(model, train_file, "trainer.device_type=auto")
    text = refused(capsys, "--config-dir", str(tmp_path), "--config-name", "wide", *typed)
    assert text.startswith("topology.device_pools[0]")


def test_several_mistakes_are_several_lines(capsys: Capture) -> None:
    code, _, errors = ended(capsys, "trainer.sed=1", "nope=1")
    assert code == 2
    first, *listed = errors.splitlines()
    assert first == "error: 2 problems:"
    assert [line.partition(";")[0] for line in sorted(listed)] == [
        "- nope: unknown key",
        "- trainer.sed: unknown key",
    ]


def without(path: Path, *names: str) -> Path:
    for name in names:
        (path / name).unlink()
    return path


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda path: path, "no such folder: {path}"),
        (
            lambda path: without(model_folder(path), "tokenizer.json", "tokenizer_config.json"),
            "{path} is not a Hugging Face model folder, it lacks a tokenizer",
        ),
        (lambda path: without(model_folder(path), "config.json"), "it lacks config.json"),
        (lambda path: without(model_folder(path), "model.safetensors"), "it lacks weights"),
        (lambda path: model_folder(path, num_attention_heads=1, hidden_size=48), "heads of size 48"),
        (lambda path: model_folder(path, max_position_embeddings=19), "has 19 positions"),
        (lambda path: model_folder(path, architectures=["LlamaModel"]), "has no language-model head"),
        (
            lambda path: (model_folder(path) / "model.safetensors").write_bytes(b"version https://git-lfs"),
            "{path}/model.safetensors is damaged",
        ),
        (lambda path: (model_folder(path) / "config.json").write_text("{"), "config.json cannot be read"),
        (
            lambda path: (model_folder(path) / "tokenizer.json").write_text("{"),
            "{path}/tokenizer.json cannot be read",
        ),
    ],
)
def test_a_wrong_model_folder(
    capsys: Capture, tmp_path: Path, train_file: Path, make: Callable[[Path], Any], said: str
) -> None:
    folder = tmp_path / "model"
    make(folder)
    text = refused(capsys, *overrides(folder, train_file))
    assert text.startswith("actor_rollout_ref.model.path: ")
    assert said.format(path=folder) in text


def test_a_wrong_folder_for_the_critic(
    capsys: Capture, tmp_path: Path, model: Path, train_file: Path
) -> None:
    text = refused(capsys, *overrides(model, train_file, f"critic.model.path={tmp_path}/none"))
    assert text == f"critic.model.path: no such folder: {tmp_path}/none"
    damaged = model_folder(tmp_path / "damaged")
    (damaged / "model.safetensors").write_bytes(b"")
    text = refused(capsys, *overrides(model, train_file, f"critic.model.path={damaged}"))
    assert text.startswith(f"critic.model.path: {damaged}/model.safetensors is damaged")


def test_a_model_without_a_chat_template(capsys: Capture, tmp_path: Path, train_file: Path) -> None:
    folder = model_folder(tmp_path / "model", chat_template=False)
    text = refused(capsys, *overrides(folder, train_file))
    assert text.startswith(f"data.chat_template: the tokenizer in {folder} has no chat template")
    assert "data.chat_template=plain" in text
    assert main(overrides(folder, train_file, "data.chat_template=plain")) == 1


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("missing.jsonl", None, "data.train_files: {path} does not exist"),
        ("empty.jsonl", "", "data.train_files: {path} is empty"),
        ("blank.jsonl", "\n\n", "data.train_files: {path} has no rows"),
        ("rows.csv", "a,b\n", "data.train_files: {path}: unknown kind of file '.csv'"),
        ("broken.jsonl", '{"prompt": \n', "{path}:1: not a JSON object on one line"),
        ("broken.parquet", "no", "{path} cannot be read as Parquet"),
    ],
)
def test_a_wrong_data_file(
    capsys: Capture, tmp_path: Path, model: Path, name: str, content: str | None, said: str
) -> None:
    path = tmp_path / name
    if content is not None:
        path.write_text(content)
    assert refused(capsys, *overrides(model, path)).startswith(said.format(path=path))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"prompt": None}, "no prompt"),
        ({"data_source": None}, "no data_source"),
        ({"reward_model": None}, "no reward_model"),
        ({"prompt": "just text"}, "prompt: a list of messages"),
        ({"prompt": [{"role": "user"}]}, "prompt[0].content: a string is needed, got None"),
        ({"reward_model": {"style": "exact_match"}}, "reward_model.ground_truth is missing"),
        ({"extra_info": [1]}, "extra_info: an object is needed, got [1]"),
    ],
)
def test_a_malformed_row_is_named_by_its_line(
    capsys: Capture, tmp_path: Path, model: Path, changes: dict[str, Any], said: str
) -> None:
    path = json_lines(tmp_path / "rows.jsonl", [*words(4), row(**changes), *words(3)])
    assert refused(capsys, *overrides(model, path)).startswith(f"{path}:5: {said}")


def test_a_parquet_file_without_a_column(capsys: Capture, tmp_path: Path, model: Path) -> None:
    path = parquet(tmp_path / "rows.parquet", [row(reward_model=None) for _ in range(4)])
    text = refused(capsys, *overrides(model, path))
    assert text.startswith(f"{path} has no column reward_model; it has prompt, data_source")


def test_a_wrong_validation_file_is_named_by_its_own_key(
    capsys: Capture, tmp_path: Path, model: Path, train_file: Path
) -> None:
    text = refused(capsys, *overrides(model, train_file, f"data.val_files={tmp_path}/none.jsonl"))
    assert text == f"data.val_files: {tmp_path}/none.jsonl does not exist"


def test_fewer_prompts_than_a_batch(capsys: Capture, tmp_path: Path, model: Path) -> None:
    path = json_lines(tmp_path / "rows.jsonl", words(3))
    assert refused(capsys, *overrides(model, path)) == "data.train_batch_size=4: the data have only 3 prompts"


def test_an_unknown_task(capsys: Capture, model: Path) -> None:
    typed = [f"actor_rollout_ref.model.path={model}", "data.task.name=spell_backwards"]
    text = refused(capsys, *typed)
    assert text.startswith(
        "data.task.name: reasoning-gym has no task 'spell_backwards'; did you mean spell_back"
    )


# -- prompts longer than the limit -------------------------------------------------------------------------


@pytest.fixture
def long_file(tmp_path: Path) -> Path:
    """Eight prompts of six tokens, and two, on lines 3 and 9, of 23."""
    rows = words(8)
    rows.insert(2, row("x" * 20))
    rows.insert(8, row("y" * 20))
    return json_lines(tmp_path / "long.jsonl", rows)


def test_an_overlong_prompt_is_an_error_by_default(capsys: Capture, model: Path, long_file: Path) -> None:
    text = refused(capsys, *overrides(model, long_file))
    assert text.startswith(
        f"data.max_prompt_length=16: 2 of 10 prompts are longer, first {long_file}:3 with 23 tokens"
    )


@pytest.mark.parametrize(
    ("truncation", "note"),
    [
        ("left", "note: 2 training prompts were cut to data.max_prompt_length\n"),
        ("right", "note: 2 training prompts were cut to data.max_prompt_length\n"),
        ("filter", "note: 2 training prompts longer than data.max_prompt_length were left out\n"),
    ],
)
def test_overlong_prompts_are_cut_or_left_out_and_counted(
    capsys: Capture, model: Path, long_file: Path, truncation: str, note: str
) -> None:
    code, out, errors = ended(capsys, *overrides(model, long_file, f"data.truncation={truncation}"))
    assert (code, "InputAcceptedError" in errors) == (1, True)
    assert note in out


def test_no_prompt_is_short_enough(capsys: Capture, model: Path, train_file: Path) -> None:
    text = refused(
        capsys, *overrides(model, train_file, "data.truncation=filter", "data.max_prompt_length=3")
    )
    assert text == "data.max_prompt_length=3: none of the 8 prompts is short enough"


# -- reward functions --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "name", "said"),
    [
        (None, "compute_score", "path: no such file: {path}"),
        (
            "import nowhere_to_be_found\n",
            "compute_score",
            "path: {path} cannot be imported: line 1: ModuleNotFound",
        ),
        ("x = (\n", "compute_score", "path: {path} cannot be imported: line 1: SyntaxError"),
        ("raise SystemExit(3)\n", "compute_score", "path: {path} cannot be imported: line 1: SystemExit"),
        ("def other(): ...\n", "compute_score", "name: {path} has no 'compute_score'; its functions: other"),
        ("compute_score = 3\n", "compute_score", "name: 'compute_score' in {path} is not callable, it is 3"),
        ("def judge(text): ...\n", "judge", "name: judge(text) in {path} cannot be called as judge("),
    ],
)
def test_a_reward_function_that_cannot_be_used(
    capsys: Capture, tmp_path: Path, model: Path, train_file: Path, source: str | None, name: str, said: str
) -> None:
    path = tmp_path / "reward.py"
    if source is not None:
        path.write_text(source)
    custom = "reward.custom_reward_function"
    typed = overrides(model, train_file, f"{custom}.path={path}", f"{custom}.name={name}")
    assert refused(capsys, *typed).startswith(f"{custom}.{said.format(path=path)}")


@pytest.mark.parametrize(
    ("source", "said"),
    [
        (None, ".path: no such file: {path}"),
        ("import numpyy\n", ".path: {path} cannot be imported: line 1: ModuleNotFound"),
        ("def other(): ...\n", ".name: {path} has no 'compute_advantages'; its functions: other"),
        (
            "def compute_advantages(batch): ...\n",
            ".name: compute_advantages(batch) in {path} cannot be called",
        ),
        (
            "def compute_advantages(i, o): return i.rewards_bt.sum(1), i.rewards_bt\n",
            ": compute_advantages in {path} should return advantages as a float tensor [2, 4], got",
        ),
    ],
)
def test_an_advantage_estimator_that_cannot_be_used(
    capsys: Capture, tmp_path: Path, model: Path, train_file: Path, source: str | None, said: str
) -> None:
    path = tmp_path / "mine.py"
    if source is not None:
        path.write_text(source)
    custom = "algorithm.custom_advantage_function"
    typed = ["algorithm.adv_estimator=custom", "algorithm.truncated=zero", f"{custom}.path={path}"]
    text = refused(capsys, *overrides(model, train_file, "actor_rollout_ref.rollout.n=1", *typed))
    assert text.startswith(f"{custom}{said.format(path=path)}")


def test_completion_is_a_command_of_its_own(capsys: Capture) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["dry_run=true", "--shell-completion", "install=bash"])
    assert caught.value.code == 2
    assert "--shell-completion install=bash is a command of its own" in capsys.readouterr().err


def test_rows_that_no_built_in_reward_fits(capsys: Capture, tmp_path: Path, model: Path) -> None:
    strange = row(reward_model={"style": "model", "ground_truth": "x"})
    path = json_lines(tmp_path / "rows.jsonl", [*words(4), strange])
    text = refused(capsys, *overrides(model, path))
    assert text.startswith(f"{path}:5: reward.name=auto: no built-in reward for reward_model.style='model'")
    assert main(overrides(model, path, "reward.name=exact_match")) == 1


# -- the rest of the command -------------------------------------------------------------------------------


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
        (KeyboardInterrupt(), 130, "interrupted; everything of the run is closed\n"),
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
    error: BaseException,
    code: int,
    said: str,
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(Runtime, "from_config", fail)
    got, _, errors = ended(capsys, *overrides(model, train_file))
    (log,) = Path.cwd().glob("outputs/neoproto/ppo/*/run.log")
    assert (got, errors) == (code, said.format(log=log))


def test_a_wrong_stack_is_refused_by_name(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise StackError("torchmonarch is not installed (known: ==0.7.0): pip install torchmonarch==0.7.0")

    monkeypatch.setattr(cli, "check_stack", refuse)
    monkeypatch.setattr(session, "run", lambda *_: pytest.fail("went on"))
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
