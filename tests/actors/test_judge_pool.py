"""Judges in child processes."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from actors.judge_pool import Failure, JudgeChild, JudgePool, JudgeSpec, Question, Verdict
from actors.rewards import Score
from neoproto.errors import RewardError


@pytest.fixture(scope="module")
def maths() -> Iterator[JudgeChild]:
    child = JudgeChild(JudgeSpec(kind="math_verify", timeout_s=12.0, memory_bytes=2 << 30))
    yield child
    child.stop()


def question(solution: str, ground_truth: Any) -> Question:
    return Question(data_source="", solution=solution, ground_truth=ground_truth, extra_info={})


def asked(child: JudgeChild, solution: str, ground_truth: Any) -> Verdict:
    return child.ask(question(solution, ground_truth), 60.0)


def right(value: float) -> Score:
    return Score(score=value, acc=value)


def custom(folder: Path, body: str, timeout_s: float = 10.0) -> JudgeSpec:
    path = folder / "judge.py"
    head = "import os, time\ndef f(data_source, solution_str, ground_truth, extra_info):\n    "
    path.write_text(f"{head}{body}\n")
    return JudgeSpec(kind="custom", timeout_s=timeout_s, path=str(path), name="f")


def wait_for(path: Path) -> None:
    until = time.monotonic() + 30
    while not path.exists() and time.monotonic() < until:
        time.sleep(0.02)


def test_equal_expressions_are_right_whatever_they_look_like(maths: JudgeChild) -> None:
    assert asked(maths, "so the answer is $\\frac{1}{2}$", "0.5") == right(1.0)
    assert asked(maths, "$x^2 + 2x + 1$", "$(x+1)^2$") == right(1.0)
    assert asked(maths, "it is 3", 4) == right(0.0)
    assert asked(maths, "no idea", "4") == right(0.0)


@pytest.mark.parametrize(
    ("said", "also"),
    [
        ("$\\frac{1}{2}$", "so 0.50"),
        ("$x = 7$", "it is 7.0"),
        ("$\\frac{\\sqrt{2}}{2}$", "$\\frac{1}{\\sqrt 2}$"),
        ("$x^2 + 2x + 1$", "$(x+1)^2$"),
        ("$\\{1, 2\\}$", "$\\{2, 1\\}$"),
        ("no idea", "none"),
        ("$10^{10000}$", "it is $10^{10000}$"),
    ],
)
def test_equal_mathematics_is_one_vote_right_or_wrong(maths: JudgeChild, said: str, also: str) -> None:
    def vote(text: str, ground_truth: str) -> str | None:
        verdict = maths.ask(replace(question(text, ground_truth), vote=True), 60.0)
        assert isinstance(verdict, Score), verdict
        return verdict.vote

    assert vote(said, "4") == vote(also, "4")
    assert vote(said, "4") not in (vote("4", "4"), vote("it is 5", "4"))
    if said != "no idea":
        assert vote(said, said) == vote(also, said)


def test_a_ground_truth_without_an_expression_is_the_inputs_fault(maths: JudgeChild) -> None:
    verdict = asked(maths, "4", "words only")
    assert verdict == Failure(
        kind="input", text="math-verify finds no expression in the ground truth 'words only'"
    )


@pytest.mark.parametrize(
    "answer",
    [
        "$" + "\\frac{1}{" * 3000 + "1" + "}" * 3000 + "$",
        "$" + "(" * 20_000 + "$",
        "$9^{9^{9^{9}}}$",
        "9" * 200_000,
    ],
    ids=["nested", "brackets", "tower", "digits"],
)
def test_hostile_latex_is_not_right_in_bounded_time(maths: JudgeChild, answer: str) -> None:
    assert asked(maths, answer, "4") != right(1.0)
    assert asked(maths, "4", "4") == right(1.0)


def test_a_killed_child_is_replaced(maths: JudgeChild) -> None:
    assert asked(maths, "4", "4") == right(1.0)
    first = maths.pid
    assert first is not None
    os.kill(first, signal.SIGKILL)
    os.waitid(os.P_PID, first, os.WEXITED | os.WNOWAIT)
    assert asked(maths, "4", "4") == right(1.0)
    assert maths.pid != first


def test_a_child_that_does_not_answer_is_killed_and_replaced(tmp_path: Path) -> None:
    child = JudgeChild(custom(tmp_path, "time.sleep(float(solution_str)); return 1", timeout_s=0.3))
    assert asked(child, "0", 0) == right(1.0)
    first = child.pid
    assert asked(child, "60", 0) == Failure(kind="timeout", text="took longer than 0.3 s")
    assert child.pid is None
    with pytest.raises(ProcessLookupError):
        os.kill(first or 0, 0)
    assert asked(child, "0", 0) == right(1.0)
    child.stop()
    child.stop()


def test_a_child_that_closes_its_pipes_and_lives_is_killed(tmp_path: Path) -> None:
    child = JudgeChild(custom(tmp_path, "os.closerange(3, 64); time.sleep(600)"))
    start = time.monotonic()
    assert asked(child, "0", 0) == Failure(kind="error", text="ended its process (it closed its pipes)")
    assert time.monotonic() - start < 60
    assert child.pid is None


def test_a_long_question_to_a_stopped_child_ends_in_time(tmp_path: Path) -> None:
    child = JudgeChild(custom(tmp_path, "return 1", timeout_s=0.5))
    assert asked(child, "0", 0) == right(1.0)
    os.kill(child.pid or 0, signal.SIGSTOP)
    assert asked(child, "x" * 1_000_000, 0) == Failure(kind="timeout", text="took longer than 0.5 s")


def test_a_child_that_cannot_start_says_why(tmp_path: Path) -> None:
    child = JudgeChild(JudgeSpec(kind="custom", timeout_s=1, path=str(tmp_path / "none.py"), name="f"))
    with pytest.raises(RewardError, match=r"\(custom\) did not start: .*no such file"):
        asked(child, "0", 0)


def test_what_cannot_travel_is_named(tmp_path: Path) -> None:
    child = JudgeChild(custom(tmp_path, "return {'score': 1, 'how': lambda: 0}"))
    verdict = asked(child, "0", 0)
    assert isinstance(verdict, Failure)
    assert "it returned 'how', which cannot be pickled" in verdict.text
    child.stop()


def test_children_are_added_when_questions_pile_up_and_never_more_than_allowed(tmp_path: Path) -> None:
    pool = JudgePool(custom(tmp_path, "time.sleep(0.5); return {'score': 1, 'pid': os.getpid()}"), size=2)

    async def many(count: int) -> set[int]:
        verdicts = await pool.judge([question("", 0)] * count, 60.0)
        return {one.extra["pid"] for one in verdicts if isinstance(one, Score)}

    async def both() -> tuple[set[int], set[int]]:
        return await asyncio.gather(many(6), many(6))

    assert len(asyncio.run(many(1))) == 1
    first, second = asyncio.run(both())
    assert len(first | second) == 2
    pool.close()
    pool.close()


def test_a_pool_that_is_dropped_ends_its_children(tmp_path: Path) -> None:
    pool = JudgePool(custom(tmp_path, "return {'score': 1, 'pid': os.getpid()}"), size=1)
    (verdict,) = asyncio.run(pool.judge([question("", 0)], 60.0))
    assert isinstance(verdict, Score)
    del pool
    until = time.monotonic() + 10  # the thread that asked may be about to let go of it
    while Path(f"/proc/{verdict.extra['pid']}").exists() and time.monotonic() < until:
        gc.collect()
        time.sleep(0.02)
    assert not Path(f"/proc/{verdict.extra['pid']}").exists()


def test_a_cancelled_call_stops_asking(tmp_path: Path) -> None:
    notes = tmp_path / "asked"
    body = f"open({str(notes)!r}, 'a').write('x'); time.sleep(0.2); return 1"
    pool = JudgePool(custom(tmp_path, body), size=1)

    async def scenario() -> None:
        call = asyncio.create_task(pool.judge([question("", 0)] * 100, 60.0))
        await asyncio.to_thread(wait_for, notes)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        await asyncio.sleep(0.5)
        before = len(notes.read_text())
        await asyncio.sleep(0.5)
        assert len(notes.read_text()) == before < 6

    asyncio.run(scenario())
    pool.close()
