"""Every shipped YAML file composes, validates, is complete, and says what it is."""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_module
from omegaconf import OmegaConf
from pydantic import BaseModel

from neoproto.config import CONFIG_MODULE, CONFIG_NAMES, RunConfig, load_config
from neoproto.errors import ConfigError

CONFIGS = Path(str(files("configs")))
SHIPPED = sorted(CONFIGS.rglob("*.yaml"))
OPEN_MAPPINGS = (
    "runtime.env_vars",
    "actor_rollout_ref.rollout.env",
    "data.task.options",
    "algorithm.custom_advantage_function.options",
)
PLACES = {
    "model": "actor_rollout_ref.model",
    "actor": "actor_rollout_ref.actor",
    "ref": "actor_rollout_ref.ref",
    "rollout": "actor_rollout_ref.rollout",
}


def composed(name: str, *overrides: str) -> dict[str, Any]:
    with initialize_config_module("configs", version_base="1.3"):
        tree = OmegaConf.to_container(compose(name, list(overrides)), resolve=True, throw_on_missing=True)
    assert isinstance(tree, dict)
    return {str(key): value for key, value in tree.items()}


def selections() -> Iterator[tuple[str, tuple[str, ...]]]:
    """Each configuration as it is, and with every file of every group."""
    for name in CONFIG_NAMES:
        yield name, ()
        for path in SHIPPED:
            group = path.parent.name
            if path.parent == CONFIGS:
                continue
            if group == "smoke":
                yield name, (f"+smoke={path.stem}",)
                continue
            place = f"{group}@{PLACES[group]}" if group in PLACES else group
            yield name, (f"{place}={path.stem}",)


def refused_together(name: str, overrides: tuple[str, ...]) -> bool:
    """Choices that belong to the other algorithm, and are refused for that."""
    own = name.split("_")[0]
    return any(re.search(rf"topology=split_(?!{own})", override) for override in overrides)


@pytest.mark.parametrize(("name", "overrides"), list(selections()))
def test_it_composes_and_validates(name: str, overrides: tuple[str, ...]) -> None:
    if overrides == ("algorithm=gae",) and name.startswith("grpo"):
        overrides = (*overrides, "critic=default")
    if overrides == ("data=files",):
        overrides = (*overrides, "data.train_files=train.parquet")
    tree = composed(name, *overrides)
    if refused_together(name, overrides):
        with pytest.raises(ConfigError, match=r"topology\.models"):
            load_config(tree)
    else:
        load_config(tree)


def test_the_named_ones_are_the_shipped_ones() -> None:
    assert sorted(CONFIG_NAMES) == [path.stem for path in SHIPPED if path.parent == CONFIGS]
    assert CONFIGS.name == CONFIG_MODULE


def leaves(kind: type[BaseModel], prefix: str = "") -> Iterator[str]:
    for name, field in kind.model_fields.items():
        path = f"{prefix}{name}"
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from leaves(field.annotation, f"{path}.")
        else:
            yield path


def keys(tree: dict[str, Any], prefix: str = "") -> Iterator[str]:
    for name, value in tree.items():
        path = f"{prefix}{name}"
        if isinstance(value, dict) and path not in OPEN_MAPPINGS:
            yield from keys(value, f"{path}.")
        else:
            yield path


@pytest.mark.parametrize("name", CONFIG_NAMES)
def test_every_option_is_in_it(name: str) -> None:
    """So that each can be read there and changed on the command line."""
    assert sorted(keys(composed(name))) == sorted(leaves(RunConfig))


@pytest.mark.parametrize(
    ("name", "critic", "samples"), [("ppo_monarch", True, 256), ("grpo_monarch", False, 256)]
)
def test_the_algorithms_differ_in_what_they_should(name: str, critic: bool, samples: int) -> None:
    config = load_config(composed(name))
    assert config.uses_critic is critic
    assert config.data.train_batch_size * config.actor_rollout_ref.rollout.n == samples
    assert config.data.task.val_size >= 500


@pytest.mark.parametrize("smoke", ["tiny", "smollm2"])
@pytest.mark.parametrize("name", CONFIG_NAMES)
def test_smoke_is_short(name: str, smoke: str) -> None:
    config = load_config(composed(name, f"+smoke={smoke}"))
    assert config.trainer.total_training_steps is not None
    assert config.trainer.total_training_steps <= 5


@pytest.mark.parametrize("data", ["chain_sum", "gsm_symbolic"])
@pytest.mark.parametrize(("name", "critic"), [("ppo_smollm2", True), ("grpo_smollm2", False)])
def test_a_real_model_is_asked_for_a_number(name: str, critic: bool, data: str) -> None:
    config = load_config(composed(name, f"data={data}"))
    assert config.actor_rollout_ref.model.path is None
    assert config.actor_rollout_ref.model.built_in == "smollm2"
    assert (config.uses_critic, config.reward.name) == (critic, "last_number")
    assert config.data.task.name == data
    assert config.data.system_prompt
    assert config.trainer.total_training_steps is not None
    assert config.trainer.total_training_steps >= 30


def test_own_files_need_one_override() -> None:
    config = load_config(composed("ppo_monarch", "data.train_files=mine.jsonl"))
    assert config.data.train_files == ("mine.jsonl",)


def test_seeds_follow_the_trainers() -> None:
    config = load_config(composed("ppo_monarch", "trainer.seed=7"))
    assert (config.data.seed, config.actor_rollout_ref.rollout.seed) == (7, 7)


def uncommented(text: str) -> Iterator[str]:
    """Keys of blocks (lines without an empty one between them) that have no comment above or beside them."""
    for block in re.split(r"\n\s*\n", text):
        lines = [line for line in block.splitlines() if not line.startswith("# @package")]
        said = False
        for line in lines:
            said = said or line.lstrip().startswith("#")
            if re.match(r"\s*(- )?[\w@.]+:", line) and not said and " #" not in line:
                yield line


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: str(path.relative_to(CONFIGS)))
def test_every_block_has_its_comment(path: Path) -> None:
    assert list(uncommented(path.read_text(encoding="utf-8"))) == []


def test_a_block_without_a_comment_would_be_found() -> None:
    assert list(uncommented("# @package _global_\na: 1\n\n# said\nb: 2\n\nc: 3  # said\nd: 4\n")) == [
        "a: 1",
        "d: 4",
    ]
