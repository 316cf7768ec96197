"""The pure parts of the comparison with TRL: what both sides are handed, and the figures made of it."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"


@pytest.fixture(scope="module")
def scripts() -> Iterator[SimpleNamespace]:
    """The scripts' modules, imported as a script imports its neighbours."""
    sys.path.insert(0, str(SCRIPTS))
    try:
        import _peer_env
        import _peer_task
        import _peer_trl
        import bench_peer

        yield SimpleNamespace(bench=bench_peer, task=_peer_task, trl=_peer_trl, env=_peer_env)
    finally:
        sys.path.remove(str(SCRIPTS))


@pytest.fixture
def course(scripts: SimpleNamespace, tmp_path: Path) -> Any:
    workload = scripts.task.WORKLOADS["long_tailed"]
    questions = scripts.task.draw_questions(workload, train=50, held_out=10)
    rows = tmp_path / "rows.jsonl"
    scripts.task.write_rows(rows, questions.train)
    return scripts.bench.Course(workload=workload, questions=questions, model=tmp_path / "model", rows=rows)


def side(scripts: SimpleNamespace, seconds: float, sampled: float, steps: int = 7) -> Any:
    return scripts.bench.Side(
        startup_s=9.0,
        training_s=seconds * steps,
        step_s=(seconds,) * max(1, steps - 2),
        steps=steps,
        enough=steps >= 7,
        length=40.0,
        sampled=sampled,
        greedy=0.9,
    )


@pytest.mark.parametrize("name", ["short", "long_tailed"])
def test_answers_fit_the_limit_and_have_the_lengths_that_were_asked_for(
    scripts: SimpleNamespace, name: str
) -> None:
    workload = scripts.task.WORKLOADS[name]
    questions = scripts.task.draw_questions(workload, train=4000, held_out=400)
    assert (len(questions.train), len(questions.held_out)) == (4000, 400)
    lengths = sorted(row["reward_model"]["ground_truth"].count("[") + 1 for row in questions.train)
    assert lengths[-1] <= workload.max_tokens
    mean = sum(lengths) / len(lengths)
    assert 16 < mean < 18 if name == "short" else 35 < mean < 42
    assert name == "short" or (lengths[2000] in range(24, 27) and lengths[-40] > 160)
    assert scripts.task.draw_questions(workload, train=4000, held_out=400) == questions


def test_an_answer_counts_down_to_nought_and_a_number_is_a_token(scripts: SimpleNamespace) -> None:
    from actors.models.tiny_tokenizer import build_tokenizer

    questions = scripts.task.draw_questions(scripts.task.WORKLOADS["short"], train=200, held_out=1)
    tokenizer = build_tokenizer(
        [scripts.task.QUESTION, *(f"[{number}]" for number in range(31))], max_length=64
    )
    for row in questions.train:
        first = int(row["prompt"][0]["content"].removeprefix(scripts.task.QUESTION).strip("[]"))
        answer = row["reward_model"]["ground_truth"]
        assert answer == "".join(f"[{number}]" for number in range(first, -1, -1))
        assert len(tokenizer.encode(answer, add_special_tokens=False)) == first + 1


def test_the_peer_reads_the_rows_that_ours_reads(scripts: SimpleNamespace, course: Any) -> None:
    from neoproto.data.rows import read_rows

    mine, theirs = read_rows([course.rows]), scripts.trl.rows_of(str(course.rows))
    assert [list(row.messages) for row in mine] == [row["prompt"] for row in theirs]
    assert [row.reward_model["ground_truth"] for row in mine] == [row["answer"] for row in theirs]


def test_both_sides_judge_alike(scripts: SimpleNamespace) -> None:
    from actors.reward.worker import decode
    from neoproto.rewards.builtin import REWARDS
    from neoproto.rewards.score import Question

    tokens = {1: "1", 2: "</s>", 3: " ", 4: "<pad>"}
    tokenizer = SimpleNamespace(
        eos_token_id=2, decode=lambda ids, skip_special_tokens: "".join(tokens[one] for one in ids)
    )
    answers = [[1, 2], [1], [3, 1, 3, 2], [1, 4, 2], [1, 1, 2], [2]]
    theirs = scripts.trl.judged(tokenizer, answers, ["1"] * len(answers))
    width = max(map(len, answers))
    import torch

    padded = torch.tensor([ids + [0] * (width - len(ids)) for ids in answers])
    texts = decode(tokenizer, padded, torch.tensor([len(ids) for ids in answers]), {2})
    asked = [Question(data_source="", solution=text, ground_truth="1", extra_info={}) for text in texts]
    mine = [REWARDS["exact_match"].verdict(question).score for question in asked]
    assert theirs == mine == [1.0, 1.0, 1.0, 0.0, 0.0, 0.0]


