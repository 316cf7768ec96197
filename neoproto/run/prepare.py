"""Everything that can be wrong with a run's input is found here, before a worker process exists.

your functions, model folders named ─> rows ─> model folder ─> tokenizer ─> encoded prompts ─> steps
└ before anything is started (checks.py)                                        torch is not imported
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from actors.reward.builtin import check_rows
from actors.rollout.options import check_servable
from neoproto.config import RunConfig
from neoproto.data.model_files import (
    MODEL_FIELD,
    count_parameters,
    end_token_ids,
    find_model_folder,
    vocabulary_size,
)
from neoproto.data.prompts import (
    PLAIN_TEMPLATE,
    EncodedPrompts,
    PromptLoader,
    PromptRow,
    asks_for_date,
    check_model_folder,
    encode_prompts,
    load_tokenizer,
    read_rows,
    rows_from_dicts,
    today,
)
from neoproto.errors import ConfigError
from neoproto.rollout.engines import ENGINES
from neoproto.trainer.checkpoint.resume import OWN_LOOP_NONE

CRITIC_FIELD = "critic.model.path"
Stage = Callable[[str], AbstractContextManager[None]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Rows:
    """Prompt rows before tokenisation."""

    train: Sequence[PromptRow]
    val: Sequence[PromptRow]


@dataclass(frozen=True, kw_only=True, slots=True)
class PreparedModel:
    """A policy that rollout can serve, whose files have been checked.

    Attributes:
        config: with the day in it that the chat template is given, if it asks for one.
        model_dir: the policy's Hugging Face folder.
        pad_token_id, eos_token_ids: what the tokenizer pads with, and what ends an answer.
    """

    config: RunConfig
    model_dir: Path
    pad_token_id: int
    eos_token_ids: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class PreparedRun(PreparedModel):
    """A run whose inputs have been checked.

    Attributes:
        critic_dir: the folder the critic starts from.
        loader: training prompts.
        validation: held-out prompts, None without any.
        total_steps: training steps to run.
        notes: what a person should know of the data (rows filtered, truncated).
        loop: which trainer loop it has, see `neoproto.trainer.checkpoint.resume.code_of`.
    """

    critic_dir: Path
    loader: PromptLoader
    validation: EncodedPrompts | None
    total_steps: int
    notes: tuple[str, ...]
    loop: str = OWN_LOOP_NONE


def prepare(
    config: RunConfig, device: str, stage: Stage, earlier: Callable[[], str | None] = lambda: None
) -> PreparedRun:
    """Check and load a run's inputs; makes the built-in model if it is wanted and not cached.

    Args:
        device: what rollout runs on, "cpu" or "gpu".
        stage: called with what is being done, around each slow piece.
        earlier: the day that the prompts of the run were given before, see `earlier_date`.

    Raises:
        ConfigError: an input is wrong; names the field, file or line.
    """
    with stage("reading prompts"):
        rows = load_rows(config)
    check_batch(config, len(rows.train))
    check_judged(config, (*rows.train, *rows.val))
    model_dir = served_folder(config, rows, device, stage)
    if config.actor_rollout_ref.model.path is not None:  # a built-in one is known to be
        from actors.training.torch_model import check_savable  # late, as it imports torch

        check_savable(model_dir, field=MODEL_FIELD)
    with stage("tokenising prompts"):
        tokenizer = load_tokenizer(model_dir)
        model = prepared_model(config, model_dir, tokenizer, earlier)
        config = model.config
        critic_dir = critic_folder(config, model_dir, tokenizer, device)
        train = encode(config, rows.train, tokenizer)
        validation = encode(config, rows.val, tokenizer) if rows.val else None
    loader = PromptLoader(train, config.data.train_batch_size, config.data.shuffle, config.data.seed)
    steps = config.trainer.total_training_steps or config.trainer.total_epochs * loader.steps_per_epoch
    return PreparedRun(
        config=config,
        model_dir=model_dir,
        pad_token_id=model.pad_token_id,
        eos_token_ids=model.eos_token_ids,
        critic_dir=critic_dir,
        loader=loader,
        validation=validation,
        total_steps=steps,
        notes=tuple(notes(config, rows, train, validation, steps)),
    )


def notes(
    config: RunConfig, rows: Rows, train: EncodedPrompts, validation: EncodedPrompts | None, steps: int
) -> Iterator[str]:
    """What a person should know of a run before it starts."""
    data = config.data
    epochs = steps * data.train_batch_size / len(train)
    yield (
        f"{steps} steps of {data.train_batch_size} prompts x {config.actor_rollout_ref.rollout.n} samples: "
        f"{epochs:.2g} epochs of {len(train):,} prompts"
    )
    fixed, passes = config.trainer.total_training_steps, config.trainer.total_epochs
    if fixed is not None and passes != 1:
        yield f"trainer.total_training_steps={fixed} wins over trainer.total_epochs={passes}"
    if data.train_files is None and len(rows.train) < data.task.size:
        yield f"{data.task.name} gave only {len(rows.train):,} of {data.task.size:,} training questions"
    model = config.actor_rollout_ref.model
    if data.train_files is not None and model.path is None and model.built_in == "tiny":
        yield "actor_rollout_ref.model.path is null: the tiny model, warm-started on these files, is trained"
    yield from unread_options(config)
    yield from data_notes("training", train)
    if validation is not None:
        yield from data_notes("validation", validation)


def unread_options(config: RunConfig) -> Iterator[str]:
    """Options of other engines that are set, and that the engine of this run does not read."""
    rollout = config.actor_rollout_ref.rollout
    for name, kind in ENGINES.items():
        for option in kind.options if name != rollout.name else ():
            value, default = getattr(rollout, option), type(rollout).model_fields[option].default
            if value != default and option not in ENGINES[rollout.name].options:
                yield (
                    f"actor_rollout_ref.rollout.{option}={value} is an option of {name}; "
                    f"{rollout.name} does not read it"
                )


def check_batch(config: RunConfig, prompts: int) -> None:
    """Refuse data that do not fill one batch before a model is made for them; some may be left out later."""
    if prompts < config.data.train_batch_size:
        raise ConfigError(
            f"data.train_batch_size={config.data.train_batch_size}: the data have only {prompts} prompts"
        )


def check_functions(config: RunConfig) -> None:
    """Import the user's functions, and have an estimator of advantages judge a small batch.

    Raises:
        ConfigError: one cannot be used.
    """
    check_reward_function(config)
    if config.algorithm.adv_estimator == "custom":
        from neoproto.trainer.advantages import check_estimator  # late, as it imports torch

        check_estimator(config)


def check_named_models(config: RunConfig) -> None:
    """See that the folders of models that the configuration names are model folders.

    Raises:
        ConfigError: one is not.
    """
    for field, path in (
        (MODEL_FIELD, config.actor_rollout_ref.model.path),
        (CRITIC_FIELD, config.critic.model.path),
    ):
        if path is not None:
            find_model_folder(path, field=field)


def check_reward_function(config: RunConfig) -> None:
    """Import the user's reward function, if there is one, to find out here that it cannot be."""
    custom = config.reward.custom_reward_function
    if custom.path is not None:
        from actors.reward.function import load_reward_function

        load_reward_function(custom.path, custom.name)


