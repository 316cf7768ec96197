"""Judging samples: concurrency, limits, blame; and where scores go."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from actors.reward.worker import (
    FAILED,
    Judge,
    RewardOptions,
    RewardWorker,
    Sample,
    decode,
    last_generated,
    place_scores,
)
from neoproto.config import RewardConfig, RewardFunctionConfig
from neoproto.data import DataProto
from neoproto.errors import RewardError
from neoproto.eval.metrics import Answer, answer_metrics

ARGUMENTS = "data_source, solution_str, ground_truth, extra_info"


def sample(solution: str = "cba", uid: str = "q1", **changes: Any) -> Sample:
    values: dict[str, Any] = {
        "uid": uid,
        "data_source": "letters",
        "solution": solution,
        "style": "exact_match",
        "ground_truth": "cba",
        "extra_info": {},
        "step": 7,
    }
    return Sample(**(values | changes))


def custom(folder: Path, body: str, *, prefix: str = "", **changes: Any) -> Judge:
    path = folder / "my_reward.py"
    path.write_text(f"import asyncio, time\n{prefix}def compute_score({ARGUMENTS}):\n    {body}\n")
    return Judge(told(path, **changes))


def told(path: Path | None = None, **changes: Any) -> RewardOptions:
    """Options of a judge; of the file at `path` if there is one."""
    function = RewardFunctionConfig(path=None if path is None else str(path))
    reward = RewardConfig(**({"custom_reward_function": function} | changes))
    return RewardOptions(tokenizer="there", eos_token_ids=(2,), reward=reward)


def scores(judge: Judge, *samples: Sample) -> list[float]:
    return [made.score.score for made in asyncio.run(judge.score(samples))]


def blamed(judge: Judge, *samples: Sample) -> str:
    with pytest.raises(RewardError) as caught:
        asyncio.run(judge.score(samples))
    return str(caught.value)


def test_rows_are_judged_by_their_style() -> None:
    judge = Judge(told())
    assert scores(
        judge,
        sample("cba"),
        sample("abc"),
        sample("it is 7", style="last_number", ground_truth="7"),
        sample("$1/2$", style="math_verify", ground_truth="0.5"),
    ) == [1.0, 0.0, 1.0, 1.0]
    judge.close()


def test_a_named_built_in_judges_every_row() -> None:
    assert scores(Judge(told(name="last_number")), sample("4 cba 5", ground_truth=5)) == [1]


def test_a_plain_function_gets_what_verls_gets(tmp_path: Path) -> None:
    judge = custom(
        tmp_path, "return {'score': len(solution_str), 'seen': [data_source, ground_truth, extra_info]}"
    )
    (made,) = asyncio.run(judge.score([sample("four", extra_info={"a": 1})]))
    assert (made.score.score, made.score.extra) == (4.0, {"seen": ["letters", "cba", {"a": 1}]})


def test_asynchronous_calls_overlap_up_to_the_limit(tmp_path: Path) -> None:
    body = (
        "global now, most\n    now += 1\n    most = max(most, now)\n"
        "    await asyncio.sleep(0.1)\n    now -= 1\n    return {'score': float(solution_str), 'most': most}"
    )
    judge = custom(tmp_path, body, prefix="now = most = 0\nasync ", max_concurrency=4)
    start = time.perf_counter()
    made = asyncio.run(judge.score([sample(str(index)) for index in range(12)]))
    assert [one.score.score for one in made] == [float(index) for index in range(12)]
    assert max(one.score.extra["most"] for one in made) == 4
    assert 0.25 < time.perf_counter() - start < 1.1


@pytest.mark.parametrize("prefix", ["", "async "])
@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("return 1 / 0", "raised line 3: ZeroDivisionError: division by zero"),
        ("return 'good'", "it returned 'good' (str), not a number"),
        ("return float('nan')", "it returned nan, which is not finite"),
        ("return 1e300", "it returned 1e+300, which is too large"),
        ("return 10**400", "000…, which is too large"),
        ("raise TimeoutError('of its own')", "raised line 3: TimeoutError: of its own"),
        ("raise SystemExit(3)", "raised line 3: SystemExit: 3"),
        ("raise KeyboardInterrupt", "raised line 3: KeyboardInterrupt"),
        ("raise GeneratorExit", "raised line 3: GeneratorExit"),
        ("import asyncio; raise asyncio.CancelledError", "raised line 3: CancelledError"),
    ],
)
def test_a_bad_function_is_blamed_with_the_sample(tmp_path: Path, prefix: str, body: str, said: str) -> None:
    text = blamed(custom(tmp_path, body, prefix=prefix), sample(uid="q42"))
    assert said in text
    assert "sample q42 (data source letters, step 7)" in text
    assert "compute_score of " in text


SAID = ("6*7=42 #### 42", "I think it is 42", "so the answer: 42", "no: 41", "perhaps 40")
PRED = (
    "number = solution_str.split()[-1]\n"
    "    return {'score': float(number == '42'), 'pred': float(number) if len(number) % 2 else int(number)}"
)


@pytest.mark.parametrize(
    ("row", "votes"),
    [
        ({"style": "last_number"}, ["42", "42", "42", "41", "40"]),
        ({"style": "rule", "data_source": "openai/gsm8k"}, ["42", "42", "42", "41", "40"]),
        ({"style": "math_verify"}, ["42", "42", "42", "41", "40"]),
        ({"style": "exact_match"}, list(SAID)),
    ],
)
def test_a_vote_is_what_the_judge_compares(row: dict[str, Any], votes: list[str]) -> None:
    judge = Judge(told())
    made = asyncio.run(judge.score([sample(text, ground_truth="42", **row) for text in SAID], votes=True))
    judge.close()
    assert [one.score.vote for one in made] == votes
    answers = [Answer(vote=one.score.vote, accuracy=one.score.acc) for one in made]
    assert answer_metrics({"q": answers})["maj@5"] == (1.0 if row["style"] != "exact_match" else 0.0)


@pytest.mark.parametrize("prefix", ["", "async "])
def test_a_function_tells_its_vote_as_pred(tmp_path: Path, prefix: str) -> None:
    judge = custom(tmp_path, PRED, prefix=prefix)
    made = asyncio.run(judge.score([sample(text) for text in (*SAID, "no number", "042")], votes=True))
    judge.close()
    assert [one.score.vote for one in made] == ["42", "42", "42", "41", "40", None, "42"]
    assert made[5].failure is not None


@pytest.mark.parametrize("prefix", ["", "async "])
def test_what_a_function_changes_in_place_is_seen_by_no_other_call(tmp_path: Path, prefix: str) -> None:
    """All samples of a prompt share the row's objects."""
    body = (
        "extra_info['seen'].append(1)\n    ground_truth.append(1)\n"
        "    return len(extra_info['seen']) + len(ground_truth)"
    )
    judge = custom(tmp_path, body, prefix=prefix)
    row: dict[str, Any] = {"ground_truth": [0], "extra_info": {"seen": []}}
    assert scores(judge, *(sample(uid=f"q{number}", **row) for number in range(3))) == [3.0] * 3
    assert row == {"ground_truth": [0], "extra_info": {"seen": []}}
    judge.close()


