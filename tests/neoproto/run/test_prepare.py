"""What is made of a run's inputs before anything is started."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from neoproto.config import RunConfig
from neoproto.data.prompts import EncodedPrompts
from neoproto.errors import ConfigError
from neoproto.run.compose import compose_run
from neoproto.run.folder import earlier_date, write_config
from neoproto.run.prepare import (
    PreparedRun,
    Rows,
    built_in_folder,
    eos_token_ids,
    load_rows,
    model_folder,
    notes,
    prepare,
)
from neoproto.trainer.checkpoint.folder import Checkpoint
from neoproto.trainer.checkpoint.resume import STATE, TrainerState
from neoproto.weights import WeightVersion
from tests.neoproto.run.inputs import json_lines, overrides, parquet, row, words
from tests.neoproto.run.inputs import model_folder as make_model_folder


class Stages:
    """Notes what is being done."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    @contextmanager
    def __call__(self, text: str) -> Iterator[None]:
        self.seen.append(text)
        yield


def prepared(model: Path, train: Path, *more: str) -> PreparedRun:
    return prepare(compose_run("ppo_monarch", overrides(model, train, *more)), "cpu", Stages())


def test_files_and_folder_become_a_run(model: Path, train_file: Path) -> None:
    run = prepared(model, train_file)
    assert (run.model_dir, run.critic_dir) == (model, model)
    assert run.loader.steps_per_epoch == 2
    assert run.validation is None
    assert (run.pad_token_id, run.eos_token_ids) == (0, (2,))
    assert run.notes == ("80 steps of 4 prompts x 4 samples: 40 epochs of 8 prompts",)


def test_a_parquet_file_gives_the_same_prompts_as_json_lines(
    model: Path, train_file: Path, tmp_path: Path
) -> None:
    other = parquet(tmp_path / "train.parquet", words(8))
    batches = [prepared(model, path).loader.next_batch() for path in (train_file, other)]
    assert batches[0].tensors["prompts"].tolist() == batches[1].tensors["prompts"].tolist()
    assert batches[0].non_tensors["reward_model"].tolist() == batches[1].non_tensors["reward_model"].tolist()


@pytest.mark.parametrize(
    ("words_typed", "steps"),
    [
        (["trainer.total_training_steps=7"], 7),
        (["trainer.total_training_steps=null"], 2),
        (["trainer.total_training_steps=null", "trainer.total_epochs=3"], 6),
        (["trainer.total_training_steps=5", "trainer.total_epochs=3"], 5),
    ],
)
def test_steps_win_over_epochs(model: Path, train_file: Path, words_typed: list[str], steps: int) -> None:
    run = prepared(model, train_file, *words_typed)
    assert run.total_steps == steps
    overruled = "trainer.total_training_steps=5 wins over trainer.total_epochs=3" in run.notes
    assert overruled == (steps == 5)


def test_the_critic_may_start_from_another_folder(model: Path, train_file: Path, tmp_path: Path) -> None:
    other = make_model_folder(tmp_path / "critic")
    assert prepared(model, train_file, f"critic.model.path={other}").critic_dir == other


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"max_position_embeddings": 19},
            "has 19 positions (max_position_embeddings), prompts and",
        ),
        ({"vocab_size": 1000}, None),
        ({"num_attention_heads": 1, "hidden_size": 48}, None),
        (
            None,
            "has another vocabulary than the policy, whose tokens it is to read: '<pad>' is 1 there",
        ),
    ],
)
def test_a_critic_has_to_be_able_to_read_the_policys_tokens(
    model: Path, train_file: Path, tmp_path: Path, changes: dict[str, Any] | None, said: str | None
) -> None:
    other = make_model_folder(tmp_path / "critic", **(changes or {}))
    if changes is None:
        path = other / "tokenizer.json"
        tokenizer = json.loads(path.read_text())
        vocabulary = tokenizer["model"]["vocab"]
        first, second = list(vocabulary)[:2]
        vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
        for one in tokenizer["added_tokens"]:
            one["id"] = vocabulary[one["content"]]
        path.write_text(json.dumps(tokenizer))
    if said is None:
        assert prepared(model, train_file, f"critic.model.path={other}").critic_dir == other
        return
    with pytest.raises(ConfigError) as error:
        prepared(model, train_file, f"critic.model.path={other}")
    assert str(error.value).startswith(f"critic.model.path: {other} {said}")