def check_judged(config: RunConfig, rows: Iterable[PromptRow]) -> None:
    """Refuse rows that the built-in rewards cannot judge, unless the reward is the user's own."""
    if config.reward.custom_reward_function.path is None:
        check_rows(config.reward.name, rows)


def load_rows(config: RunConfig) -> Rows:
    """Rows of the user's files, or of the configured task."""
    data = config.data
    if data.train_files is not None:
        train = read_rows(data.train_files, field="data.train_files")
        val = read_rows(data.val_files, field="data.val_files") if data.val_files else []
        return Rows(train=train, val=val)
    from neoproto.data.tasks import load_task

    own_scorer = config.reward.name == "reasoning_gym"
    task = load_task(
        data.task.name,
        data.task.size,
        data.task.seed,
        data.task.options,
        data.task.val_size,
        reward_style="reasoning_gym" if own_scorer else "exact_match",
    )
    return Rows(
        train=rows_from_dicts(task.train, name=f"{data.task.name} train"),
        val=rows_from_dicts(task.val, name=f"{data.task.name} val"),
    )


def served_folder(config: RunConfig, rows: Rows, device: str, stage: Stage) -> Path:
    """`model_folder`, of a model that rollout's engine can serve.

    Args:
        device: what rollout runs on, "cpu" or "gpu".

    Raises:
        ConfigError: see `model_folder`; or the engine cannot serve it.
    """
    folder = model_folder(config, rows, stage)
    check_servable(
        folder,
        max_model_len=config.max_model_len,
        device=device,
        field=MODEL_FIELD,
        engine=config.actor_rollout_ref.rollout.name,
    )
    return folder


def model_folder(config: RunConfig, rows: Rows, stage: Stage) -> Path:
    """The policy's folder, whole: the user's, or a built-in model's.

    Raises:
        ConfigError: it is no model folder, a file of its weights is damaged, or a built-in model has not been
            made and cannot be.
    """
    path = config.actor_rollout_ref.model.path
    if path is not None:
        return check_model_folder(path)
    folder = built_in_folder(config, rows, stage)
    count_parameters(folder)  # what lay in the cache may be damaged too
    return folder


