"""From prompt rows to batches of token ids.

    rows ──encode_prompts──> EncodedPrompts ──PromptLoader──> PromptColumns (one training batch)

Rows come from `read_rows` (files) or `rows_from_dicts` (a task).
"""

from __future__ import annotations

import datetime
import hashlib
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np

from neoproto.data.model_files import (
    MODEL_FIELD,
    check_model_folder,
    check_tokenizer_files,
    find_model_folder,
    read_json_object,
    read_model_config,
    vocabulary_size,
)
from neoproto.data.persist import json_text
from neoproto.data.rows import PromptRow, read_rows, rows_from_dicts
from neoproto.errors import ConfigError
from neoproto.text import Problems, one_line, shown

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "PLAIN_TEMPLATE",
    "EncodedPrompts",
    "PromptColumns",
    "PromptLoader",
    "PromptRow",
    "Truncation",
    "asks_for_date",
    "check_model_folder",
    "encode_prompts",
    "ending",
    "load_tokenizer",
    "read_rows",
    "rows_from_dicts",
    "today",
]

Truncation = Literal["error", "left", "right", "filter"]
PLAIN_TEMPLATE = "plain"
JUDGED_BY = ("data_source", "reward_model", "extra_info")
"""What a reward is given of a row, beside the answer."""
KNOWN_ROLES = ("system", "developer", "user", "assistant", "tool", "function")
"""Roles that a message may have whatever the chat template; how it writes them is the template's business."""


def load_tokenizer(path: str | Path, *, field: str = MODEL_FIELD) -> Any:
    """The tokenizer of a model folder; nothing is ever downloaded.

    A tokenizer without a padding token pads with its end-of-sequence token (masks come from lengths, never
    from ids).

    Raises:
        ConfigError: not a model folder (see `find_model_folder`), or its tokenizer cannot be loaded, or it
            has no end-of-sequence token, or one that the model does not know.
    """
    folder = find_model_folder(path, field=field)
    check_tokenizer_files(folder, field=field)
    chosen = _tokenizer_class(folder, field)
    try:
        # Said outright: otherwise a folder with code of its own makes transformers ask at the terminal.
        tokenizer = chosen.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # the files are the user's, and `tokenizers` raises bare Exception
        raise ConfigError(
            f"{field}: the tokenizer in {folder} cannot be loaded: {one_line(error)}"
        ) from error
    if tokenizer.eos_token_id is None:
        raise ConfigError(f"{field}: the tokenizer in {folder} has no end-of-sequence token (eos_token)")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    known = vocabulary_size(folder, field=field)
    for name in ("eos_token", "pad_token"):
        if known is not None and (number := getattr(tokenizer, f"{name}_id")) >= known:
            raise ConfigError(
                f"{field}: the tokenizer in {folder} has the {name} {getattr(tokenizer, name)!r} as number "
                f"{number}, but the model knows {known} tokens (vocab_size in config.json)"
            )
    return tokenizer


def _tokenizer_class(folder: Path, field: str) -> Any:
    """What chooses the folder's tokenizer.

    `AutoTokenizer` imports all that models take, torch's compiler included: seconds, in every process that
    wants a tokenizer alone. For a Llama whose files name the plain class it comes to that class.
    """
    config, about_file = read_model_config(folder, field=field), folder / "tokenizer_config.json"
    about = read_json_object(about_file, field=field) if about_file.exists() else {}
    named = config.get("model_type"), about.get("tokenizer_class"), "auto_map" in about
    if named == ("llama", "TokenizersBackend", False):
        from transformers import PreTrainedTokenizerFast

        return PreTrainedTokenizerFast
    from transformers import AutoTokenizer

    return AutoTokenizer


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptColumns:
    """Columns of a batch of prompts, ready for `DataProto.from_dict`.

    Attributes:
        tensors: `prompts` [B, P] int64, left-padded; `prompt_len` [B] int64, real tokens of each.
        non_tensors: object arrays of length B: uid, data_source, reward_model, extra_info, raw_prompt.
    """

    tensors: dict[str, Tensor]
    non_tensors: dict[str, np.ndarray[Any, np.dtype[np.object_]]]