def test_a_critic_that_knows_fewer_tokens_than_the_policy_is_refused(
    train_file: Path, tmp_path: Path
) -> None:
    model, critic = (make_model_folder(tmp_path / str(size), vocab_size=size) for size in (264, 262))
    said = rf"^critic\.model\.path: the model in {critic} knows 262 tokens .*the policy in {model} knows 264$"
    with pytest.raises(ConfigError, match=said):
        prepared(model, train_file, f"critic.model.path={critic}")
    assert prepared(critic, train_file, f"critic.model.path={model}").critic_dir == model


def test_validation_prompts_are_encoded_like_the_others(
    model: Path, train_file: Path, tmp_path: Path
) -> None:
    held_out = json_lines(tmp_path / "val.jsonl", [*words(3), row("x" * 20)])
    run = prepared(model, train_file, f"data.val_files={held_out}", "data.truncation=filter")
    assert run.validation is not None
    assert len(run.validation) == 3
    assert run.notes[1:] == ("1 validation prompts longer than data.max_prompt_length were left out",)


def test_what_happened_to_long_prompts_is_said_of_both_sets(model: Path, tmp_path: Path) -> None:
    files = [json_lines(tmp_path / name, [*words(4), row("x" * 20)]) for name in ("a.jsonl", "b.jsonl")]
    run = prepared(model, files[0], f"data.val_files={files[1]}", "data.truncation=left")
    assert run.notes[1:] == (
        "1 training prompts were cut to data.max_prompt_length",
        "1 validation prompts were cut to data.max_prompt_length",
    )


def test_order_follows_seed_and_shuffle(model: Path, train_file: Path) -> None:
    def order(*more: str) -> list[int]:
        return prepared(model, train_file, *more).loader.next_indices()

    assert order("data.shuffle=false") == [0, 1, 2, 3]
    assert order("trainer.seed=1") == order("trainer.seed=1")
    assert order("trainer.seed=1") != order("trainer.seed=2")


@pytest.mark.parametrize(
    ("listed", "ids"),
    [(None, (2,)), (2, (2,)), (5, (2, 5)), ([5, 7], (2, 5, 7))],
)
def test_tokens_of_the_generation_config_end_an_answer_too(
    tmp_path: Path, listed: int | list[int] | None, ids: tuple[int, ...]
) -> None:
    class Tokenizer:
        eos_token_id = 2

    (tmp_path / "config.json").write_text('{"vocab_size": 8}')
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": listed}))
    assert eos_token_ids(tmp_path, Tokenizer()) == ids


@pytest.mark.parametrize(
    ("generation", "config", "ids"),
    [
        (None, {"eos_token_id": [2, 7]}, (2, 7)),
        ({"temperature": 0.5}, {"eos_token_id": 7}, (2, 7)),
        ({"eos_token_id": None}, {"eos_token_id": [7, 5]}, (2, 5, 7)),
        ({"eos_token_id": 5}, {"eos_token_id": 7}, (2, 5)),
        (None, {"text_config": {"eos_token_id": 7, "vocab_size": 8}}, (2, 7)),
        (None, {"eos_token_id": 5, "text_config": {"eos_token_id": 7, "vocab_size": 8}}, (2, 5)),
        (None, {"eos_token_id": -1}, (2,)),
        (None, {"eos_token_id": [8, 7]}, (2, 7)),
    ],
)
def test_where_the_generation_config_names_no_end_token_the_model_config_does(
    tmp_path: Path, generation: Any, config: dict[str, Any], ids: tuple[int, ...]
) -> None:
    class Tokenizer:
        eos_token_id = 2

    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 8} | config))
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    assert eos_token_ids(tmp_path, Tokenizer()) == ids


def test_end_tokens_of_a_model_config_that_are_no_numbers_are_named(tmp_path: Path, train_file: Path) -> None:
    model = make_model_folder(tmp_path / "model", eos_token_id=["x"])
    with pytest.raises(ConfigError, match=r"^actor_rollout_ref\.model\.path: .*config\.json"):
        prepared(model, train_file)


def test_a_tokenizer_file_that_cannot_be_copied_is_named_before_the_start(
    tmp_path: Path, train_file: Path
) -> None:
    model = make_model_folder(tmp_path / "model")
    (model / "tokenizer.model").symlink_to(tmp_path / "gone")
    with pytest.raises(
        ConfigError, match=rf"a model trained from {model} could not be written: .*tokenizer\.m"
    ):
        prepared(model, train_file)


