"""Whether replicas served what they said: log-probs of a run's samples, computed again from its checkpoints.

samples/step_N.jsonl ── tokens, log-probs, versions ──┐
checkpoints/global_step_N/actor ── weights ───────────┴─> the same log-probs, or a wrong version

Version 0 is the model the run started from; version n are the weights after n updates, and the harness has
runs keep a checkpoint of each. Everything is read as plain files, and computed by transformers.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM

from neoproto.export.session import rows_of, run_config
from neoproto.run.prepare import model_folder
from tests.chaos.verdict import Checked

MOST_DIFFERENCE = 1e-4
"""Sums in another order change a log-prob by less than 1e-5, an update of the tiny model by much more."""
_WEIGHTS = "model."
Row = dict[str, Any]


def check_samples(run_folder: Path, env: Mapping[str, str]) -> Checked:
    """Compare every training sample of a run with the weights it names.

    Args:
        env: the run's, which says where the built-in model is.
    """
    rows = sampled(run_folder)
    if not rows:
        return Checked()
    config = run_config(run_folder)
    with _cache_of(env):
        start = model_folder(config, rows_of(config), lambda _: contextlib.nullcontext())
    model = AutoModelForCausalLM.from_pretrained(start, dtype=torch.float32).eval()
    return _compare(rows, model, saved_versions(run_folder), config.actor_rollout_ref.rollout.temperature)


def _compare(rows: list[Row], model: Any, saved: Mapping[int, Path], temperature: float) -> Checked:
    """All rows, version by version; `model` has the weights of version 0."""
    by_version: dict[int, list[Row]] = defaultdict(list)
    for row in rows:
        for version in set(row["weight_versions"]):
            by_version[version].append(row)
    tokens = unknown = 0
    worst, wrong = MOST_DIFFERENCE, ""
    for version, found in sorted(by_version.items()):
        count = sum(row["weight_versions"].count(version) for row in found)
        if version > 0 and version not in saved:
            unknown += count
            continue
        if version > 0:
            _load(model, saved[version])
        tokens += count
        for row, off in zip(found, differences(model, found, version, temperature), strict=True):
            if not off < worst:
                worst = off
                who = f"a token of {row['uid']} is said to be of version {version}"
                wrong = f"step {row['step']}: {who}; its log-prob is off by {off:.2g}"
    return Checked(tokens=tokens, unknown=unknown, versions=len(by_version), wrong=wrong)


def sampled(run_folder: Path) -> list[Row]:
    """Rows of all sample files; the last of a killed run may be cut off."""
    rows = []
    for path in sorted((run_folder / "samples").glob("step_*.jsonl")):
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
        rows += [json.loads(line) for line in lines if line.endswith("\n")]
    return rows


def saved_versions(run_folder: Path) -> dict[int, Path]:
    """The policy's file by the version it was published as, of whole checkpoints."""
    found = {}
    for folder in (run_folder / "checkpoints").glob("global_step_*"):
        if (folder / "manifest.json").exists():
            _, number = json.loads((folder / "trainer.json").read_text())["version"]
            (found[number],) = (folder / "actor").glob("shard-*-of-00001.safetensors")
    return found


def _load(model: Any, file: Path) -> None:
    state = {
        name.removeprefix(_WEIGHTS): tensor
        for name, tensor in load_file(file).items()
        if name.startswith(_WEIGHTS)
    }
    told = model.load_state_dict(state, strict=False)
    tied = set(model.all_tied_weights_keys)
    assert not told.unexpected_keys
    assert set(told.missing_keys) <= tied, told.missing_keys


@torch.inference_mode()
def differences(model: Any, rows: Sequence[Row], version: int, temperature: float) -> list[float]:
    """The largest difference of a log-prob among each row's tokens of a version; every row has some."""
    texts = [torch.tensor(row["prompt_ids"] + row["response_ids"]) for row in rows]
    # Padding behind a text changes nothing before it.
    logits = model(pad_sequence(texts, batch_first=True)).logits.float() / temperature
    found = []
    for row, text, scores in zip(rows, texts, logits.log_softmax(-1), strict=True):
        begin = len(row["prompt_ids"])
        log_probs = scores[begin - 1 : len(text) - 1].gather(1, text[begin:, None])[:, 0]
        off = (log_probs - torch.tensor(row["log_probs"])).abs()
        found.append(float(off[torch.tensor(row["weight_versions"]) == version].max()))
    return found


@contextlib.contextmanager
def _cache_of(env: Mapping[str, str]) -> Iterator[None]:
    """Look for the built-in model where the run does."""
    before = os.environ.get("NEOPROTO_CACHE")
    try:
        if "NEOPROTO_CACHE" in env:
            os.environ["NEOPROTO_CACHE"] = env["NEOPROTO_CACHE"]
        yield
    finally:
        os.environ.pop("NEOPROTO_CACHE", None)
        if before is not None:
            os.environ["NEOPROTO_CACHE"] = before