@pytest.mark.parametrize("end", ["raise SystemExit(0)", "return 5", "await asyncio.sleep(0.1)"])
def test_what_an_asynchronous_function_forks_does_not_come_back(tmp_path: Path, end: str) -> None:
    body = f"import os\n    pid = os.fork()\n    if pid == 0: {end}\n    return {{'score': 1, 'pid': pid}}"
    judge = custom(tmp_path, body, prefix="async ")
    (made,) = asyncio.run(judge.score([sample()]))
    assert made.score.score == 1.0
    assert os.waitstatus_to_exitcode(os.waitpid(made.score.extra["pid"], 0)[1]) in (0, 1)


@pytest.mark.parametrize("prefix", ["", "async "])
def test_a_function_that_is_always_slow_is_an_error(tmp_path: Path, prefix: str) -> None:
    nap = "await asyncio.sleep(5)" if prefix else "time.sleep(5)"
    text = blamed(custom(tmp_path, nap, prefix=prefix, timeout_s=0.2), sample(), sample(uid="q2"))
    assert "2 of 2 answers got no score" in text
    assert "sample q1 (data source letters, step 7): took longer than 0.2 s" in text


HOSTILE = """
import re, sys
def compute_score(data_source, solution_str, ground_truth, extra_info):
    if solution_str == "regex":
        re.match(r"(a+)+$", "a" * 64 + "b")
    if solution_str == "power":
        return 9 ** 9 ** 9 ** 9
    if solution_str == "number":
        int("9" * 10_000)
    if solution_str == "exit":
        import os; os._exit(7)
    if solution_str == "deep":
        def f(n): return f(n + 1)
        f(0)
    print("a line on stdout"); sys.stdout.flush()
    return {"score": 1.0, "saw": sys.stdin.read()}
"""