def test_a_configuration_that_cannot_be_written_is_refused_before_the_start(
    tmp_path: Path, train_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise ValueError("some parameter\nis not valid")

    monkeypatch.setattr("transformers.LlamaConfig.save_pretrained", refuse)
    model = make_model_folder(tmp_path / "model")
    with pytest.raises(ConfigError, match=r"could not be written: some parameter is not valid$"):
        prepared(model, train_file)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{", " cannot be read: Expecting property name"),
        ("[]", ": a JSON object is needed, got []"),
        ('{"eos_token_id": "x"}', ": eos_token_id: token numbers below 262 .* are needed, got 'x'"),
        ('{"eos_token_id": [2, null]}', ": eos_token_id: token numbers .* are needed, got [2, None]"),
        ('{"eos_token_id": -1}', ": eos_token_id: token numbers .* are needed, got -1"),
        ('{"max_new_tokens": -3}', " cannot be used: `max_new_tokens` must be greater than 0"),
        ('{"eos_token_id": 1000000000}', ": eos_token_id: token numbers .* are needed, got 1000000000"),
    ],
)
def test_a_generation_config_that_cannot_be_used_is_named(
    tmp_path: Path, train_file: Path, content: str, said: str
) -> None:
    model = make_model_folder(tmp_path / "model", vocab_size=262)
    (model / "generation_config.json").write_text(content)
    expected = f"actor_rollout_ref.model.path: {model}/generation_config.json{said}"
    with pytest.raises(ConfigError, match=re.escape(expected).replace(r"\.\*", ".*")):
        prepared(model, train_file)


