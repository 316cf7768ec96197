"""What `dry_run=true` says of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors.torch import save_file

from neoproto.errors import ConfigError
from neoproto.run import checks, plan, session
from neoproto.run.compose import compose_run
from neoproto.run.console import RunConsole
from neoproto.runtime import Runtime
from tests.neoproto.run.inputs import json_lines, model_folder, overrides, words

SIZES = {
    "num_hidden_layers": 2,
    "vocab_size": 262,
    "num_key_value_heads": 1,
    "intermediate_size": 128,
}


def folder(path: Path, **tensors: torch.Tensor) -> Path:
    made = model_folder(path, **SIZES)
    save_file(tensors or {"a": torch.zeros(262, 64), "b": torch.zeros(7)}, made / "model.safetensors")
    return made


def test_sizes_are_read_from_the_configuration(tmp_path: Path) -> None:
    sizes = plan.model_sizes(folder(tmp_path / "m"), field="f")
    assert (sizes.layers, sizes.hidden, sizes.vocabulary, sizes.intermediate) == (2, 64, 262, 128)
    assert (sizes.kv_numbers, sizes.parameters) == (2 * 2 * 1 * 32, 262 * 64 + 7)


def shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *more: str) -> str:
    """What a dry run prints; nothing may be started, and no folder made."""

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("a runtime was made")

    monkeypatch.setattr(Runtime, "from_config", refuse)
    tmp_path.mkdir(exist_ok=True)
    monkeypatch.chdir(tmp_path)
    model = folder(tmp_path / "m")
    train = json_lines(tmp_path / "train.jsonl", words(40))
    before = sorted(tmp_path.iterdir())
    config = compose_run("ppo_monarch", [*overrides(model, train, *more), "dry_run=true"])
    console = Console(width=200, record=True, quiet=False, force_terminal=False)
    session.dry_run(config, RunConsole(console))
    assert sorted(tmp_path.iterdir()) == before
    return console.export_text()


def test_a_dry_run_says_where_how_much_and_what(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = shown(
        tmp_path,
        monkeypatch,
        "trainer.mode=decoupled_async",
        "actor_rollout_ref.rollout.kv_cache_gib=2",
        "trainer.n_gpus_per_node=2",
    )
    for group in ("actor", "critic", "rollout"):
        assert sum(line.startswith(f"│ {group} ") for line in text.splitlines()) == 2, group
    rollout = next(line for line in text.splitlines() if line.startswith("│ rollout ") and "2.00" in line)
    assert "2.75" in rollout  # the cache, and the libraries
    assert "replicas pull them when they choose" in text
    assert "on 2 rank(s), the critic on 2 rank(s)" in text
    assert "nothing was started" in text


def test_memory_of_a_trained_model_is_shared_by_its_ranks() -> None:
    sizes = plan.ModelSizes(parameters=1000, hidden=8, intermediate=20, layers=2, vocabulary=10, kv_numbers=0)
    config = compose_run("ppo_monarch", ["trainer.n_gpus_per_node=2"])
    actor = next(model for model in checks.place(config, config.roles).models if model.worker == "actor")
    row = plan._trained(actor, sizes, 100.0, 0.0)
    assert (row.processes, row.weights, row.training) == (2, 2000.0, 6000.0)
    assert row.activations == 4 * 100 * 2 * (12 * 8 + 4 * 20)
    assert row.total == pytest.approx(2000 + 6000 + row.activations + plan.TORCH_BYTES)


def test_log_probs_that_are_not_computed_are_not_in_the_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bypass = "algorithm.rollout_correction.bypass_mode=true"
    kl = "actor_rollout_ref.actor.use_kl_loss=true"
    for more, said in (
        ((), "score; log-probs of the policy; values; advantages (gae)"),
        ((kl,), "score; log-probs of the policy and of the reference; values; advantages (gae)"),
        ((bypass,), "score; values; advantages (gae)"),
        ((bypass, kl), "score; log-probs of the reference; values; advantages (gae)"),
    ):
        assert said in shown(tmp_path / str(len(said)), monkeypatch, *more)


@pytest.mark.parametrize("fits", [True, False])
def test_too_little_shared_memory_is_said_before_the_start(
    fits: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan, "default_limit", lambda: 1000)
    files = 1 << 30 if fits else 1000
    monkeypatch.setattr(plan.Spill, "into", lambda folder: plan.Spill(folder=folder, limit_bytes=files))
    if not fits:
        with pytest.raises(ConfigError, match=r"^/dev/shm: the store needs about 1 MiB, .*--shm-size=1g\)$"):
            shown(tmp_path, monkeypatch)
        return
    text = " ".join(shown(tmp_path, monkeypatch).split())
    assert "/dev/shm has room for 1 MiB: the rest goes to files in /tmp" in text
    assert "--shm-size=1g" in text
