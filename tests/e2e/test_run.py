"""Whole short runs: each shipped configuration, several ranks, a user's own input, and a run that fails."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.command import BOUND_S, ROOT, Command, Finished, Start
from tests.neoproto.run.inputs import json_lines, words

pytestmark = pytest.mark.e2e

SOURCE = "reasoning_gym/spell_backward"
EXAMPLES = ROOT / "docs" / "examples"
NUMBER = r"[-+]?[\d,]+(\.\d+)?"
BORDER, ROW = r"[┏┡└├┗┣].*[┓┩┘┤┛┫]", r"[│┃].*[│┃]"
TABLE = rf"({BORDER}|{ROW})"
PHASES = {"step", "gen", "reward", "old_log_prob", "adv", "update_actor", "update_weights"}
METRICS = {
    "actor/pg_loss", "actor/pg_clipfrac", "actor/pg_clipfrac_lower", "actor/ppo_kl", "actor/entropy",
    "actor/grad_norm", "actor/lr", "response_length/clip_ratio", "perf/throughput", "perf/time_per_step",
    "perf/total_num_tokens", "perf/controller_share", "training/global_step", "training/epoch",
    "training/rollout_probs_diff_mean", "training/rollout_probs_diff_max",
    "training/replica_restarts", "rollout/replicas_up", "store/objects", "store/leases",
    "store/segments", "store/bytes_in", "store/bytes_out",
    "store/bytes_mapped", "store/bytes_copied", "store/cache_hits", "store/controller/bytes_in",
    *(f"timing_s/{phase}" for phase in PHASES),
    *(
        f"{name}/{figure}"
        for name in (
            "critic/score", "critic/rewards", "critic/advantages", "critic/returns", "response_length",
            "prompt_length",
        )
        for figure in ("mean", "max", "min")
    ),
}  # fmt: skip
CRITIC = {
    "critic/vf_loss", "critic/vf_clipfrac", "critic/vpred_mean", "critic/vf_explained_var",
    "critic/grad_norm", "critic/lr", "critic/values/mean", "critic/values/max", "critic/values/min",
    "timing_s/values", "timing_s/update_critic",
}  # fmt: skip
REFERENCE = {"actor/kl_loss", "timing_s/ref"}


def screen(steps: int, sources: tuple[str, ...], notes: tuple[str, ...] = (), made: bool = True) -> str:
    """What a run that is no terminal's prints, whole, as a pattern."""
    scores = "  ".join(rf"{re.escape(source)} \S+ {NUMBER}" for source in sources for _ in range(2))
    step = rf"score {NUMBER}  length {NUMBER}  pg_loss {NUMBER}(  vf_loss {NUMBER})?  {NUMBER} tok/s"
    lines = [
        "starting hosts and store …",
        "reading prompts …",
        *(["preparing the built-in model (made once, then cached) …"] if made else []),
        "tokenising prompts …",
        r"run folder: \S+",
        rf"note: \d+ steps of \d+ prompts x \d+ samples: {NUMBER} epochs of {NUMBER} prompts",
        *notes,
        "Topology",
        rf"{TABLE}(\n{TABLE})+",
        "starting workers …",
        f"validation at step 0: {scores}",
        *(rf"step {at}/{steps}  {step}  {NUMBER} s/step  left \d+:\d\d" for at in range(1, steps + 1)),
        f"validation at step {steps}: {scores}",
        "writing the model …",
        "closing …",
        "result",
        rf"{TABLE}(\n{TABLE})+",
        r"Phases overlap, .*: they do not add up\.",
        r"run folder: \S+",
        r"trained model: \S+",
    ]
    plain = {line: re.escape(line) for line in lines if line.endswith("…")}
    return "\n".join(plain.get(line, line) for line in lines) + "\n"


def check_clean_end(command: Command, *, sources: tuple[str, ...] = (SOURCE,), **screen_of: Any) -> Finished:
    """It ends well, says what it should and nothing else, and leaves nothing behind."""
    done = command.wait()
    assert (done.code, done.errors) == (0, ""), done.out
    assert re.fullmatch(screen(3, sources, **screen_of), done.out), done.out
    assert command.left() == []
    return done


def check_logs(done: Finished, ranks: dict[str, int], *, vllm: bool = True) -> None:
    """One log a rank; the terminal is not where workers write to. vLLM is only where it was asked for."""
    for group, count in ranks.items():
        logs = sorted(path.name for path in (done.folder / "logs" / group).glob("*.log"))
        assert logs == [f"rank{rank}.log" for rank in range(count)]
    assert ("vllm" in (done.folder / "logs" / "rollout-0" / "rank0.log").read_text().lower()) == vllm
    assert (done.folder / "run.log").is_file()


