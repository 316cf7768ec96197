"""Checkpoints to model folders."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer

from actors.training.torch_model import named_weights
from neoproto.config import load_config
from neoproto.errors import ConfigError, WeightMismatch
from neoproto.export.cli import main
from neoproto.export.session import export
from neoproto.run.compose import compose
from neoproto.run.folder import MODEL, write_config
from neoproto.trainer.checkpoint.folder import CHECKPOINTS, CheckpointFolder
from tests.actors.checkpoint_program import Trained
from tests.actors.tiny_llama import make_folder


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(make_folder(tmp_path_factory.mktemp("model") / "m", tied=True))


def run_folder(path: Path, model: Path, *steps: int) -> dict[int, dict[str, torch.Tensor]]:
    """A run folder with a checkpoint of each step; the weights at each."""
    path.mkdir()
    write_config(path, load_config(compose("ppo_monarch", [f"actor_rollout_ref.model.path={model}"])))
    policy = Trained("policy", model)
    checkpoints = CheckpointFolder(path / CHECKPOINTS)
    weights = {}
    for step in steps:
        policy.update(step)
        partial = checkpoints.begin(step)
        policy.checkpoints.save(partial / "actor")
        digests = policy.finish()
        checkpoints.commit(partial, step, {f"actor/{name}": digest for name, digest in digests.items()})
        state = named_weights(policy.trained.model)
        weights[step] = {name: tensor.detach().clone() for name, tensor in state.items()}
    return weights


def test_the_newest_or_a_named_checkpoint_becomes_a_model_folder(tmp_path: Path, model: Path) -> None:
    weights = run_folder(tmp_path / "run", model, 2, 4)
    assert export(tmp_path / "run", tmp_path / "newest") == 4
    assert export(tmp_path / "run", tmp_path / "older", 2) == 2
    for folder, step in (("newest", 4), ("older", 2)):
        found = load_file(tmp_path / folder / "model.safetensors")
        for name, tensor in found.items():
            assert torch.equal(tensor, weights[step][name]), (folder, name)
        assert found
    assert AutoTokenizer.from_pretrained(tmp_path / "newest").chat_template
    assert sorted(path.name for path in tmp_path.iterdir()) == ["newest", "older", "run"]


def test_generation_settings_that_transformers_refuses_to_save_are_exported(
    tmp_path: Path, model: Path
) -> None:
    source = tmp_path / "source"
    shutil.copytree(model, source)
    (source / "generation_config.json").write_text('{"temperature": 0.6}')
    run_folder(tmp_path / "run", source, 1)
    assert export(tmp_path / "run", tmp_path / "to") == 1
    written = json.loads((tmp_path / "to" / "generation_config.json").read_text())
    assert (written["temperature"], written["eos_token_id"]) == (0.6, 2)


def test_a_folder_of_the_users_beside_it_is_left_alone(tmp_path: Path, model: Path) -> None:
    run_folder(tmp_path / "run", model, 2)
    (tmp_path / "to.unfinished").mkdir()
    (tmp_path / "to.unfinished" / "mine").touch()
    export(tmp_path / "run", tmp_path / "to")
    assert (tmp_path / "to.unfinished" / "mine").exists()


@pytest.mark.parametrize(
    "case",
    ["no run", "no checkpoint", "only a model", "no such step", "target there", "damaged", "gone", "binary",
     "broken", "another version", "long", "long target", "below a file"],
)  # fmt: skip
def test_wrong_input_is_one_line(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str], case: str
) -> None:
    run, target = tmp_path / "run", tmp_path / "to"
    path = model if case != "gone" else tmp_path / "gone"
    if case in ("no checkpoint", "only a model"):
        run_folder(run, model)
        if case == "only a model":
            (run / MODEL).mkdir()
    elif case not in ("no run", "long"):
        run_folder(run, model, 3)
    broken = {"binary": b"\xff\xfe", "broken": b"a: [1\nb: 2\n", "another version": b"x: 1\n"}
    if case in broken:
        (run / "config.yaml").write_bytes(broken[case])
    run = tmp_path / ("x" * 300) if case == "long" else run
    target = {"long target": tmp_path / ("x" * 300), "below a file": run / "config.yaml" / "x"}.get(
        case, target
    )
    typed = [str(run), "--to", str(target)]
    if case == "no such step":
        typed += ["--step", "7"]
    if case == "target there":
        target.mkdir()
    if case == "damaged":
        shard = next((run / CHECKPOINTS / "global_step_3" / "actor").glob("*.safetensors"))
        data = bytearray(shard.read_bytes())
        data[-1] ^= 1
        shard.write_bytes(data)
    if case == "gone":
        write_config(run, load_config(compose("ppo_monarch", [f"actor_rollout_ref.model.path={path}"])))
    said = {
        "no run": f"error: {run}: no such folder\n",
        "binary": f"error: {run / 'config.yaml'}: not YAML ('utf-8' codec can't decode",
        "broken": f"error: {run / 'config.yaml'}:2: not YAML (expected",
        "another version": f"error: {run / 'config.yaml'}: x: unknown key",
        "long": f"error: {run}: cannot be read: File name too long\n",
        "long target": f"error: --to: {target}: cannot be written: File name too long\n",
        "below a file": f"error: --to: {target}: cannot be written: ",
        "no checkpoint": f"{run} has no checkpoint; there are: none",
        "only a model": f"there are: none; its trained model is {run / MODEL}",
        "no such step": f"{run} has no checkpoint of step 7; there are: 3",
        "target there": f"--to: {target} exists already",
        "damaged": "shard-00000-of-00001.safetensors",
        "gone": "no such folder",
    }[case]
    assert main(typed) == 2
    printed = capsys.readouterr().err
    assert said in printed
    assert printed.count("\n") == 1
    assert case == "long target" or target.exists() == (case == "target there")


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path, model: Path) -> None:
    run = tmp_path / "run"
    run_folder(run, model, 1)
    other = make_folder(tmp_path / "other", hidden_size=64, tied=True)
    write_config(run, load_config(compose("ppo_monarch", [f"actor_rollout_ref.model.path={other}"])))
    with pytest.raises(WeightMismatch, match="is of another model"):
        export(run, tmp_path / "to")
    (run / "config.yaml").write_text("3")
    with pytest.raises(ConfigError, match=r"config\.yaml: wanted a mapping, got int"):
        export(run, tmp_path / "to")