@dataclass(frozen=True, kw_only=True, slots=True)
class EncodedPrompts:
    """Rows with their token ids.

    Attributes:
        rows, token_ids: one entry a prompt; each at most `max_prompt_length` tokens, at least one.
        filtered: rows left out because they were longer.
        truncated: rows cut to the limit.
        max_prompt_length: width P of the batches.
        pad_token_id: what batches are padded with.
        date: the day that their chat template was given; None if it does not ask for one.
    """

    rows: tuple[PromptRow, ...]
    token_ids: tuple[tuple[int, ...], ...]
    filtered: int
    truncated: int
    max_prompt_length: int
    pad_token_id: int
    date: str | None = None

    def __len__(self) -> int:
        return len(self.rows)

    def columns(self, indices: Sequence[int]) -> PromptColumns:
        """The batch of the prompts at `indices`, in that order."""
        import torch  # late: rows are read and tokenised in processes that have not imported it

        prompts = torch.full((len(indices), self.max_prompt_length), self.pad_token_id, dtype=torch.int64)
        lengths = torch.zeros(len(indices), dtype=torch.int64)
        for line, index in enumerate(indices):
            ids = self.token_ids[index]
            prompts[line, self.max_prompt_length - len(ids) :] = torch.tensor(ids, dtype=torch.int64)
            lengths[line] = len(ids)
        rows = [self.rows[index] for index in indices]
        return PromptColumns(
            tensors={"prompts": prompts, "prompt_len": lengths},
            non_tensors={
                "uid": _objects([row.uid for row in rows]),
                "data_source": _objects([row.data_source for row in rows]),
                "reward_model": _objects([row.reward_model for row in rows]),
                "extra_info": _objects([row.extra_info for row in rows]),
                "raw_prompt": _objects([list(row.messages) for row in rows]),
            },
        )

    def batches(self, batch_size: int) -> Iterator[PromptColumns]:
        """All prompts once, in order; the last batch may be smaller."""
        for start in range(0, len(self), batch_size):
            yield self.columns(range(start, min(start + batch_size, len(self))))

    def fingerprint(self) -> str:
        """Changes when a prompt, its order or its tokens change."""
        digest = hashlib.blake2b(digest_size=16)
        for row, ids in zip(self.rows, self.token_ids, strict=True):
            digest.update(f"{row.uid}\0{','.join(map(str, ids))}\n".encode())
        return digest.hexdigest()

    def judged(self) -> dict[str, str]:
        """For each column that answers are judged by, what changes when a value in it changes."""
        digests = {name: hashlib.blake2b(digest_size=16) for name in JUDGED_BY}
        for row in self.rows:
            for name, digest in digests.items():
                digest.update(f"{json_text(getattr(row, name))}\n".encode())
        return {name: digest.hexdigest() for name, digest in digests.items()}


def encode_prompts(
    rows: Sequence[PromptRow],
    tokenizer: Any,
    max_prompt_length: int,
    truncation: Truncation = "error",
    chat_template: str | None = None,
    vocab_size: int | None = None,
    date: str | None = None,
) -> EncodedPrompts:
    """Render the messages with the chat template, generation prompt included, and tokenise them.

    A row that ends with the assistant's message asks for its continuation: the template's end of that turn is
    left out, as transformers' `continue_final_message` does.

    Args:
        rows: the prompts.
        tokenizer: of the model that will answer.
        max_prompt_length: most tokens a prompt may have.
        truncation: what happens to a longer one: `error` (refused), `left`/`right` (that side is cut and
            the row counted), `filter` (the row is left out and counted).
        chat_template: None: the tokenizer's own. `"plain"`: no template; the messages' contents joined by
            newlines, with the special tokens that the tokenizer adds to any text. Anything else: a Jinja
            template.
        vocab_size: how many tokens the model knows; None: not looked at.
        date: the day, as 2026-12-31, that the template is given if it asks for one; None: today.

    Raises:
        ConfigError: the tokenizer has no template and none is given; a template that cannot be rendered; a
            role that neither `KNOWN_ROLES` nor the template has; a prompt that cannot be tokenised; prompts
            without tokens, or with some that the model does not know; with `error`, prompts that are too long
            (how many, and where the first is and its length); with `filter`, no prompt left.
    """
    if truncation not in get_args(Truncation):
        raise ConfigError(
            f"data.truncation: one of {', '.join(get_args(Truncation))} is needed, got {truncation!r}"
        )
    if chat_template is None and not getattr(tokenizer, "chat_template", None):
        raise ConfigError(
            f"data.chat_template: the tokenizer in {tokenizer.name_or_path} has no chat template; "
            f"data.chat_template={PLAIN_TEMPLATE} joins the messages' contents by newlines instead"
        )
    told = (date or today()) if asks_for_date(tokenizer, chat_template) else None
    encoded = _tokenise(rows, tokenizer, chat_template, told)
    _refuse_unknown_tokens(rows, encoded, tokenizer, vocab_size)
    over = [index for index, ids in enumerate(encoded) if len(ids) > max_prompt_length]
    if over and truncation == "error":
        _refuse_overlong(rows, encoded, over, max_prompt_length)
    kept = set(range(len(rows))) - (set(over) if truncation == "filter" else set())
    if not kept:
        raise ConfigError(
            f"data.max_prompt_length={max_prompt_length}: none of the {len(rows)} prompts is short enough"
        )
    side = slice(-max_prompt_length, None) if truncation == "left" else slice(None, max_prompt_length)
    return EncodedPrompts(
        rows=tuple(rows[index] for index in sorted(kept)),
        token_ids=tuple(tuple(encoded[index][side]) for index in sorted(kept)),
        filtered=len(rows) - len(kept),
        truncated=len(over) if truncation in ("left", "right") else 0,
        max_prompt_length=max_prompt_length,
        pad_token_id=int(tokenizer.pad_token_id),
        date=told,
    )