def built_in_folder(config: RunConfig, rows: Rows, stage: Stage) -> Path:
    """The cached folder of a built-in model, made if need be; the tiny one is warm-started on these rows."""
    if config.actor_rollout_ref.model.built_in == "smollm2":
        from actors.models.smollm2 import cached_smollm2

        return cached_smollm2()
    from actors.models.tiny_model import TinyModelOptions, ensure_tiny_model

    tiny = config.actor_rollout_ref.model.tiny
    options = TinyModelOptions(
        hidden_size=tiny.hidden_size,
        intermediate_size=tiny.intermediate_size,
        num_layers=tiny.num_layers,
        num_heads=tiny.num_heads,
        seed=tiny.seed,
        stop_score=tiny.warm_start_score,
        max_steps=tiny.max_sft_steps,
    )
    layout = [
        {"uid": row.uid, "prompt": row.messages, "reward_model": row.reward_model}
        for row in (with_system_prompt(row, config.data.system_prompt) for row in rows.train)
    ]
    with stage("preparing the built-in model (made once, then cached)"):
        return ensure_tiny_model(options, layout)


def critic_folder(config: RunConfig, model_dir: Path, policy_tokenizer: Any, device: str) -> Path:
    """The folder the critic starts from: the policy's, or one that can read whatever the policy may write.

    Raises:
        ConfigError: it is no model folder, has too few positions, or another vocabulary.
    """
    if config.critic.model.path is None:
        return model_dir
    folder = check_model_folder(config.critic.model.path, field=CRITIC_FIELD)
    longest = config.data.max_prompt_length + config.data.max_response_length
    check_servable(folder, max_model_len=longest, device=device, field=CRITIC_FIELD, engine=None)
    ours = policy_tokenizer.get_vocab()
    theirs = load_tokenizer(folder, field=CRITIC_FIELD).get_vocab()
    differing = [token for token, number in ours.items() if theirs.get(token) != number]
    other = min(differing, key=ours.__getitem__, default=None)
    if other is not None:
        raise ConfigError(
            f"{CRITIC_FIELD}: {folder} has another vocabulary than the policy, whose tokens it is to read: "
            f"{other!r} is {theirs.get(other)} there, {ours[other]} in {model_dir}"
        )
    known, wanted = vocabulary_size(folder, field=CRITIC_FIELD), vocabulary_size(model_dir)
    if known is not None and wanted is not None and known < wanted:
        raise ConfigError(
            f"{CRITIC_FIELD}: the model in {folder} knows {known} tokens (vocab_size in config.json), the "
            f"policy in {model_dir} knows {wanted}"
        )
    return folder


def prepared_model(
    config: RunConfig, folder: Path, tokenizer: Any, earlier: Callable[[], str | None]
) -> PreparedModel:
    """What is read of a served model (`served_folder`) and its tokenizer.

    Args:
        earlier: the day that prompts were given before, see `earlier_date`.

    Raises:
        ConfigError: see `end_token_ids`.
    """
    return PreparedModel(
        config=dated(config, tokenizer, earlier),
        model_dir=folder,
        pad_token_id=int(tokenizer.pad_token_id),
        eos_token_ids=eos_token_ids(folder, tokenizer),
    )


def eos_token_ids(model_dir: Path, tokenizer: Any) -> tuple[int, ...]:
    """Tokens that end an answer: the tokenizer's, and those that the model's files name.

    Raises:
        ConfigError: see `end_token_ids`.
    """
    return tuple(sorted({int(tokenizer.eos_token_id), *end_token_ids(model_dir)}))


def dated(config: RunConfig, tokenizer: Any, earlier: Callable[[], str | None]) -> RunConfig:
    """The configuration with the day that the chat template is given, if it asks for one: the configured day,
    else that of `earlier`, else today."""
    template = PLAIN_TEMPLATE if config.data.chat_template == "plain" else None
    if config.data.date is not None or not asks_for_date(tokenizer, template):
        return config
    data = config.data.model_copy(update={"date": earlier() or today()})
    return config.model_copy(update={"data": data})


def encode(config: RunConfig, rows: Sequence[PromptRow], tokenizer: Any) -> EncodedPrompts:
    """Tokenise rows as `data` says, the system prompt before them."""
    data = config.data
    template = PLAIN_TEMPLATE if data.chat_template == "plain" else None
    asked = [with_system_prompt(row, data.system_prompt) for row in rows]
    known = vocabulary_size(tokenizer.name_or_path)
    return encode_prompts(
        asked, tokenizer, data.max_prompt_length, data.truncation, template, known, data.date
    )


def with_system_prompt(row: PromptRow, text: str | None) -> PromptRow:
    """The row with this system message first, unless it begins with one or none is wanted."""
    if text is None or row.messages[0]["role"] == "system":
        return row
    return replace(row, messages=({"role": "system", "content": text}, *row.messages))


def data_notes(which: str, prompts: EncodedPrompts) -> tuple[str, ...]:
    """What happened to prompts that were too long."""
    notes = []
    if prompts.filtered:
        notes.append(f"{prompts.filtered} {which} prompts longer than data.max_prompt_length were left out")
    if prompts.truncated:
        notes.append(f"{prompts.truncated} {which} prompts were cut to data.max_prompt_length")
    return tuple(notes)
