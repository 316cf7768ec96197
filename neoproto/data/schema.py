"""The columns and the meta_info of a batch: what each is, who writes it and who reads it.

A test holds this table against a real step (`tests/e2e/test_columns.py`); `docs/data.md` shows it, written by
`scripts/config_reference.py`. Code uses the names as they are: `batch["old_log_probs"]`.

Shape legend: B = rows (prompts; from `generate` on samples), P = `data.max_prompt_length`,
R = `data.max_response_length`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Stage = Literal["prompts", "generate", "annotate", "estimate"]
Writer = Literal["prompts", "rollout", "reward", "actor", "reference", "critic", "controller"]
Reader = Literal["rollout", "reward", "actor", "reference", "critic", "controller", "samples", "validation"]

STAGES: dict[Writer, Stage] = {
    "prompts": "prompts",
    "rollout": "generate",
    "reward": "annotate",
    "actor": "annotate",
    "reference": "annotate",
    "critic": "annotate",
    "controller": "estimate",
}
"""The stage after which a batch has what each of them writes; `trainer/step.py` has the stages."""


@dataclass(frozen=True, slots=True)
class Column:
    """One column of a batch.

    Attributes:
        shape: by the module's legend, `[B, P+R]` for example.
        dtype: of the tensor or array; `object` for Python objects.
        text: what a value is.
        readers: who reads it; `samples` and `validation` are the files that a run writes for people.
        when: under which setting a batch has it; empty: always.
        last: the last stage after which a batch has it; None: it stays.
    """

    name: str
    writer: Writer
    shape: str
    dtype: str
    text: str
    readers: tuple[Reader, ...] = ()
    when: str = ""
    last: Stage | None = None


@dataclass(frozen=True, slots=True)
class MetaKey:
    """One key of `meta_info`: which batches have it, and who reads it."""

    name: str
    kind: Literal["training and validation", "validation"]
    dtype: str
    text: str
    readers: tuple[Reader, ...]


_MODELS: tuple[Reader, ...] = ("actor", "reference", "critic")

COLUMNS = (
    Column("prompts", "prompts", "[B, P]", "int64", "token ids, left-padded", ("rollout", "samples")),
    Column("prompt_len", "prompts", "[B]", "int64", "tokens of the prompt", ("rollout",), last="prompts"),
    Column(
        "uid", "prompts", "[B]", "object", "names the prompt; its samples share it",
        ("rollout", "reward", "controller", "samples", "validation"),
    ),
    Column(
        "data_source", "prompts", "[B]", "object", "the row's data source",
        ("reward", "samples", "validation"),
    ),
    Column(
        "reward_model", "prompts", "[B]", "object", "`style` and `ground_truth`",
        ("reward", "samples", "validation"),
    ),
    Column("extra_info", "prompts", "[B]", "object", "the row's `extra_info`", ("reward",)),
    Column("raw_prompt", "prompts", "[B]", "object", "the chat messages", ("samples", "validation")),
    Column(
        "responses", "rollout", "[B, R]", "int64", "token ids, right-padded", ("reward", *_MODELS, "samples")
    ),
    Column("input_ids", "rollout", "[B, P+R]", "int64", "`prompts` and `responses` in a row", _MODELS),
    Column(
        "attention_mask", "rollout", "[B, P+R]", "int64", "0 on padding",
        ("reward", *_MODELS, "controller", "samples"),
    ),
    Column("position_ids", "rollout", "[B, P+R]", "int64", "position without the padding", _MODELS),
    Column(
        "response_mask", "rollout", "[B, R]", "int64", "1 on tokens of the policy: those are trained",
        ("reward", *_MODELS, "controller"),
    ),
    Column(
        "rollout_log_probs", "rollout", "[B, R]", "float32", "log-prob at sampling, 0 on padding",
        ("controller", "samples"),
    ),
    Column(
        "weight_versions", "rollout", "[B, R]", "int64", "number of the weights at sampling, -1 on padding",
        ("controller", "samples"),
    ),
    Column("truncated", "rollout", "[B]", "bool", "ended by the length limit", ("controller",)),
    Column(
        "token_level_scores", "reward", "[B, R]", "float32", "the score, on the policy's last token",
        ("controller", "samples", "validation"),
    ),
    Column(
        "reward_failed", "reward", "[B]", "int8", "0, or how its judge failed: 1 timeout, 2 error",
        ("controller", "validation"),
    ),
    Column("acc", "reward", "[B]", "float64", "accuracy", ("validation",)),
    Column(
        "response_text", "reward", "[B]", "object", "the answer's text", ("samples", "validation"),
        when="meta_info `keep_text`",
    ),
    Column(
        "vote", "reward", "[B]", "object", "the answer as maj@n compares it, or null", ("validation",),
        when="meta_info `validate`",
    ),
    Column(
        "reward_extra_info", "reward", "[B]", "object", "what the function returned beside `score` and `acc`",
        when="`reward.custom_reward_function`",
    ),
    Column(
        "old_log_probs", "actor", "[B, R]", "float32",
        "log-prob by the policy before the updates; with `rollout_correction.bypass_mode` rollout's",
        ("controller", "actor"),
    ),
    Column(
        "entropys", "actor", "[B, R]", "float32", "entropy of the policy, nats",
        when="`rollout_correction.bypass_mode=false`",
    ),
    Column(
        "ref_log_prob", "reference", "[B, R]", "float32", "log-prob by the reference",
        ("controller", "actor"), when="a reference",
    ),
    Column(
        "values", "critic", "[B, R]", "float32", "value of the state before each token",
        ("controller", "critic"), when="a critic",
    ),
    Column(
        "bootstrap_values", "critic", "[B]", "float32", "value of the state after the last token",
        ("controller",), when="a critic",
    ),
    Column("advantages", "controller", "[B, R]", "float32", "what the policy loss weights by", ("actor",)),
    Column("returns", "controller", "[B, R]", "float32", "what the critic is trained towards", ("critic",)),
    Column(
        "rollout_is_weights", "controller", "[B, R]", "float32", "importance weights", ("actor",),
        when="`rollout_correction.rollout_is`",
    ),
    Column(
        "generated_mask", "controller", "[B, R]", "int64", "`response_mask` before cut rows were set to 0",
        when="`algorithm.truncated=mask` and a cut row",
    ),
)  # fmt: skip

META_INFO = (
    MetaKey("step", "training and validation", "int", "the step", ("reward",)),
    MetaKey("validate", "training and validation", "bool", "true: held-out prompts", ("rollout", "reward")),
    MetaKey("keep_text", "training and validation", "bool", "`response_text` is wanted", ("reward",)),
    MetaKey("greedy", "validation", "bool", "the most likely token instead of sampling", ("rollout",)),
    MetaKey("n", "validation", "int", "samples of each prompt", ("rollout",)),
)


def columns_after(stage: Stage) -> dict[str, Column]:
    """The columns that a batch may have after a stage of a training step, by name."""
    order: list[Stage] = ["prompts", "generate", "annotate", "estimate"]
    reached = order.index(stage)
    return {
        column.name: column
        for column in COLUMNS
        if order.index(STAGES[column.writer]) <= reached
        and (column.last is None or reached <= order.index(column.last))
    }


def columns_read_by(reader: Reader) -> set[str]:
    """The names of the columns that one reader reads."""
    return {column.name for column in COLUMNS if reader in column.readers}