@pytest.mark.parametrize("algorithm", ["grpo", "rloo"])
def test_both_sides_are_told_the_same(scripts: SimpleNamespace, course: Any, algorithm: str) -> None:
    options = scripts.bench.parse(["--threads", "3", "--cache", "/nowhere", "algorithm.gamma=0.5"])
    given = dict(
        text.split("=", 1) for text in scripts.bench.overrides(course, algorithm, options, seed=7, steps=20)
    )
    job = scripts.bench.job_of(course, algorithm, options, Path("/f"), seed=7, seconds=30.0)
    told = scripts.trl.trainer_options(job)
    assert int(given["data.train_batch_size"]) * int(given["actor_rollout_ref.rollout.n"]) == 128
    assert told["per_device_train_batch_size"] * told["gradient_accumulation_steps"] == 128
    assert given["actor_rollout_ref.actor.ppo_mini_batch_size"] == given["data.train_batch_size"]
    assert int(given["actor_rollout_ref.rollout.n"]) == told["num_generations"]
    assert int(given["data.max_response_length"]) == told["max_completion_length"] == 256
    assert float(given["actor_rollout_ref.actor.optim.lr"]) == told["learning_rate"]
    assert given["actor_rollout_ref.actor.optim.lr_scheduler_type"] == told["lr_scheduler_type"]
    assert given["trainer.seed"] == str(told["seed"]) == "7"
    assert given["actor_rollout_ref.actor.num_threads"] == str(job["threads"]) == "3"
    assert given["data.train_files"] == f"[{job['rows']}]"
    assert given["actor_rollout_ref.model.path"] == job["model"]
    assert given["algorithm.gamma"] == "0.5"
    other = scripts.bench.parse(["--cache", "/nowhere", "--peer-options", '{"top_k": 3}'])
    job = scripts.bench.job_of(course, algorithm, other, Path("/f"), seed=7, seconds=30.0)
    assert scripts.trl.trainer_options(job) == told | {"top_k": 3}


def test_the_overrides_are_options_of_the_shipped_configuration(
    scripts: SimpleNamespace, course: Any
) -> None:
    from neoproto.run.compose import compose_run

    options = scripts.bench.parse(["--cache", "/nowhere"])
    for algorithm in scripts.bench.ALGORITHMS:
        config = compose_run(
            "grpo_monarch", scripts.bench.overrides(course, algorithm, options, seed=1, steps=5)
        )
        assert config.algorithm.adv_estimator == algorithm


def test_quick_is_one_short_turn_and_mistakes_are_refused(
    scripts: SimpleNamespace, capsys: pytest.CaptureFixture[str]
) -> None:
    options = scripts.bench.parse(["--quick", "--cache", "/nowhere", "--workloads", "short"])
    assert (options.turns, options.seconds, options.workloads) == (1, 8.0, ("short",))
    for wrong in (["--workloads", "long"], ["--turns", "0"], ["--algorithms", "grpo,ppo"]):
        with pytest.raises(SystemExit):
            scripts.bench.parse(wrong)
    assert "ppo: known are grpo, rloo" in capsys.readouterr().err


def test_a_step_lasts_until_the_next_ones_end_and_the_first_are_left_out(scripts: SimpleNamespace) -> None:
    ends = [10.0, 13.0, 14.0, 15.0, 16.5, 17.0, 18.0, 19.0]
    assert scripts.bench.step_seconds(8.0, ends, 3) == ((1.0, 1.5, 0.5, 1.0, 1.0), True)
    assert scripts.bench.step_seconds(8.0, ends, 4) == ((1.5, 0.5, 1.0, 1.0), False)
    assert scripts.bench.step_seconds(8.0, ends[:2], 4) == ((2.0, 3.0), False)


def test_a_turn_lasts_until_the_slower_side_has_enough_steps(scripts: SimpleNamespace) -> None:
    options = scripts.bench.parse(["--cache", "/nowhere", "--seconds", "30"])
    assert scripts.bench.seconds_of_a_turn(options, None) == 30
    quick, slow = side(scripts, 1.0, 0.5), side(scripts, 20.0, 0.5, steps=6)
    assert scripts.bench.seconds_of_a_turn(options, (quick, quick)) == 30
    assert scripts.bench.seconds_of_a_turn(options, (quick, slow)) == 1.5 * 8 * 20


def test_short_turns_count_for_want_of_others_and_are_marked(scripts: SimpleNamespace, course: Any) -> None:
    short = (side(scripts, 9.0, 0.5), side(scripts, 1.0, 0.5, steps=6))
    long = (side(scripts, 1.0, 0.5), side(scripts, 2.0, 0.5))
    for pairs, ratio, mark in (([short, long], 0.5, None), ([short], 9.0, "4 timed step(s) a turn")):
        step, samples, *_ = scripts.bench.figures_of(course, "grpo", pairs, (0.4, 0.8))
        assert (step.value, step.incomplete, samples.incomplete) == (ratio, mark, mark)
        assert step.detail["steps"]["trl"][0] == 6


