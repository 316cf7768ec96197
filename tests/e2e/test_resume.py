"""Runs that are killed and gone on with: sync ones to the bit, asynchronous ones to the prompt."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections.abc import Sequence
from importlib import util
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.command import BOUND_S, LIMIT_S, Command, Finished, Start, json_lines

pytestmark = pytest.mark.e2e

BATCH = 8
APART = (
    "timing_s/",
    "perf/throughput",
    "perf/time_per_step",
    "perf/controller_share",
    "store/",
    "rollout/replicas_up",
)
"""What may differ between two runs of the same training: seconds, counters that each start has anew, and the
number of replicas."""


def comparable(row: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if not name.startswith(APART) and name != "time"}


def learned(done: Finished) -> list[dict[str, Any]]:
    """Every figure of every step and validation that two runs have to agree on."""
    rows = [comparable(row) for row in done.metrics]
    return [row for row in rows if row.keys() != {"step"}]


def model(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted((folder / "model").iterdir())}


def wait_for_checkpoint(command: Command, name: str) -> None:
    """Wait until there is such a folder."""
    until, folder = time.monotonic() + LIMIT_S, command.folder / "checkpoints"
    while not any(folder.glob(name)):
        assert command.process.poll() is None, command.errors
        assert time.monotonic() < until, command.out
        time.sleep(0.002)


def saved(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "checkpoints").iterdir())


def check_prompts(done: Finished, steps: int) -> list[dict[str, Any]]:
    rows = json_lines(done.folder / "prompts.jsonl")
    assert [row["step"] for row in rows] == list(range(1, steps + 1))
    assert {len(row["uids"]) for row in rows} == {BATCH}
    uids = [uid for row in rows for uid in row["uids"]]
    assert len(uids) == len(set(uids)), "within one epoch no prompt comes twice"
    return rows


TWO_REPLICAS = """\
defaults: [ppo_monarch, _self_]
topology:
  clusters: [{name: here, nnodes: 1, n_gpus_per_node: 3, device_type: cpu}]
  device_pools:
    - {name: train, cluster: here, nnodes: 1, n_gpus_per_node: 1}
    - {name: generate, cluster: here, nnodes: 1, n_gpus_per_node: 2}
  models:
    - {name: actor, worker: actor, resource_pool: train}
    - {name: critic, worker: critic, resource_pool: train}
    - {name: rollout, worker: rollout, resource_pool: generate}