def test_hostile_answers_to_a_plain_function_score_0_and_are_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "hostile.py"
    path.write_text(HOSTILE)
    judge = Judge(told(path, timeout_s=1.0))
    bad = ["regex", "power", "number", "exit", "deep"]
    samples = [sample(what, uid=what) for what in (*bad, *["fine"] * 6)]
    start = time.perf_counter()
    made = asyncio.run(judge.score(samples))
    assert time.perf_counter() - start < 20
    failures = {one.uid: made[place].failure for place, one in enumerate(samples)}
    said = {uid: failure and (failure.kind, failure.text) for uid, failure in failures.items()}
    assert said["regex"] == said["power"] == ("timeout", "took longer than 1 s")
    assert said["exit"] == ("error", "ended its process (exit code 7)")
    assert said["number"] is not None
    assert "ValueError: Exceeds the limit" in said["number"][1]
    assert said["deep"] is not None
    assert "RecursionError" in said["deep"][1]
    assert [one.score.score for one in made] == [0.0] * 5 + [1.0] * 6
    assert made[-1].score.extra == {"saw": ""}
    assert (judge.timeouts, judge.errors) == (2, 3)
    assert "scored 0: compute_score of " in caplog.text
    judge.close()


def test_when_the_calls_time_is_over_the_rest_counts_as_too_late(tmp_path: Path) -> None:
    judge = custom(tmp_path, "time.sleep(float(solution_str)); return 1", num_processes=1, max_failed_share=1)
    assert scores(judge, sample("0")) == [1.0]  # its process is there before the time runs
    made = asyncio.run(judge.score([sample(nap) for nap in ("0", "30", "0")], budget_s=5.0))
    assert [one.score.score for one in made] == [1.0, 0.0, 0.0]
    assert [one.failure.kind if one.failure else "" for one in made] == ["", "timeout", "timeout"]
    judge.close()


def test_more_failures_than_allowed_are_an_error(tmp_path: Path) -> None:
    judge = custom(tmp_path, "return 1 / int(solution_str)", max_failed_share=0.25)
    assert scores(judge, *(sample(number) for number in "10111")) == [1, 0, 1, 1, 1]
    text = blamed(judge, *(sample(number, uid=f"q{number}") for number in "10101"))
    assert "2 of 5 answers got no score, more than reward.max_failed_share=0.25 allows" in text
    assert "first: compute_score of " in text
    assert "sample q0" in text
    judge.close()


def test_a_built_in_that_cannot_judge_names_the_sample() -> None:
    judge = Judge(told())
    assert "sample q1" in blamed(judge, sample(style="model"))
    assert "the ground truth 'x' has no number" in blamed(
        judge, sample(style="last_number", ground_truth="x")
    )
    assert "extra_info lacks question" in blamed(judge, sample(style="reasoning_gym"))


def test_scores_go_to_the_last_response_token() -> None:
    placed = place_scores([0.5, -1.0, 2.0], torch.tensor([1, 3, 4]), 4)
    assert placed.tolist() == [[0.5, 0, 0, 0], [0, 0, -1.0, 0], [0, 0, 0, 2.0]]
    assert place_scores([], torch.zeros(0, dtype=torch.int64), 4).shape == (0, 4)
    with pytest.raises(RewardError, match="row 1 has no response token"):
        place_scores([1.0, 1.0], torch.tensor([1, 0]), 4)


def test_the_last_generated_token_is_the_last_of_the_mask() -> None:
    mask = torch.tensor([[1, 0, 1, 0], [1, 1, 1, 1], [0, 0, 0, 0], [1, 0, 0, 0]])
    assert last_generated(mask, torch.tensor([4, 4, 2, 3])).tolist() == [3, 4, 2, 1]