def check_metrics(done: Finished, names: set[str]) -> None:
    """Three steps, each with all the names, all of them numbers, none of them nothing."""
    assert [row["training/global_step"] for row in done.steps] == [1, 2, 3]
    for row in done.steps:
        assert names <= row.keys(), names - row.keys()
        assert all(isinstance(row[name], int | float) and math.isfinite(row[name]) for name in names)
        if row.get("training/off_policy/trajectory_staleness/max", 0) == 0:
            assert row["training/rollout_log_probs_diff_max"] <= 1e-4
        assert row["response_length/min"] >= 1
    assert max(row["actor/grad_norm"] for row in done.steps) > 0
    assert max(row["critic/score/mean"] for row in done.steps) > 0


def check_validation(done: Finished, prompts: int, source: str = SOURCE) -> None:
    """Sampled and greedy answers before and after, in the metrics and as samples that say the same."""
    for step in (0, 3):
        rows = done.validation(step)
        figures = next(row for row in done.metrics if row["step"] == step and "timing_s/testing" in row)
        for label in ("mean@1", "greedy"):
            shown = [row for row in rows if row["label"] == label]
            assert len(shown) == len({row["uid"] for row in shown}) == prompts
            mean = sum(row["accuracy"] for row in shown) / prompts
            assert figures[f"val-core/{source}/acc/{label}"] == pytest.approx(mean)
        assert all(row["prompt"] and row["ground_truth"] and row["step"] == step for row in rows)


def check_model(done: Finished, start: Path) -> None:
    """The final folder loads in transformers, template and all, and is not the model it started from."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(done.folder / "model", local_files_only=True)
    model = AutoModelForCausalLM.from_pretrained(done.folder / "model", local_files_only=True)
    before = AutoModelForCausalLM.from_pretrained(start, local_files_only=True)
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": "abc"}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    with torch.no_grad():
        trained, untrained = model(**ids).logits, before(**ids).logits
    assert torch.isfinite(trained).all()
    change = (trained - untrained).abs().max()
    assert 0 < change < 5
    assert model.generation_config.eos_token_id == before.generation_config.eos_token_id


@pytest.mark.core
def test_ppo(start: Start, cache: Path) -> None:
    """The first run makes the model that the others find."""
    done = check_clean_end(start("--config-name", "ppo_monarch", "+smoke=tiny"))
    check_logs(done, {"actor": 1, "critic": 1, "rollout-0": 1, "reward": 1})
    check_metrics(done, METRICS | CRITIC)
    check_validation(done, prompts=16)
    (built_in_model,) = (cache / "models").glob("tiny-*")
    check_model(done, built_in_model)
    assert not (done.folder / "logs" / "reference").exists()


@pytest.mark.core
def test_grpo_with_kl_in_the_loss_and_transformers_as_the_engine(start: Start, built_in_model: Path) -> None:
    kl = [
        "actor_rollout_ref.rollout.name=hf",
        "actor_rollout_ref.actor.use_kl_loss=true",
        "actor_rollout_ref.actor.kl_loss_coef=0.01",
    ]
    done = check_clean_end(start("--config-name", "grpo_monarch", "+smoke=tiny", *kl))
    check_logs(done, {"actor": 1, "reference": 1, "rollout-0": 1, "reward": 1}, vllm=False)
    check_metrics(done, METRICS | REFERENCE)
    check_validation(done, prompts=16)
    check_model(done, built_in_model)
    assert not (done.folder / "logs" / "critic").exists()
    # The reference is where the policy started: no KL before the first update, some after the last.
    assert done.steps[0]["actor/kl_loss"] < 1e-6 < done.steps[-1]["actor/kl_loss"]


def test_two_ranks_of_everything(start: Start, built_in_model: Path) -> None:
    """Policy and critic sharded over two ranks, two replicas that share the prompts."""
    done = check_clean_end(start("+smoke=tiny", "trainer.n_gpus_per_node=2"))
    check_logs(done, {"actor": 2, "critic": 2, "rollout-0": 1, "rollout-1": 1, "reward": 1})
    check_metrics(done, METRICS | CRITIC)
    check_validation(done, prompts=16)
    check_model(done, built_in_model)


def check_versions(done: Finished, staleness: list[int]) -> None:
    """Every response was generated on one version, the one it should have been."""
    off_policy = "training/off_policy"
    for row, behind in zip(done.steps, staleness, strict=True):
        assert row[f"{off_policy}/trajectory_spans/max"] == 1
        assert row[f"{off_policy}/trajectory_staleness/min"] == behind
        assert row[f"{off_policy}/trajectory_staleness/max"] == behind
        assert row[f"{off_policy}/evicted_samples/stale"] == 0


@pytest.mark.core
def test_replicas_that_pull_weights_by_themselves(start: Start, built_in_model: Path) -> None:
    """PPO on two replicas that are told nothing: rollout is one batch, and so one publish, ahead."""
    two = "actor_rollout_ref.rollout.n_gpus_per_node=2"
    done = check_clean_end(start("+smoke=tiny", "trainer.mode=decoupled_async", two))
    check_logs(done, {"actor": 1, "critic": 1, "rollout-0": 1, "rollout-1": 1, "reward": 1, "registry": 1})
    check_metrics(done, METRICS | CRITIC)
    check_validation(done, prompts=16)
    check_versions(done, [0, 1, 1])
    check_model(done, built_in_model)


def test_replicas_that_are_updated_by_the_trainer(start: Start, built_in_model: Path) -> None:
    """And an advantage estimator of the user's: the one of docs/extending.md."""
    own = "algorithm.custom_advantage_function"
    command = start(
        "--config-name",
        "grpo_monarch",
        "+smoke=tiny",
        "trainer.mode=separate_async",
        "algorithm.adv_estimator=custom",
        f"{own}.path={EXAMPLES}/median_baseline.py",
        f"{own}.options.floor=0.5",
    )
    done = check_clean_end(command)
    check_metrics(done, METRICS)
    check_validation(done, prompts=16)
    check_versions(done, [0, 1, 1])
    check_model(done, built_in_model)
    # Of four scores 0 or 1: the distance from their median in units of the mean distance, at least 1/2.
    found = {row[f"critic/advantages/{edge}"] for row in done.steps for edge in ("min", "max")}
    assert found <= {-2.0, -1.0, 0.0, 1.0, 2.0}


