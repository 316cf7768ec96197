"""Types, unknown keys, options that are not there: what is said, and that it is all said at once."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pydantic
import pytest
from hypothesis import given
from hypothesis import strategies as st

from neoproto.config import RunConfig, RuntimeRoot, load_config, load_runtime
from neoproto.config.base import Section
from neoproto.config.load import dotted
from neoproto.config.verl import REFUSED_KEYS, REFUSED_VALUES
from neoproto.errors import ConfigError


def nested(path: str, value: Any) -> dict[str, Any]:
    for key in reversed(path.split(".")):
        value = {key: value}
    return value


def problems(mapping: Any) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        load_config(mapping)
    return caught.value.problems


def problem(path: str, value: Any) -> str:
    (only,) = problems(nested(path, value))
    return only


def sections(kind: type[pydantic.BaseModel] = RunConfig) -> list[type[pydantic.BaseModel]]:
    found = [kind]
    for field in kind.model_fields.values():
        annotation = field.annotation
        for one in (annotation, *getattr(annotation, "__args__", ())):
            if isinstance(one, type) and issubclass(one, Section):
                found += sections(one)
    return found


def test_an_empty_mapping_is_a_whole_run() -> None:
    assert load_config({}) == RunConfig()


def test_a_run_is_frozen_and_travels() -> None:
    config = load_config({"trainer": {"seed": 3}})
    with pytest.raises(pydantic.ValidationError, match="frozen"):
        config.trainer.seed = 4  # type: ignore[misc]
    assert pickle.loads(pickle.dumps(config)) == config


def test_every_option_says_what_it_is() -> None:
    silent = [
        f"{kind.__name__}.{name}"
        for kind in sections()
        for name, field in kind.model_fields.items()
        if not (field.description or "").strip()
    ]
    assert silent == []
    assert all(kind.__doc__ for kind in sections())


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        ("data.train_batch_size", "64", "data.train_batch_size: wanted an integer, got '64' (str)"),
        ("data.train_batch_size", 64.0, "data.train_batch_size: wanted an integer, got 64.0 (float)"),
        ("trainer.seed", True, "trainer.seed: wanted an integer, got True (bool)"),
        ("actor_rollout_ref.actor.optim.lr", "fast", "actor_rollout_ref.actor.optim.lr: wanted a number"),
        ("actor_rollout_ref.actor.optim.lr", True, "actor_rollout_ref.actor.optim.lr: wanted a number"),
        ("actor_rollout_ref.actor.optim.lr", float("nan"), "wanted a finite number, got nan"),
        ("actor_rollout_ref.actor.optim.lr", 0, "optim.lr: wanted a value greater than 0, got 0 (int)"),
        ("actor_rollout_ref.actor.optim.betas", [0.9], "actor_rollout_ref.actor.optim.betas"),
        ("actor_rollout_ref.actor.optim.betas", [0.9, 1.0], "optim.betas[1]: wanted a value less than 1"),
        ("actor_rollout_ref.actor.clip_ratio_low", 1.0, "clip_ratio_low: wanted a value less than 1"),
        (
            "algorithm.adv_estimator",
            "gea",
            "wanted 'gae', 'grpo', 'reinforce_plus_plus', 'rloo' or 'custom', got 'gea'",
        ),
        (
            "algorithm.rollout_correction.rollout_is_threshold",
            0.5,
            "rollout_is_threshold: wanted a value greater than or equal to 1, got 0.5 (float)",
        ),
        (
            "algorithm.rollout_correction.rollout_is_threshold",
            "0.5_5.0",
            "rollout_is_threshold: wanted a number, got '0.5_5.0' (str)",
        ),
        (
            "algorithm.rollout_correction.rollout_is",
            "geometric",
            "rollout_is: wanted 'token' or 'sequence', got 'geometric' (str)",
        ),
        ("trainer.logger", ["console", "swanlab"], "trainer.logger[1]: wanted 'console', 'jsonl', 'tensorb"),
        ("trainer.logger", 3, "trainer.logger: wanted a string or a list of strings, got 3 (int)"),
        ("data.train_files", 5, "data.train_files: wanted a string or a list of strings, got 5 (int)"),
        ("data.train_files", "", "data.train_files[0]: wanted at least 1 character, got '' (str)"),
        ("runtime.run_dir", "", "runtime.run_dir: wanted at least 1 character, got '' (str)"),
        ("runtime.backend", "", "runtime.backend: wanted at least 1 character, got '' (str)"),
        ("trainer.experiment_name", "/abs", "experiment_name: wanted the name of a folder, without a sl"),
        ("trainer.project_name", "..", "project_name: wanted the name of a folder, without a slash, got"),
        ("trainer.project_name", "a\0b", "project_name: wanted text without NUL characters, got 'a\\x00b'"),
        ("runtime.run_dir", "a\0b", "runtime.run_dir: wanted text without NUL characters, got 'a\\x00b'"),
        ("critic.model.path", "a\0b", "critic.model.path: wanted text without NUL characters, got 'a\\x"),
        ("runtime.env_vars", {"A": "\0"}, "env_vars.A: wanted text without NUL characters, got '\\x00'"),
        ("trainer.seed", 2**63, "trainer.seed: wanted at most 9223372036854775807, got 92233720"),
        ("data.seed", -1, "data.seed: wanted a value greater than or equal to 0, got -1 (int)"),
        ("data.task.seed", 10**23, "data.task.seed: wanted at most 9223372036854775807"),
        ("actor_rollout_ref.rollout.seed", 10**23, "rollout.seed: wanted at most 9223372036854775807"),
        ("actor_rollout_ref.model.tiny.seed", 10**23, "tiny.seed: wanted at most 9223372036854775807"),
        (
            "actor_rollout_ref.rollout.temperature",
            1e-9,
            "temperature: wanted a value greater than or",
        ),
        (
            "actor_rollout_ref.rollout.kv_cache_gib",
            1e-12,
            "gib: wanted a value greater than or equal",
        ),
        ("actor_rollout_ref.rollout.kv_cache_gib", 1e308, "gib: wanted a value less than or equal to 65536"),
        ("actor_rollout_ref.rollout.env", {"A=B": "x"}, "rollout.env['A=B']: wanted a name that matches"),
        ("actor_rollout_ref.rollout.env", {"": "x"}, "rollout.env['']: wanted a name that matches"),
        ("trainer.timeouts.start", 1e300, "timeouts.start: wanted at most 1000000000,"),
        ("weights.drain_timeout", 1e300, "drain_timeout: wanted at most 1000000000,"),
        ("trainer.total_training_steps", 10**400, "steps: wanted at most 2147483647, got 10000000"),
        ("trainer.nnodes", 70_000, "trainer.nnodes: wanted a value less than or equal to 65536, got 70000"),
        ("trainer.n_gpus_per_node", 2_000, "node: wanted a value less than or equal to 1024, got 2000 (int)"),
        (
            "actor_rollout_ref.rollout.n_gpus_per_node",
            2_000,
            "node: wanted a value less than or equal to 1024",
        ),
        ("runtime.monarch.job_mode", "local", "job_mode: wanted 'process' or 'current', got 'local' (str)"),
        ("trainer.val_before_train", 1, "trainer.val_before_train: wanted true or false, got 1 (int)"),
        ("trainer.experiment_name", 7, "trainer.experiment_name: wanted a string, got 7 (int)"),
        ("runtime.env_vars", {"A": 1}, "runtime.env_vars.A: wanted a string, got 1 (int)"),
        ("runtime.env_vars", {"1A": "x"}, "runtime.env_vars.1A: wanted a name that matches"),
        ("actor_rollout_ref.rollout.val_kwargs.top_k", 0, "top_k: wanted -1 (all) or at least 1, got 0"),
        ("critic", None, "critic: wanted a mapping, got None"),
        ("data.task.size", None, "data.task.size: wanted an integer, got None"),
        ("topology.clusters", [{"nnodes": 1}], "topology.clusters[0].name: a value is needed"),
        ("topology.clusters", [{"name": "a", "nnodes": 0}], "topology.clusters[0].nnodes: wanted a value"),
    ],
)
def test_a_wrong_value_is_named_with_what_was_wanted(path: str, value: Any, said: str) -> None:
    assert said in problem(path, value)


def test_an_integer_that_python_cannot_write_is_wrong_too() -> None:
    assert problem("trainer.seed", 16**5000).endswith("got an integer of thousands of digits (int)")


def test_an_integer_stands_for_a_number() -> None:
    config = load_config({"algorithm": {"gamma": 1}, "reward": {"timeout_s": 3}})
    assert config.algorithm.gamma == 1.0
    assert config.reward.timeout_s == 3.0


def test_lists_become_tuples_and_one_file_a_list() -> None:
    config = load_config({"data": {"train_files": "a.parquet", "val_files": ["b.jsonl", "c.jsonl"]}})
    assert config.data.train_files == ("a.parquet",)
    assert config.data.val_files == ("b.jsonl", "c.jsonl")


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("data.train_batch_sz", "data.train_batch_sz: unknown key; did you mean 'train_batch_size'?"),
        (
            "actor_rollout_ref.actor.optim.lrr",
            "actor_rollout_ref.actor.optim.lrr: unknown key; did you mean 'lr'?",
        ),
        ("algoritm", "algoritm: unknown key; did you mean 'algorithm'?"),
        ("reward.xyz", "reward.xyz: unknown key; there is 'name', 'custom_reward_function', 'timeout_s'"),
    ],
)
def test_an_unknown_key_gets_the_nearest_one(path: str, said: str) -> None:
    assert problem(path, 1).startswith(said)


def test_an_unknown_key_in_a_list_gets_the_nearest_one() -> None:
    mapping = {"topology": {"clusters": [{"name": "a"}, {"name": "b", "nnode": 1}]}}
    assert problems(mapping) == ("topology.clusters[1].nnode: unknown key; did you mean 'nnodes'?",)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("actor_rollout_ref.actor.use_dynamic_bsz", True),
        ("critic.ppo_max_token_len_per_gpu", 16384),
        ("actor_rollout_ref.actor.ulysses_sequence_parallel_size", 2),
        ("actor_rollout_ref.model.use_remove_padding", True),
        ("actor_rollout_ref.actor.strategy", "megatron"),
        ("reward_model", {"enable": True}),
        ("actor_rollout_ref.rollout.multi_turn", {"enable": True}),
        ("actor_rollout_ref.rollout.mode", "async"),
        ("actor_rollout_ref.rollout.tensor_model_parallel_size", 2),
        ("actor_rollout_ref.rollout.name", "sglang"),
        ("actor_rollout_ref.rollout.top_p", 0.9),
        ("actor_rollout_ref.rollout.top_k", 50),
        ("actor_rollout_ref.model.trust_remote_code", True),
        ("trainer.resume_mode", "resume_path"),
        ("trainer.max_actor_ckpt_to_keep", 5),
        ("trainer.mode", "one_step_off"),
        ("algorithm.rollout_correction.rollout_rs", "token_k1"),
        ("algorithm.rollout_correction.rollout_is_batch_normalize", True),
        ("algorithm.rollout_correction.bypass_old_logprob_for_rollout", True),
        ("algorithm.rollout_correction.loss_type", "reinforce"),
    ],
)
def test_an_option_of_verl_that_is_not_there_is_refused_by_name(path: str, value: Any) -> None:
    said = problem(path, value)
    reason = REFUSED_VALUES.get(path) or REFUSED_KEYS[path.rpartition(".")[2]]
    assert said.startswith(f"{path}: ")
    assert "not supported" in said
    assert said.endswith(reason)


def test_no_refused_key_is_an_option_where_it_is_refused() -> None:
    """A key that exists somewhere (`mode`) may be refused elsewhere, but a refused path must exist."""
    for path in REFUSED_VALUES:
        kind: Any = RunConfig
        for key in path.split("."):
            assert key in kind.model_fields
            kind = kind.model_fields[key].annotation


@pytest.mark.parametrize("value", [None, [], "x", 3])
def test_what_is_no_mapping_is_said_to_be_none(value: Any) -> None:
    assert problems(value)[0].startswith("configuration: wanted a mapping")


def test_everything_is_reported_at_once() -> None:
    mapping = {
        "data": {"train_batch_size": 30, "max_prompt_length": "long"},
        "actor_rollout_ref": {"actor": {"optim": {"lrr": 1}, "use_dynamic_bsz": False}, "rollout": None},
        "trainer": {"save_freq": -5},
        "topology": {"models": [{"name": "a"}]},
        1: 2,
    }
    said = "\n".join(problems(mapping))
    for path in (
        "data.max_prompt_length: ",
        "actor_rollout_ref.actor.optim.lrr: ",
        "actor_rollout_ref.actor.use_dynamic_bsz: ",
        "actor_rollout_ref.rollout: ",
        "trainer.save_freq: ",
        "topology.models[0].worker: ",
        "topology.models[0].resource_pool: ",
        "[1]: ",
        "actor_rollout_ref.actor.ppo_mini_batch_size: got 16 prompts, wanted a divisor of data.train_batch",
    ):
        assert path in said


def test_a_cross_check_does_not_judge_by_a_value_that_is_wrong_itself() -> None:
    mapping = {
        "data": {"train_batch_size": "30"},
        "actor_rollout_ref": {"actor": {"ppo_mini_batch_size": 10}},
        "algorithm": {"adv_estimator": "GRPO", "truncated": "bootstrap"},
        "topology": {"models": [{"name": "a"}]},
    }
    assert [line.partition(":")[0] for line in problems(mapping)] == [
        "topology.models[0].worker",
        "topology.models[0].resource_pool",
        "data.train_batch_size",
        "algorithm.adv_estimator",
    ]


def test_a_refused_mapping_is_left_as_it_was() -> None:
    mapping = {"data": {"train_batch_size": "x"}, "runtime": {"env_vars": {"A": 1}}}
    before = copy.deepcopy(mapping)
    problems(mapping)
    assert mapping == before


def test_the_runtime_alone_ignores_a_runs_other_sections() -> None:
    root = load_runtime({"runtime": {"env_vars": {"A": "1"}}, "data": {"train_batch_size": "broken"}})
    assert isinstance(root, RuntimeRoot)
    assert root.runtime.env_vars == {"A": "1"}
    assert root.topology is None
    with pytest.raises(ConfigError, match=r"^runtim: unknown key; did you mean 'runtime'\?$"):
        load_runtime({"runtim": {}})


def test_paths_are_written_as_people_write_them() -> None:
    assert dotted(("topology", "models", 1, "name")) == "topology.models[1].name"
    assert dotted(("env_vars", "a b\n")) == "env_vars['a b\\n']"
    assert dotted(()) == "configuration"


def test_a_large_wrong_value_is_not_quoted_whole() -> None:
    assert len(problem("trainer.seed", list(range(1000)))) < 200


SCALARS = st.none() | st.booleans() | st.integers(-3, 70) | st.floats() | st.text(max_size=4)
KEYS = sorted({name for kind in sections() for name in kind.model_fields})
TREES = st.recursive(
    SCALARS,
    lambda below: (
        st.lists(below, max_size=3)
        | st.dictionaries(st.sampled_from(KEYS) | st.text(max_size=3) | st.integers(0, 2), below, max_size=4)
    ),
    max_leaves=12,
)


@given(
    st.dictionaries(st.sampled_from(sorted(RunConfig.model_fields)) | st.integers(0, 1), TREES, max_size=4)
)
def test_whatever_comes_in_is_a_run_or_a_list_of_problems(mapping: dict[Any, Any]) -> None:
    said: tuple[str, ...] = ()
    config = None
    try:
        config = load_config(mapping)
    except ConfigError as error:
        said = error.problems
    if config is None:
        assert said
        assert all(": " in line and "\n" not in line for line in said)
    else:
        assert load_config(config.model_dump(mode="json")) == config