def test_a_peer_that_fails_leaves_the_finished_turns(
    scripts: SimpleNamespace,
    course: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    asked: list[tuple[int, float]] = []

    def ours(*_: Any, steps: int, **__: Any) -> Any:
        asked.append((steps, 0.0))
        return side(scripts, 2.0, 0.6, steps=steps)

    def peer(*_: Any, seconds: float, **__: Any) -> Any:
        asked[-1] = (asked[-1][0], seconds)
        if len(asked) == 3:
            raise scripts.bench.BenchError("the peer failed with code 9:\nKilled")
        return side(scripts, 20.0, 0.5, steps=round(seconds / 20)), {"trl": "1"}

    bench = scripts.bench
    for name, value in {
        "ours": ours,
        "peer": peer,
        "score": lambda *_: (0.4, 0.8),
        "prepare": lambda *_: course,
        "peer_python": lambda _: tmp_path,
    }.items():
        monkeypatch.setattr(bench, name, value)
    words = ["--workloads", "long_tailed", "--algorithms", "grpo", "--cache", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["bench_peer.py", *words])
    with pytest.raises(SystemExit) as caught:
        bench.main()
    assert caught.value.code == 1
    captured = capsys.readouterr()
    assert captured.err == "error: the peer failed with code 9:\nKilled\n"
    assert "long_tailed_grpo_3_ours: 2.000 s a step" in captured.out
    told = json.loads(captured.out.splitlines()[-1])
    assert told["problems"] == ["the peer failed with code 9:\nKilled"]
    step = told["figures"][0]
    assert (step["value"], step["incomplete"]) == (0.1, "2 of 3 turns")
    # The first turn follows a guess; then the peer, at 20 s a step, gets its 12 steps.
    assert asked[0] == (23, 46.0)
    assert asked[1] == asked[2] == (120, 240.0)


def test_figures_compare_medians_of_seconds_and_means_of_scores(
    scripts: SimpleNamespace, course: Any
) -> None:
    pairs = [
        (side(scripts, ours, better), side(scripts, theirs, 0.5))
        for ours, theirs, better in ((1.0, 2.0, 0.6), (1.2, 2.0, 0.7), (9.0, 2.0, 0.5))
    ]
    figures = {one.name: one for one in scripts.bench.figures_of(course, "grpo", pairs, (0.4, 0.8))}
    step = figures["long_tailed_grpo_step_vs_trl"]
    assert (step.value, step.goal, step.holds) == (0.6, "<= 0.6", True)
    assert step.detail["ours"] == [1.0, 1.2, 9.0]
    above = figures["long_tailed_grpo_score_above_trl"]
    assert above.value == pytest.approx(0.1)
    assert above.holds
    assert above.detail["before"] == 0.4
    assert figures["long_tailed_grpo_samples_per_s"].value == pytest.approx(128 / 1.2)
    equal = scripts.bench.figures_of(course, "grpo", [(side(scripts, 1, 0.5), side(scripts, 1, 0.5))], (0, 0))
    assert next(one for one in equal if "score" in one.name).holds is False


def test_a_failed_environment_says_what_helps(scripts: SimpleNamespace) -> None:
    log = "noise\nERROR: No matching distribution found for torch==2.13.0+cpu"
    text = scripts.env.failure(["pip", "install"], log)
    assert "PIP_EXTRA_INDEX_URL" in text
    assert "ERROR: No matching" in text
    assert "later runs find it" in scripts.env.failure(
        ["pip"], "No matching distribution found for trl==1.16.*"
    )
    assert any(package.startswith("torch==") for package in scripts.env.wanted())


def test_the_peer_does_not_see_our_packages(scripts: SimpleNamespace) -> None:
    found = scripts.bench.peer_environment({"PYTHONPATH": ".", "PATH": "/bin"}, 2)
    assert "PYTHONPATH" not in found
    assert (found["PATH"], found["OMP_NUM_THREADS"]) == ("/bin", "2")
    source = (SCRIPTS / "_peer_trl.py").read_text()
    assert not any(name in source for name in ("neoproto.", "from actors", "_bench"))


def test_jobs_survive_json(scripts: SimpleNamespace, course: Any) -> None:
    options = scripts.bench.parse(["--cache", "/nowhere"])
    job = scripts.bench.job_of(course, "rloo", options, Path("/f"), seed=1, seconds=1.5)
    assert json.loads(json.dumps(job)) == job