def test_a_trainer_loop_of_the_users(start: Start, built_in_model: Path) -> None:
    """That of docs/extending.md: a script that is run like the command, and does all else as it does."""
    command = start("--config-name", "grpo_monarch", "+smoke=tiny", program=[f"{EXAMPLES}/best_of_n.py"])
    done = check_clean_end(command)
    assert [row["training/global_step"] for row in done.steps] == [1, 2, 3]
    for row in done.steps:
        assert 0 <= row["best_of_n/chosen"] <= 1
        assert row["critic/advantages/min"] == row["critic/advantages/max"] == 1.0
    check_validation(done, prompts=16)
    check_model(done, built_in_model)
    assert (done.folder / "checkpoints" / "global_step_3" / "manifest.json").is_file()


REWARD = '''\
import asyncio


async def compute_score(data_source, solution_str, ground_truth, extra_info):
    """The share of letters in their place; judged at once or not, all the same."""
    await asyncio.sleep(0.01 * (extra_info["index"] % 3))
    assert data_source == "letters"
    right = sum(a == b for a, b in zip(solution_str, ground_truth))
    return {"score": right / len(ground_truth), "acc": solution_str == ground_truth}
'''


@pytest.mark.core
def test_own_data_reward_and_model(start: Start, built_in_model: Path, tmp_path: Path) -> None:
    """Prompts from files of which some are too long, an async reward, an own model folder, TensorBoard."""
    own = tmp_path / "own model"
    own.symlink_to(built_in_model)
    long = words(1, length=40)
    train = json_lines(tmp_path / "train.jsonl", [*words(26), *long])
    held_out = json_lines(tmp_path / "val.jsonl", words(6, length=4))
    (tmp_path / "my_reward.py").write_text(REWARD)
    command = start(
        "+smoke=tiny",
        "data=files",
        f"data.train_files={train}",
        f"data.val_files={held_out}",
        "data.max_prompt_length=32",
        "data.max_response_length=8",
        f"actor_rollout_ref.model.path='{own}'",
        f"reward.custom_reward_function.path={tmp_path}/my_reward.py",
        "trainer.logger=[console,tensorboard]",
    )
    note = "note: 1 training prompts longer than data.max_prompt_length were left out"
    done = check_clean_end(command, sources=("letters",), made=False, notes=(note,))
    check_logs(done, {"actor": 1, "critic": 1, "rollout-0": 1, "reward": 1})
    check_metrics(done, METRICS | CRITIC)
    check_validation(done, prompts=6, source="letters")
    check_model(done, own)
    scores = {row["score"] for row in done.validation(3)}
    assert scores <= {0.0, 0.25, 0.5, 0.75, 1.0}
    (events,) = (done.folder / "tensorboard").iterdir()
    assert b"actor/pg_loss" in events.read_bytes()


def test_a_reward_that_raises_fails_the_run_with_the_samples_id(start: Start, tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info):\n"
        "    return 1 / (extra_info['split'] == 'val')\n"
    )
    command = start("--config-name", "grpo_monarch", "+smoke=tiny", *bad_reward(tmp_path / "bad.py"))
    done = command.wait()
    assert done.code == 1
    log = done.folder / "run.log"
    said = rf"error: .*sample spell_backward:train:\d+\b.*line 2: ZeroDivisionError.* \(details: {log}\)\n"
    assert re.fullmatch(said, done.errors), done.errors
    assert "Traceback" in log.read_text()
    assert command.left_after(BOUND_S) == []
    assert not (done.folder / "model").exists()


def bad_reward(path: Path) -> list[str]:
    return [f"reward.custom_reward_function.path={path}"]
