"""Samples as they are written to the run folder, for people and for who checks the run: a file a step."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from neoproto.data import DataProto
from neoproto.files import named_errors

COLUMNS = (
    "uid",
    "data_source",
    "raw_prompt",
    "reward_model",
    "response_text",
    "token_level_scores",
    "prompts",
    "responses",
    "attention_mask",
    "rollout_log_probs",
    "weight_versions",
)


class SampleLog:
    """Every sample a step trained on, `step_N.jsonl` a step.

    Args:
        folder: made with the first step; None writes nothing.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder

    @property
    def on(self) -> bool:
        """Whether anything is written: then `keep_text` has to be in the batch's meta_info."""
        return self._folder is not None

    def log(self, step: int, batch: DataProto) -> None:
        """Write down a step's batch, as it was trained on.

        A row has texts and score, `prompt_ids` without padding, and by generated token `response_ids`,
        `log_probs` (at sampling) and `weight_versions` (the number of the version).

        Raises:
            OSError: names the file.
        """
        if self._folder is None:
            return
        columns: dict[str, Any] = dict(batch.materialize(list(COLUMNS)))
        samples = ({name: column[row] for name, column in columns.items()} for row in range(len(batch)))
        write_rows(self._folder, step, ({"step": step, **_row(sample)} for sample in samples))


def write_rows(folder: Path, step: int, rows: Iterable[Mapping[str, Any]]) -> Path:
    """Write `step_{step}.jsonl` into `folder`, which is made if need be; returns its path.

    Raises:
        OSError: names the file.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"step_{step}.jsonl"
    with named_errors(path), path.open("w", encoding="utf-8") as file:
        for row in rows:
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
    return path


def question(messages: Sequence[Mapping[str, Any]]) -> str:
    """A prompt's messages as one text."""
    return "\n".join(str(message["content"]) for message in messages if "content" in message)


def _row(sample: dict[str, Any]) -> dict[str, Any]:
    # A loss mask may leave tokens out; what was generated is what has a version.
    versions: npt.NDArray[np.int64] = np.asarray(sample["weight_versions"])
    generated = versions >= 0
    prompt = np.asarray(sample["prompts"])
    asked = np.asarray(sample["attention_mask"])[: len(prompt)].astype(bool)
    score = float(np.asarray(sample["token_level_scores"]).sum())
    return {
        "uid": str(sample["uid"]),
        "data_source": str(sample["data_source"]),
        "prompt": question(sample["raw_prompt"]),
        "answer": str(sample["response_text"]),
        "ground_truth": str(sample["reward_model"].get("ground_truth")),
        "score": score if math.isfinite(score) else None,  # JSON has no NaN
        "prompt_ids": prompt[asked].tolist(),
        "response_ids": np.asarray(sample["responses"])[generated].tolist(),
        "log_probs": np.asarray(sample["rollout_log_probs"])[generated].tolist(),
        "weight_versions": versions[generated].tolist(),
    }