class PromptLoader:
    """Training batches without end: each epoch a permutation of its own, its incomplete last batch left out.

    The order depends on `seed` and the epoch's number alone. The position can be saved and restored.

    Args:
        encoded: the prompts.
        batch_size: prompts a batch.
        shuffle: permute each epoch; otherwise the data's order.
        seed: of the permutations.

    Raises:
        ConfigError: fewer prompts than one batch needs.
    """

    def __init__(self, encoded: EncodedPrompts, batch_size: int, shuffle: bool = True, seed: int = 0) -> None:
        if batch_size < 1:
            raise ConfigError(f"data.train_batch_size: at least 1 is needed, got {batch_size}")
        if len(encoded) < batch_size:
            raise ConfigError(
                f"data.train_batch_size={batch_size}: the data have only {len(encoded)} prompts"
                + (f" ({encoded.filtered} more were too long)" if encoded.filtered else "")
            )
        self._encoded, self._batch_size, self._shuffle, self._seed = encoded, batch_size, shuffle, seed
        self._epoch = self._position = 0
        self._of_rows: dict[str, Any] | None = None  # of all prompts: made once, when it is first asked for
        self._order = self._permutation()

    @property
    def steps_per_epoch(self) -> int:
        return len(self._encoded) // self._batch_size

    @property
    def epoch(self) -> int:
        """Number, from 0, of the epoch that the next batch belongs to."""
        return self._epoch + (self._position + self._batch_size > len(self._encoded))

    def next_indices(self) -> list[int]:
        """Which prompts make the next batch; moves on."""
        if self._position + self._batch_size > len(self._encoded):
            self._epoch, self._position = self._epoch + 1, 0
            self._order = self._permutation()
        start, self._position = self._position, self._position + self._batch_size
        return self._order[start : self._position]

    def next_batch(self) -> PromptColumns:
        """The next batch; moves on."""
        return self._encoded.columns(self.next_indices())

    def state_dict(self) -> dict[str, Any]:
        """Position in the data, of plain types."""
        if self._of_rows is None:
            self._of_rows = {"fingerprint": self._encoded.fingerprint(), "judged": self._encoded.judged()}
        return {
            "epoch": self._epoch,
            "position": self._position,
            "seed": self._seed,
            "shuffle": self._shuffle,
            "date": self._encoded.date,
            **self._of_rows,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state` was taken. The batch size may differ, the data and their order may not.

        A state without `judged`, of an earlier version, does not record how the rows were judged.

        Raises:
            ConfigError: the data, what they are judged by, `seed` or `shuffle` are not those of the state.
        """
        mine = self.state_dict()
        there, here = state.get("date"), mine["date"]
        if there and here and there != here:
            raise ConfigError(f"data.date: got {here}, but the saved position is of prompts told {there}")
        differing = [key for key in ("fingerprint", "seed", "shuffle") if state[key] != mine[key]]
        if differing:
            listed = ", ".join(f"{key} {state[key]!r} there, {mine[key]!r} here" for key in differing)
            told = f"; they are told the date {here}, data.date names another" if here and not there else ""
            raise ConfigError(f"the saved position is of other training data: {listed}{told}")
        before = state.get("judged", mine["judged"])
        if others := [name for name in JUDGED_BY if before.get(name) != mine["judged"][name]]:
            raise ConfigError(
                f"the saved position is of rows that were judged otherwise: {', '.join(others)} of some row "
                "is not what it was; a new run can start from the trained model (neoproto.export)"
            )
        self._epoch, self._position = int(state["epoch"]), int(state["position"])
        self._order = self._permutation()

    def _permutation(self) -> list[int]:
        order = list(range(len(self._encoded)))
        if self._shuffle:
            random.Random(f"prompts/{self._seed}/{self._epoch}").shuffle(order)
        return order


def _tokenise(
    rows: Sequence[PromptRow], tokenizer: Any, chat_template: str | None, date: str | None
) -> list[list[int]]:
    if not rows:
        raise ConfigError("there are no prompts")
    plain = chat_template == PLAIN_TEMPLATE
    if not plain:
        _refuse_unknown_roles(rows, tokenizer, chat_template)
    texts = [_joined(row) for row in rows] if plain else _rendered(rows, tokenizer, chat_template, date)
    try:
        ids: list[list[int]] = tokenizer(texts, add_special_tokens=plain)["input_ids"]
    except Exception:  # the files are the user's, and `tokenizers` raises bare Exception
        for row, text in zip(rows, texts, strict=True):
            _try_tokenising(row, text, tokenizer, plain)
        raise
    return ids


def _try_tokenising(row: PromptRow, text: str, tokenizer: Any, plain: bool) -> None:
    try:
        tokenizer([text], add_special_tokens=plain)
    except Exception as error:  # as above
        raise ConfigError(
            f"{row.origin}: the tokenizer in {tokenizer.name_or_path} cannot tokenise the prompt: "
            f"{one_line(error)}"
        ) from error


def _joined(row: PromptRow) -> str:
    return "\n".join(message["content"] for message in row.messages if "content" in message)


def ending(messages: Sequence[Mapping[str, Any]]) -> dict[str, bool]:
    """How a chat template is to end a prompt: with the beginning of the assistant's turn, or inside the one
    that the last message has begun, which the answer then continues."""
    continues = messages[-1]["role"] == "assistant"
    return {"add_generation_prompt": not continues, "continue_final_message": continues}


def asks_for_date(tokenizer: Any, chat_template: str | None = None) -> bool:
    """Whether the chat template (see `encode_prompts`) asks for the date, as Llama 3's does."""
    source = chat_template or getattr(tokenizer, "chat_template", None)
    return chat_template != PLAIN_TEMPLATE and "strftime_now" in str(source)


def today() -> str:
    return datetime.date.today().isoformat()


def _rendered(
    rows: Sequence[PromptRow], tokenizer: Any, chat_template: str | None, date: str | None
) -> list[str]:
    """Each row's messages by the template, all on one day: prompts must not change at midnight."""
    clock = {} if date is None else {"strftime_now": datetime.datetime.fromisoformat(date).strftime}
    texts = []
    for row in rows:
        try:
            text = tokenizer.apply_chat_template(
                list(row.messages),
                chat_template=chat_template,
                tokenize=False,
                **ending(row.messages),
                **clock,
            )
        except Exception as error:  # a template is a program of the user's
            raise ConfigError(
                f"{row.origin}: the chat template cannot be rendered: {one_line(error)}"
            ) from error
        texts.append(str(text))
    return texts


def _refuse_unknown_roles(rows: Sequence[PromptRow], tokenizer: Any, chat_template: str | None) -> None:
    """Templates pass over a role that they do not know, or write it down as if the model knew it."""
    source = str(chat_template or tokenizer.chat_template)
    problems = Problems()
    for row in rows:
        for index, message in enumerate(row.messages):
            role = message["role"]
            if role not in KNOWN_ROLES and f"'{role}'" not in source and f'"{role}"' not in source:
                problems.add(
                    f"{row.origin}: prompt[{index}].role: {', '.join(KNOWN_ROLES)}, or one that the chat "
                    f"template names, is needed, got {shown(role)}"
                )
    problems.raise_any()


def _refuse_unknown_tokens(
    rows: Sequence[PromptRow], encoded: Sequence[Sequence[int]], tokenizer: Any, vocab_size: int | None
) -> None:
    problems = Problems()
    for row, ids in zip(rows, encoded, strict=True):
        if not ids:
            problems.add(f"{row.origin}: the prompt has no tokens")
        elif vocab_size is not None and (most := max(ids)) >= vocab_size:
            problems.add(
                f"{row.origin}: the tokenizer in {tokenizer.name_or_path} gives token number {most} "
                f"({tokenizer.convert_ids_to_tokens(most)!r}), but the model knows {vocab_size} tokens "
                "(vocab_size in config.json)"
            )
    problems.raise_any()


def _refuse_overlong(
    rows: Sequence[PromptRow], encoded: Sequence[Sequence[int]], over: Sequence[int], limit: int
) -> None:
    first = over[0]
    raise ConfigError(
        f"data.max_prompt_length={limit}: {len(over)} of {len(rows)} prompts are longer, first "
        f"{rows[first].origin} with {len(encoded[first])} tokens "
        "(raise it, or set data.truncation to left, right or filter)"
    )


def _objects(values: Sequence[Any]) -> np.ndarray[Any, np.dtype[np.object_]]:
    """An object array of exactly these values, never an array made of their insides."""
    array = np.empty(len(values), dtype=object)
    for index, value in enumerate(values):
        array[index] = value
    return array
