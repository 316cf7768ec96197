"""Training samples as they are written to the run folder, for people and for who checks the run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from neoproto.data import DataProto
from neoproto.data.paths import named_errors

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
        path = self._folder / f"step_{step}.jsonl"
        columns: dict[str, Any] = dict(batch.materialize(list(COLUMNS)))
        self._folder.mkdir(parents=True, exist_ok=True)
        with named_errors(path), path.open("w", encoding="utf-8") as file:
            for number in range(len(batch)):
                row = {"step": step, **_row({name: column[number] for name, column in columns.items()})}
                file.write(json.dumps(row, ensure_ascii=False) + "\n")


def _row(sample: dict[str, Any]) -> dict[str, Any]:
    # A loss mask may leave tokens out; what was generated is what has a version.
    versions: npt.NDArray[np.int64] = np.asarray(sample["weight_versions"])
    generated = versions >= 0
    prompt = np.asarray(sample["prompts"])
    asked = np.asarray(sample["attention_mask"])[: len(prompt)].astype(bool)
    return {
        "uid": str(sample["uid"]),
        "data_source": str(sample["data_source"]),
        "prompt": "\n".join(str(message["content"]) for message in sample["raw_prompt"]),
        "answer": str(sample["response_text"]),
        "ground_truth": str(sample["reward_model"].get("ground_truth")),
        "score": float(np.asarray(sample["token_level_scores"]).sum()),
        "prompt_ids": prompt[asked].tolist(),
        "response_ids": np.asarray(sample["responses"])[generated].tolist(),
        "log_probs": np.asarray(sample["rollout_log_probs"])[generated].tolist(),
        "weight_versions": versions[generated].tolist(),
    }
