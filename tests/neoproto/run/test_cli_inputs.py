"""Bad input of every kind: one line of the command, and no process is started."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from neoproto.run.cli import main
from tests.neoproto.run.command import Capture, ended, refused
from tests.neoproto.run.inputs import json_lines, model_folder, overrides, parquet, row, words

pytestmark = pytest.mark.usefixtures("no_processes")

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


def test_rows_that_no_built_in_reward_fits(capsys: Capture, tmp_path: Path, model: Path) -> None:
    strange = row(reward_model={"style": "model", "ground_truth": "x"})
    path = json_lines(tmp_path / "rows.jsonl", [*words(4), strange])
    text = refused(capsys, *overrides(model, path))
    assert text.startswith(f"{path}:5: reward.name=auto: no built-in reward for reward_model.style='model'")
    assert main(overrides(model, path, "reward.name=exact_match")) == 1