"""


@pytest.mark.core
def test_a_killed_run_goes_on_to_the_bit(start: Start, built_in_model: Path, tmp_path: Path) -> None:
    """Killed while it saves, gone on with to its end, told to do more steps: as if nothing had happened.

    The run it is compared with has two replicas where it has one: what is generated does not depend on that.
    """
    # The other schedules depend on how many steps there are in all.
    rates = [f"{model}.optim.lr_scheduler_type=constant" for model in ("actor_rollout_ref.actor", "critic")]
    words = ["+smoke=tiny", "trainer.test_freq=3", *rates]
    (tmp_path / "two_replicas.yaml").write_text(TWO_REPLICAS)
    other = ["--config-dir", str(tmp_path), "--config-name", "two_replicas"]
    whole = start(*words, *other, "trainer.total_training_steps=6", "trainer.save_freq=-1").wait()
    assert whole.code == 0, whole.errors
    assert (whole.folder / "logs" / "rollout-1").is_dir()
    words.append("trainer.save_freq=2")
    first = start(*words, "trainer.total_training_steps=5")
    wait_for_checkpoint(first, ".global_step_4.*.partial")
    assert first.signal(signal.SIGKILL).code == -signal.SIGKILL
    folder = first.folder
    assert "global_step_2" in saved(folder)

    done = start(*words, "trainer.total_training_steps=5", folder=folder).wait()
    assert (done.code, done.errors) == (0, ""), done.out
    assert re.search(r"^verifying the checkpoint …$", done.out, re.MULTILINE)
    (step,) = re.findall(r"^note: resuming from the checkpoint of step (\d): \S+$", done.out, re.MULTILINE)
    assert f"step {int(step) + 1}/5" in done.out
    assert f"step {step}/5" not in done.out
    assert "validation at step 0" not in done.out
    assert learned(done)[:-1] == learned(whole)[: len(learned(done)) - 1], "but for the validation at the end"
    assert saved(folder) == ["global_step_4", "global_step_5", "latest_checkpointed_iteration.txt"]
    assert (folder / "weight_epoch").read_text() == "1\n"

    again = start(*words, "trainer.total_training_steps=5", folder=folder).wait()
    assert (again.code, again.errors) == (0, "")
    assert "this run is complete: 5 steps are trained" in again.out
    assert "starting workers" not in again.out

    more = start(*words, "trainer.total_training_steps=6", folder=folder).wait()
    assert (more.code, more.errors) == (0, ""), more.out
    five = [row for row in learned(more) if row["step"] == 5 and "training/global_step" not in row]
    assert [row for row in learned(more) if row not in five] == learned(whole)
    assert model(folder) == model(whole.folder)
    check_prompts(more, 6)
    assert (folder / "prompts.jsonl").read_bytes() == (whole.folder / "prompts.jsonl").read_bytes()

    other = ["trainer.resume_mode=path", f"trainer.resume_from_path={folder}", "trainer.n_gpus_per_node=2"]
    two = start(*words, *other, "trainer.total_training_steps=7").wait()
    assert (two.code, two.errors) == (0, ""), two.out
    assert "note: the checkpoint of actor is of 1 ranks, there are 2 now: " in two.out
    assert [row["training/global_step"] for row in two.steps] == [7]
    assert (two.folder / "weight_epoch").read_text() == "3\n"


def test_an_asynchronous_run_loses_and_doubles_no_prompt(
    start: Start, user_env: dict[str, str], built_in_model: Path
) -> None:
    """A policy rank dies and the run restarts by itself; then the controller is killed and started again."""
    user_env |= {"WANDB_MODE": "offline", "MLFLOW_DISABLE_TELEMETRY": "true"}
    services = [name for name in ("wandb", "mlflow") if util.find_spec(name) is not None]
    words = [
        "+smoke=tiny",
        "trainer.mode=decoupled_async",
        "trainer.save_freq=2",
        "trainer.on_failure=restart",
    ]
    words += ["trainer.total_training_steps=12", f"trainer.logger=[{','.join(['console', *services])}]"]
    first = start(*words)
    first.wait_for("step 3/")
    wait_for_checkpoint(first, "global_step_2")
    os.kill(first.worker("actor"), signal.SIGKILL)
    first.wait_for("restart 1 of 3: worker actor[0] on ")
    (step,) = re.findall(
        r"^restart 1 of 3: worker actor\[0\] on \S+ died: signal 9 \(SIGKILL\); "
        r"resuming from the checkpoint of step (\d)$",
        first.out,
        re.MULTILINE,
    )
    first.wait_for(f"note: resuming from the checkpoint of step {step}: ")
    assert (first.folder / "weight_epoch").read_text() == "1\n"
    first.wait_for(f"step {int(step) + 3}/12")
    assert first.signal(signal.SIGKILL).code == -signal.SIGKILL
    assert first.left_after(BOUND_S) == []

    done = start(*words, folder=first.folder).wait()
    assert (done.code, done.errors) == (0, ""), done.out
    rows = check_prompts(done, 12)
    serials = [serial for row in rows for serial in row["serials"]]
    evicted = sum(row["training/off_policy/evicted_samples/stale"] for row in done.steps)
    if not evicted:
        assert sorted(serials) == list(range(12 * BATCH))
    assert len(set(serials)) == len(serials) == 12 * BATCH
    assert [row["training/global_step"] for row in done.steps] == list(range(1, 13))
    assert (done.folder / "weight_epoch").read_text() == "2\n"
    superseded = json_lines(done.folder / "metrics.superseded.jsonl")
    assert min(row["step"] for row in superseded) > 0
    assert not any(name.startswith(".") for name in saved(done.folder))
    check_services(done.folder, services, superseded)


def check_services(folder: Path, services: Sequence[str], superseded: Sequence[dict[str, Any]]) -> None:
    """One run in each service for the folder and its three starts, which are told apart."""
    if not services:
        return
    noted = json.loads((folder / "services.json").read_text())
    assert set(noted["runs"]) == set(services)
    _, *later = noted["starts"]
    assert len(later) == 2
    again = {row["step"] for row in superseded if "training/global_step" in row}
    assert again == {step for one in later if one["first"] for step in range(one["first"], one["last"] + 1)}
    if "wandb" in services:
        runs = {path.name for path in folder.glob("wandb/offline-run-*/run-*.wandb")}
        assert runs == {f"run-{noted['runs']['wandb']['id']}.wandb"}
        assert len([*folder.glob("wandb/offline-run-*")]) == 2, "one for each process"
    if "mlflow" in services:
        (metric,) = (folder / "mlruns").rglob("critic/score/mean")
        steps = [int(line.split()[2]) for line in metric.read_text().splitlines()]
        assert set(steps) == set(range(1, 13))
        assert len(steps) > 12
