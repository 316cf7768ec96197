"""Small inputs of a run: a model folder, prompt files, and what to type to use them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from actors.models.tiny_tokenizer import build_tokenizer

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
}


def model_folder(path: Path, *, chat_template: bool = True, **config: Any) -> Path:
    """What the checks before a run look at; the weights are a single number."""
    tokenizer = build_tokenizer((), max_length=64)
    if not chat_template:
        tokenizer.chat_template = None
    tokenizer.save_pretrained(path)
    (path / "config.json").write_text(json.dumps(CONFIG | config))
    save_file({"a": np.zeros(1, np.float32)}, path / "model.safetensors")
    return path


def row(text: str = "abc", **changes: Any) -> dict[str, Any]:
    """A prompt row; a change to None takes the column away."""
    whole = {
        "prompt": [{"role": "user", "content": text}],
        "data_source": "letters",
        "reward_model": {"style": "exact_match", "ground_truth": text[::-1]},
        "extra_info": {"index": 0},
    } | changes
    return {key: value for key, value in whole.items() if value is not None}


def json_lines(path: Path, rows: Sequence[Mapping[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(one) + "\n" for one in rows))
    return path


def parquet(path: Path, rows: Sequence[Mapping[str, Any]]) -> Path:
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([dict(one) for one in rows]), path)
    return path


def words(count: int, length: int = 3) -> list[dict[str, Any]]:
    return [row(chr(ord("a") + index % 26) * length) for index in range(count)]


def overrides(model: Path, train: Path, *more: str) -> list[str]:
    """A run of four prompts a step on one device; `more` wins."""
    return [
        f"actor_rollout_ref.model.path={model}",
        f"data.train_files={train}",
        "data.max_prompt_length=16",
        "data.max_response_length=4",
        "data.train_batch_size=4",
        "actor_rollout_ref.actor.ppo_mini_batch_size=4",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=16",
        "trainer.device_type=cpu",
        *more,
    ]