def test_the_date_that_a_template_tells_is_that_of_the_first_start(
    tmp_path: Path, train_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_model_folder(tmp_path / "model")
    path = model / "chat_template.jinja"
    path.write_text("{{ strftime_now('%d%m') }}" + path.read_text())
    day, run_dir = "2026-02-28", tmp_path / "run"
    monkeypatch.setattr("neoproto.run.prepare.today", lambda: day)

    def start(*more: str, checkpoint: Checkpoint | None = None) -> PreparedRun:
        config = compose_run("ppo_monarch", overrides(model, train_file, f"runtime.run_dir={run_dir}", *more))
        return prepare(config, "cpu", Stages(), lambda: earlier_date(config, checkpoint))

    first = start()
    assert first.config.data.date == day
    run_dir.mkdir()
    write_config(run_dir, first.config)
    state = first.loader.state_dict()
    day = "2026-03-01"
    again = start()
    assert again.config == first.config
    again.loader.load_state_dict(state)
    assert start("data.date=2026-03-02").config.data.date == "2026-03-02"

    # A run in another folder goes on from the checkpoint alone.
    run_dir, saved = tmp_path / "other", tmp_path / "copied" / "global_step_1"
    saved.mkdir(parents=True)
    (saved / STATE).write_bytes(
        TrainerState(
            step=1, version=WeightVersion(epoch=0, n=1), loader=state, kl={}, recorder={}, positions={},
            ranks={}, fixed={},
        ).to_json()
    )  # fmt: skip
    assert start(checkpoint=Checkpoint(step=1, path=saved)).config.data.date == "2026-02-28"
    assert start().config.data.date == day
    assert start("data.chat_template=plain").config.data.date is None


def test_prompts_that_the_model_does_not_know_are_refused(tmp_path: Path, train_file: Path) -> None:
    model = make_model_folder(tmp_path / "model", vocab_size=50)
    with pytest.raises(ConfigError, match=rf"^- {train_file}:1: the tokenizer in {model} gives token number"):
        prepared(model, train_file)


def task_config(*more: str) -> RunConfig:
    return compose_run("ppo_monarch", ["data.task.size=64", "data.task.val_size=16", *more])


def test_the_default_task_is_split_by_question() -> None:
    rows = load_rows(task_config())
    asked, held_out = ({one.messages[0]["content"] for one in part} for part in (rows.train, rows.val))
    assert (len(asked), len(held_out)) == (64, 16)
    assert not asked & held_out
    uids = {one.uid for one in (*rows.train, *rows.val)}
    assert len(uids) == 80


def test_the_built_in_model_is_made_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NEOPROTO_CACHE", str(tmp_path))
    config = task_config("actor_rollout_ref.model.tiny.max_sft_steps=0")
    rows, stages = load_rows(config), Stages()
    folder = model_folder(config, rows, stages)
    made = (folder / "model.safetensors").stat().st_mtime_ns
    assert folder.parent == tmp_path / "models"
    assert model_folder(config, rows, stages) == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == made
    assert stages.seen == ["preparing the built-in model (made once, then cached)"] * 2


def test_a_built_in_model_that_is_not_there_is_said_before_anything_is_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NEOPROTO_CACHE", str(tmp_path))
    with pytest.raises(ConfigError) as error:
        prepare(compose_run("grpo_smollm2", []), "cpu", Stages())
    assert str(error.value) == (
        f"actor_rollout_ref.model.built_in=smollm2: there is no {tmp_path}/models/SmolLM2-135M-Instruct-1; "
        "run scripts/make_smollm2 first (or python -m neoproto actors.smollm2)"
    )


def test_a_system_prompt_comes_first_unless_a_row_has_its_own(model: Path, tmp_path: Path) -> None:
    own = [{"role": "system", "content": "mine"}, {"role": "user", "content": "b"}]
    train = json_lines(tmp_path / "train.jsonl", [*words(3), row("b", prompt=own)])
    plain, told = (
        prepared(model, train, "data.shuffle=false", f"data.system_prompt={text}").loader.next_batch()
        for text in ("null", "hey")
    )
    assert (told.tensors["prompt_len"] - plain.tensors["prompt_len"]).tolist() == [4, 4, 4, 0]
    first, last = told.non_tensors["raw_prompt"][0], told.non_tensors["raw_prompt"][3]
    assert first == [{"role": "system", "content": "hey"}, {"role": "user", "content": "aaa"}]
    assert last == own


def test_the_tiny_model_is_warm_started_on_the_system_prompt_too(monkeypatch: pytest.MonkeyPatch) -> None:
    import actors.models.tiny_model

    seen: list[dict[str, Any]] = []

    def note(_: object, rows: list[dict[str, Any]]) -> Path:
        seen.extend(rows)
        return Path()

    monkeypatch.setattr(actors.models.tiny_model, "ensure_tiny_model", note)
    config = task_config("data.system_prompt=hey")
    built_in_folder(config, load_rows(config), Stages())
    assert {message["content"] for message in (one["prompt"][0] for one in seen)} == {"hey"}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("hidden_size", 64), ("intermediate_size", 100), ("num_layers", 1), ("num_heads", 2), ("seed", 1),
        ("warm_start_score", 0.25), ("max_sft_steps", 1),
    ],
)  # fmt: skip
def test_each_option_of_the_built_in_model_makes_another_one(
    monkeypatch: pytest.MonkeyPatch, name: str, value: float
) -> None:
    import actors.models.tiny_model

    def key(options: actors.models.tiny_model.TinyModelOptions, rows: list[dict[str, object]]) -> Path:
        return Path(actors.models.tiny_model.model_key(options, rows))

    monkeypatch.setattr(actors.models.tiny_model, "ensure_tiny_model", key)
    rows = load_rows(task_config())
    small = ["actor_rollout_ref.model.tiny.num_heads=1"] if name == "hidden_size" else []
    changed = task_config(*small, f"actor_rollout_ref.model.tiny.{name}={value}")
    assert built_in_folder(changed, rows, Stages()) != built_in_folder(task_config(*small), rows, Stages())


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("NEOPROTO_CACHE", str(tmp_path / "file"))
    config = task_config("actor_rollout_ref.model.tiny.max_sft_steps=0")
    with pytest.raises(ConfigError, match=f"the model cache {tmp_path}/file/models cannot be written"):
        model_folder(config, load_rows(config), Stages())


def encoded(config: RunConfig) -> tuple[Rows, EncodedPrompts]:
    rows = load_rows(config)
    return rows, EncodedPrompts(
        rows=tuple(rows.train),
        token_ids=tuple((1,) for _ in rows.train),
        filtered=0,
        truncated=0,
        max_prompt_length=4,
        pad_token_id=0,
    )


def test_the_built_in_model_on_own_files_is_said(train_file: Path) -> None:
    config = compose_run("ppo_monarch", ["data=files", f"data.train_files={train_file}"])
    said = list(notes(config, *encoded(config), None, 3))
    assert any("warm-started on these files" in note for note in said)


def test_a_task_with_fewer_questions_is_said_and_may_be_judged_by_its_own_scorer() -> None:
    few = ["data.task.options.max_word_len=3", "data.task.val_size=50", "reward.name=reasoning_gym"]
    config = compose_run("ppo_monarch", few)
    rows, prompts = encoded(config)
    assert {row.reward_model["style"] for row in rows.train} == {"reasoning_gym"}
    assert any("gave only" in note for note in notes(config, rows, prompts, None, 3))
