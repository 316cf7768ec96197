"""From the command line's words to a configuration, or to one sentence about what is wrong with them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import hydra
import pytest
from hydra.errors import MissingConfigException

from neoproto.config import CONFIG_NAMES
from neoproto.errors import ConfigError
from neoproto.run.compose import compose, compose_run

MINE = """\
defaults:
  - ppo_monarch
  - override data: mine
  - _self_
trainer:
  experiment_name: mine
"""
MY_DATA = """\
defaults:
  - spell_backward
  - _self_
train_batch_size: 32
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's own configurations, and a working folder that is neither theirs nor the repository."""
    configs = tmp_path / "my configs"
    (configs / "data").mkdir(parents=True)
    (configs / "mine.yaml").write_text(MINE)
    (configs / "data" / "mine.yaml").write_text(MY_DATA)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    return configs


@pytest.mark.parametrize("name", CONFIG_NAMES)
def test_shipped_names_compose_from_any_folder(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config = compose_run(name, [])
    assert config.trainer.experiment_name == name.removesuffix("_monarch")


def test_values_are_what_hydra_reads() -> None:
    config = compose_run(
        "ppo_monarch",
        [
            "data.train_batch_size=32",
            "actor_rollout_ref.actor.optim.lr=1e-4",
            "trainer.logger=[console,tensorboard]",
            "trainer.total_training_steps=null",
            "actor_rollout_ref.model.path='/models/a b'",
            "runtime.env_vars.FOO=bar",
            "+runtime.env_vars.BAR='1'",
            "++data.task.options={min_word_len: 4, max_word_len: 4}",
        ],
    )
    assert config.data.train_batch_size == 32
    assert config.actor_rollout_ref.actor.optim.lr == 1e-4
    assert config.trainer.logger == ("console", "tensorboard")
    assert config.trainer.total_training_steps is None
    assert config.actor_rollout_ref.model.path == "/models/a b"
    assert config.runtime.env_vars == {"FOO": "bar", "BAR": "1"}
    assert config.data.task.options == {"min_word_len": 4, "max_word_len": 4}


def test_a_group_is_chosen_by_name() -> None:
    config = compose_run("ppo_monarch", ["data=files", "data.train_files=a.jsonl", "topology=split_ppo"])
    assert config.data.train_files == ("a.jsonl",)
    assert config.data.max_prompt_length == 512
    assert config.topology is not None
    assert [model.device_range for model in config.topology.models] == [(0, 1), (1, 2), (0, 1)]
    assert compose_run("ppo_monarch", ["model@actor_rollout_ref.model=tiny"]).uses_critic
    assert not compose_run("ppo_monarch", ["algorithm=grpo"]).uses_critic


def test_a_group_is_added_and_a_section_left_out() -> None:
    assert compose_run("ppo_monarch", ["+smoke=tiny"]).trainer.total_training_steps == 3
    assert "critic" not in compose("ppo_monarch", ["~critic"])


def test_a_value_wins_over_a_group_chosen_after_it() -> None:
    assert compose_run("ppo_monarch", ["data.train_batch_size=16", "+smoke=tiny"]).data.train_batch_size == 16


def test_own_configurations_build_on_ours(folder: Path) -> None:
    config = compose_run("mine", ["data.max_response_length=6"], folder)
    assert config.trainer.experiment_name == "mine"
    assert (config.data.train_batch_size, config.data.max_response_length) == (32, 6)
    assert config.data.task.name == "spell_backward"
    assert compose_run("mine", ["data=spell_backward"], folder).data.train_batch_size == 64
    assert compose_run("ppo_monarch", ["data=mine"], folder).data.train_batch_size == 32


def test_an_own_file_wins_over_a_shipped_one_of_its_name(folder: Path) -> None:
    (folder / "data" / "spell_backward.yaml").write_text("train_batch_size: 16\n")
    assert compose_run("ppo_monarch", [], folder).data.train_batch_size == 16


def test_a_relative_config_dir_is_taken_from_the_working_folder(folder: Path) -> None:
    assert compose_run("mine", [], Path("..") / folder.name).trainer.experiment_name == "mine"


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["nope=1"], "nope: unknown key; there is 'runtime'"),
        (["trainr.seed=1"], "trainr: unknown key; did you mean 'trainer'?"),
        (["trainer.sed=1"], "trainer.sed: unknown key; did you mean 'seed'?"),
        (["+trainer.sed=1"], "trainer.sed: unknown key; did you mean 'seed'?"),
        (["actor_rollout_ref.actor.optim.lrr=1"], "actor_rollout_ref.actor.optim.lrr: unknown key"),
        (
            ["actor_rollout_ref.actor.use_dynamic_bsz=true"],
            "actor_rollout_ref.actor.use_dynamic_bsz: not supported: batches are cut by samples",
        ),
        (["data.train_batch_size=many"], "data.train_batch_size: wanted an integer, got 'many' (str)"),
        (["data.train_batch_size="], "data.train_batch_size: wanted an integer, got '' (str)"),
        (["runtime.env_vars.FOO=1"], "runtime.env_vars.FOO: wanted a string, got 1 (int)"),
        (["actor_rollout_ref.model=tiny"], "actor_rollout_ref.model: wanted a mapping, got 'tiny' (str)"),
        (["data=files"], "data.train_files: wanted a file or null, got an empty list"),
        (
            ["data=nope"],
            "--config-name ppo_monarch: In 'ppo_monarch': Could not find 'data/nope' "
            "Available options in 'data': chain_sum; files; gsm_symbolic; spell_backward",
        ),
        (["+smoke=nope"], "--config-name ppo_monarch: In 'ppo_monarch': Could not find 'smoke/nope'"),
        (["smoke=tiny"], "--config-name ppo_monarch: Could not override 'smoke'. No match"),
        (["~nope"], "--config-name ppo_monarch: Could not delete from config. 'nope' does not exist"),
        (["trainer=3"], "trainer: the name of one of its files is needed, got 3"),
        (["topology=null"], "topology: the name of one of its files is needed, got null"),
        (["data.train_batch_size"], "data.train_batch_size: cannot be read as key=value ("),
        (["=3"], "=3: no key before the equals sign"),
        (["data.train_files=[a"], "data.train_files=[a: cannot be read as key=value ("),
        (["data.train_files=/a b=c"], "data.train_files=/a b=c: cannot be read as key=value ("),
        (["topology.models[0].name=x"], "topology.models[0].name=x: cannot be read as key=value ("),
        (["data.train_files=a,b"], "data.train_files: one value is needed, got several (a,b)"),
        (
            ["trainer.seed=1e-6,"],
            "trainer.seed=1e-6,: cannot be read as key=value (mismatched input at its end);",
        ),
        (
            ["trainer.seed=" + "9" * 5000],
            f"trainer.seed={'9' * 106}…: cannot be read as key=value (Exceeds",
        ),
        (["a=" + "[" * 900], f"a={'[' * 117}…: cannot be read as key=value ("),
        (["trainer.seed=1\nb=2"], "trainer.seed=1\\nb=2: cannot be read as key=value ("),
        (["~data=3"], "data: the name of one of its files is needed, got 3"),
        (["model=x"], "model: got x; a model's folder is actor_rollout_ref.model.path=x"),
        (["hydra.run.dir=x"], "hydra.run.dir: Hydra's own options are not used"),
        (["hydra/launcher=basic"], "hydra/launcher: Hydra's own options are not used"),
        (
            ["trainer.project_name=${nowhere}"],
            "--config-name ppo_monarch: Interpolation key 'nowhere' not found full_key: trainer.project_name",
        ),
        (["trainer.seed=???"], "--config-name ppo_monarch: MissingMandatoryValue while resolving"),
    ],
)
def test_a_wrong_override_is_one_sentence_that_names_it(overrides: list[str], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        compose_run("ppo_monarch", overrides)
    text = str(caught.value)
    assert text.replace(";", "").startswith(said.replace(";", ""))
    assert "\n" not in text


def test_several_wrong_keys_are_named_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        compose_run("ppo_monarch", ["trainer.sed=1", "data.train_batch_size=x", "nope=1"])
    assert len(caught.value.problems) == 3


@pytest.mark.parametrize(
    ("name", "own", "said"),
    [
        (
            "nope",
            False,
            "--config-name nope: no such config among the shipped ones: ppo_monarch, grpo_monarch",
        ),
        ("nope", True, "--config-name nope: no such config in "),
        ("/etc/passwd", True, "--config-name: wanted a configuration's name, got '/etc/passwd'; a folder of"),
        ("a\0b", False, "--config-name: wanted a configuration's name, got 'a\\x00b'; a folder of"),
        ("n" * 300, False, f"--config-name {'n' * 119}…: the name is too long"),
        ("strange", True, "--config-name strange: In 'strange': Could not find 'data/nothing'"),
    ],
)
def test_a_wrong_name_is_one_sentence(folder: Path, name: str, own: bool, said: str) -> None:
    (folder / "strange.yaml").write_text("defaults:\n  - data: nothing\n")
    with pytest.raises(ConfigError) as caught:
        compose(name, [], folder if own else None)
    assert str(caught.value).startswith(said)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("content", ["defaults: [_self_]\n", "# nothing\n"])
def test_a_file_of_a_group_may_say_nothing(folder: Path, content: str) -> None:
    (folder / "data" / "mine.yaml").write_text(content)
    assert compose("mine", [], folder)["trainer"]["experiment_name"] == "mine"


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("a: [1\nb: 2\n", "cannot be read as YAML: while parsing a flow sequence"),
        ("a: No\xebl\n", "cannot be read as YAML: 'utf-8' codec can't decode byte 0xeb in position 5"),
        (
            "a: " + "9" * 5000,
            "cannot be read as YAML: Exceeds the limit (4300 digits) for integer string conv",
        ),
        ("a: '${'\n", "cannot be read as YAML: no viable alternative at input '${'; full_key: a"),
        ("a: {null: 3}\n", "cannot be read as YAML: Incompatible key type 'NoneType'; full_key: a"),
        ("a: !!set {b, c}\n", "cannot be read as YAML: Value 'set' is not a supported primitive type"),
        ("a: &a [*a]\n", "a value holds itself, or is nested too deeply"),
        ("5\n", "wanted a mapping, got a single value"),
        ("- 5\n", "wanted a mapping, got a list"),
        ("defaults: 3\n", "defaults: wanted a list, got 3"),
        ("defaults: [_self_, null]\n", "defaults[1]: wanted a name, or one group: name, got None"),
        ("defaults: [[a, b]]\n", "defaults[0]: wanted a name, or one group: name, got ['a', 'b']"),
        ("defaults: [a: {b: c}]\n", "defaults[0]: wanted a name, or one group: name, got {'a': {'b': 'c'}}"),
    ],
)
def test_an_own_file_that_is_no_configuration_is_named(folder: Path, content: str, said: str) -> None:
    """Whether it is the one to run, or one that it refers to."""
    for path, name in ((folder / "broken.yaml", "broken"), (folder / "data" / "mine.yaml", "mine")):
        path.write_bytes(content.encode("latin-1"))
        with pytest.raises(ConfigError) as caught:
            compose(name, [], folder)
        assert str(caught.value).startswith(f"{path}: {said}")
        assert "\n" not in str(caught.value)
        path.unlink()


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("# nothing yet\n", "{path}: is empty; begin it with defaults: [ppo_monarch, _self_]"),
        ("defaults: [broken]\n", "{path}: defaults[0]: got 'broken', which is this file itself"),
        ("defaults: [around]\n", "--config-name broken: its defaults lead back to themselves"),
    ],
)
def test_an_own_file_that_is_to_be_run_says_something(folder: Path, content: str, said: str) -> None:
    path = folder / "broken.yaml"
    path.write_text(content)
    (folder / "around.yaml").write_text("defaults: [broken]\n")
    with pytest.raises(ConfigError) as caught:
        compose("broken", [], folder)
    assert str(caught.value) == said.format(path=path)