class Letters:
    """A tokenizer whose token 3 + i is the letter i, and whose others are special."""

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        return "".join("abcdefgh"[i - 3] if i > 2 else "" if skip_special_tokens else "#" for i in ids)


def test_padding_and_the_ending_token_are_not_part_of_the_text() -> None:
    responses = torch.tensor([[5, 4, 3, 2, 0], [3, 3, 3, 3, 3]])
    assert decode(Letters(), responses, torch.tensor([4, 2]), (2,)) == ["cba", "aa"]


def test_special_tokens_inside_an_answer_stay_visible() -> None:
    """Left out, "c#ba" would pass for "cba"."""
    responses = torch.tensor([[5, 1, 4, 3, 2], [5, 2, 2, 0, 0]])
    assert decode(Letters(), responses, torch.tensor([5, 3]), (2,)) == ["c#ba", "c#"]


def worker(options: RewardOptions, monkeypatch: pytest.MonkeyPatch) -> RewardWorker:
    monkeypatch.setattr("actors.reward.worker.load_tokenizer", lambda folder: Letters())
    return RewardWorker(options)


def batch(**meta: Any) -> DataProto:
    return DataProto.from_dict(
        tensors={
            "responses": torch.tensor([[5, 4, 3, 2], [5, 4, 4, 4]]),
            "attention_mask": torch.tensor([[0, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 0]]),
        },
        non_tensors={
            "uid": ["q0", "q1"],
            "data_source": ["letters"] * 2,
            "reward_model": [{"style": "exact_match", "ground_truth": "cba"}] * 2,
            "extra_info": [{}, {}],
        },
        meta_info=meta,
    )


def test_the_worker_returns_scores_accuracy_and_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    made = worker(told(), monkeypatch)
    out = asyncio.run(made.compute_score(batch(step=3, keep_text=True)))
    assert out["token_level_scores"].tolist() == [[0, 0, 0, 1.0], [0, 0, 0, 0]]
    assert out["token_level_scores"].dtype is torch.float32
    assert np.asarray(out["acc"]).tolist() == [1.0, 0.0]
    assert out["reward_failed"].tolist() == [0, 0]
    assert list(out["response_text"]) == ["cba", "cbb"]
    assert "vote" not in out
    assert list(asyncio.run(made.compute_score(batch(validate=True)))["vote"]) == ["cba", "cbb"]
    assert "response_text" not in asyncio.run(made.compute_score(batch())).non_tensor_batch
    assert asyncio.run(made.stats())["samples"] == 6


def test_the_worker_scores_the_last_token_that_the_policy_wrote(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tool's answer at the end of a response is no token of the policy's, and not in the loss."""
    made = worker(told(), monkeypatch)
    mask = torch.tensor([[1, 0, 1, 0], [0, 0, 0, 0]])
    given = batch().union(DataProto.from_dict(tensors={"response_mask": mask}))
    given.non_tensor_batch["reward_model"] = [
        {"style": "exact_match", "ground_truth": truth} for truth in ("cba", "cbb")
    ]
    out = asyncio.run(made.compute_score(given))
    assert out["token_level_scores"].tolist() == [[0, 0, 1.0, 0], [0, 0, 1.0, 0]]


def test_the_worker_marks_answers_without_a_score(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "r.py"
    path.write_text(f"def compute_score({ARGUMENTS}): return 1 / (solution_str == 'cba')\n")
    made = worker(told(path), monkeypatch)
    out = asyncio.run(made.compute_score(batch()))
    assert out["reward_failed"].tolist() == [0, FAILED["error"]]
    assert out["reward_failed"].dtype is torch.int8
    assert np.asarray(out["acc"]).tolist() == [1.0, 0.0]
    assert asyncio.run(made.stats())["errors"] == 1


def test_the_worker_keeps_what_a_custom_function_adds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "r.py"
    path.write_text(
        f"def compute_score({ARGUMENTS}): return {{'score': 0.5, 'acc': 1, 'why': solution_str}}\n"
    )
    made = worker(told(path), monkeypatch)
    out = asyncio.run(made.compute_score(batch()))
    assert list(out["reward_extra_info"]) == [{"why": "cba"}, {"why": "cbb"}]
    assert np.asarray(out["acc"]).tolist() == [1.0, 1.0]
    assert out["token_level_scores"][1].tolist() == [0, 0, 0.5, 0]