@pytest.mark.parametrize("name", ["nothing", "n" * 300])
def test_a_config_dir_that_is_none_is_named(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=f"^--config-dir: no such folder: {tmp_path}"):
        compose("ppo_monarch", [], tmp_path / name)


def test_composing_leaves_hydra_as_it_was() -> None:
    """So that a notebook may compose again, and after a mistake too."""
    from hydra.core.global_hydra import GlobalHydra

    with pytest.raises(ConfigError):
        compose("ppo_monarch", ["data=nope"])
    assert not GlobalHydra.instance().is_initialized()
    assert compose("ppo_monarch", []) == compose("ppo_monarch", [])


STEPS, EPOCHS = "total_training_steps", "total_epochs"


@pytest.mark.parametrize(
    ("typed", "steps", "epochs"),
    [
        (["trainer.total_epochs=15"], None, 15),
        (["++trainer.total_epochs=1"], None, 1),
        (["trainer.total_epochs=15", "trainer.total_training_steps=80"], 80, 15),
        (["trainer.total_training_steps=20"], 20, 1),
        (["+smoke=tiny"], 3, 1),
        (["+smoke=tiny", "trainer.total_epochs=2"], None, 2),
        ([], 80, 1),
    ],
)
def test_typed_epochs_are_not_beaten_by_shipped_steps(
    typed: list[str], steps: int | None, epochs: int
) -> None:
    trainer = compose("ppo_monarch", typed)["trainer"]
    assert (trainer[STEPS], trainer[EPOCHS]) == (steps, epochs)


def test_an_own_file_counts_as_typed(folder: Path) -> None:
    (folder / "mine.yaml").write_text(f"{MINE}  {EPOCHS}: 3\n")
    assert compose("mine", [], folder)["trainer"][STEPS] is None
    assert compose("mine", ["+smoke=tiny"], folder)["trainer"][STEPS] == 3, "added on the command line"
    assert compose("mine", ["trainer.total_training_steps=9"], folder)["trainer"][STEPS] == 9
    (folder / "mine.yaml").write_text(f"{MINE}  {EPOCHS}: 3\n  {STEPS}: 7\n")
    assert compose("mine", [], folder)["trainer"][STEPS] == 7, "the documented rule: both are set"
    assert compose("mine", ["trainer.total_epochs=15"], folder)["trainer"][STEPS] is None, "typed"


def test_an_own_group_file_is_not_beaten_by_the_shipped_file_that_builds_on_it(folder: Path) -> None:
    (folder / "data" / "mine.yaml").write_text(MY_DATA.replace("32", "16"))
    for name in ("grpo_monarch", "mine"):  # grpo_monarch sets 32 after the group
        (folder / "mine.yaml").write_text(MINE.replace("ppo", "grpo"))
        assert compose(name, ["data=mine"], folder)["data"]["train_batch_size"] == 16
        typed = ["data=mine", "data.train_batch_size=8"]
        assert compose(name, typed, folder)["data"]["train_batch_size"] == 8
        smoke = compose(name, ["data=mine", "+smoke=smollm2"], folder)
        assert smoke["data"]["train_batch_size"] == 4, "added on the command line"


@pytest.mark.parametrize(
    ("name", "typed", "path", "value"),
    [
        ("grpo_smollm2", "reward.custom_reward_function.path=mine.py", "reward.name", "auto"),
        (
            "ppo_smollm2",
            "algorithm.rollout_correction.rollout_is=token",
            "algorithm.rollout_correction.bypass_mode",
            False,
        ),
        ("ppo_monarch", "algorithm.adv_estimator=grpo", "algorithm.truncated", "zero"),
    ],
)
def test_a_shipped_value_does_not_refuse_what_is_typed(
    name: str, typed: str, path: str, value: object
) -> None:
    found: Any = compose_run(name, [typed])
    for key in path.split("."):
        found = getattr(found, key)
    assert found == value


def test_a_typed_device_type_is_that_of_a_shipped_topology() -> None:
    config = compose_run("ppo_monarch", ["topology=split_ppo", "trainer.device_type=cpu"])
    assert [one.device_type for one in config.resolved_topology().clusters] == ["cpu"]


def test_a_program_that_uses_hydra_itself_keeps_its_state(tmp_path: Path) -> None:
    (tmp_path / "theirs.yaml").write_text("x: 1\n")
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "mine.yaml").write_text("defaults: [ppo_monarch, _self_]\n")
    with hydra.initialize_config_dir(str(tmp_path), version_base="1.3"):
        compose("mine", [], tmp_path / "own")
        with pytest.raises(ConfigError):
            compose("mine", ["a=b=c:"], tmp_path / "own")
        assert hydra.compose("theirs") == {"x": 1}
        with pytest.raises(MissingConfigException):
            hydra.compose("mine")
