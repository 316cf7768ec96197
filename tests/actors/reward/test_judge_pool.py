"""Judges in child processes."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from actors.reward.judge_pool import HEADER, RUN_MARK, JudgeChild, JudgePool, JudgeSpec
from meshes.common import guardian
from neoproto.errors import RewardError
from neoproto.rewards.score import Failure, Question, Score, Verdict


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


FORKS = """
import asyncio, multiprocessing, os, sys, threading

async def forked():
    if os.fork() == 0:
        sys.exit(0)
    return 7

def compute_score(data_source, solution_str, ground_truth, extra_info):
    if solution_str == "exit" and os.fork() == 0:
        sys.exit(0)
    if solution_str == "return":
        os.fork()
    if solution_str == "raise" and os.fork() == 0:
        raise ValueError("in the child")
    if solution_str == "interrupt" and os.fork() == 0:
        raise KeyboardInterrupt
    if solution_str == "thread":
        thread = threading.Thread(target=os.fork)
        thread.start(); thread.join()
    if solution_str == "process":
        child = multiprocessing.get_context("fork").Process(target=sys.exit, args=(0,))
        child.start(); child.join()
    if solution_str == "pool":
        with multiprocessing.get_context("fork").Pool(2) as pool:
            assert pool.map(abs, [-1, 1]) == [1, 1]
    if solution_str == "spawn":
        child = multiprocessing.get_context("spawn").Process(target=os.getpid)
        child.start(); child.join()
        assert child.exitcode == 0
    if solution_str == "async":
        return asyncio.run(forked())
    if solution_str == "print" and os.fork() == 0:
        print("no frame"); sys.stdout.flush(); os._exit(3)
    return ground_truth
"""


def gone(pid: int) -> bool:
    """Whether a process has ended; a zombie has, and whoever inherited it may be slow to collect it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return True


def wait_until_gone(*pids: int) -> None:
    until = time.monotonic() + 30
    while not all(map(gone, pids)) and time.monotonic() < until:
        time.sleep(0.02)
    assert [pid for pid in pids if not gone(pid)] == []


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


def test_a_killed_child_is_replaced_and_costs_no_answer(maths: JudgeChild) -> None:
    assert asked(maths, "4", "4") == right(1.0)
    first = maths.pid
    assert first is not None
    os.kill(first, signal.SIGKILL)
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


def test_what_a_function_forks_never_answers(tmp_path: Path) -> None:
    """Every answer has the score of its own question, also those that come after."""
    path = tmp_path / "forks.py"
    path.write_text(FORKS)
    child = JudgeChild(JudgeSpec(kind="custom", timeout_s=30.0, path=str(path), name="compute_score"))
    ways = ["exit", "return", "raise", "interrupt", "thread", "process", "pool", "spawn", "async", "print"]
    asked_for = [way for way in ways for way in (way, "")]
    found = [asked(child, way, 7 if way == "async" else place) for place, way in enumerate(asked_for)]
    expected = [right(7.0 if way == "async" else place) for place, way in enumerate(asked_for)]
    assert found == expected
    child.stop()


WRITES = f"""
import contextlib, os, stat

def compute_score(data_source, solution_str, ground_truth, extra_info):
    for number in range(3, 20):
        with contextlib.suppress(OSError):
            if stat.S_ISFIFO(os.fstat(number).st_mode):
                os.write(number, {HEADER.pack(99, 3) + b"???"!r})
    return 1
"""


def test_a_frame_of_another_number_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "writes.py"
    path.write_text(WRITES)
    child = JudgeChild(JudgeSpec(kind="custom", timeout_s=10.0, path=str(path), name="compute_score"))
    assert asked(child, "", 0) == Failure(kind="error", text="frame 99 came where frame 1 was due")
    assert child.pid is None
    child.stop()


def test_what_others_cannot_read_is_a_failure_of_the_answer(tmp_path: Path) -> None:
    spec = custom(tmp_path, "return {'score': 1, 'how': Own()}\nclass Own: pass")
    child = JudgeChild(spec)
    verdict = asked(child, "", 0)
    assert isinstance(verdict, Failure)
    assert verdict.text.startswith(
        "what it returned cannot be read by others: No module named 'neoproto_user_"
    )
    child.stop()


ENDS_ITSELF = "    os.kill(os.getpid(), signal.SIGKILL)\n"


def test_a_child_that_is_killed_while_it_starts_is_started_again(tmp_path: Path) -> None:
    spec = custom(tmp_path, "return 1")
    mark, path = tmp_path / "killed", Path(spec.path)
    once = f"if not os.path.exists({str(mark)!r}):\n    open({str(mark)!r}, 'w')\n"
    path.write_text(f"import os, signal\n{once}{ENDS_ITSELF}{path.read_text()}")
    child = JudgeChild(spec)
    assert asked(child, "", 0) == right(1.0)
    assert mark.exists()
    mark.unlink()  # and when it starts again
    os.kill(child.pid or 0, signal.SIGKILL)
    assert asked(child, "", 0) == right(1.0)
    assert mark.exists()
    child.stop()


def test_a_child_that_could_not_be_made_is_made_when_it_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec, popen, tries = custom(tmp_path, "return 1"), subprocess.Popen, iter(range(9))

    def fail(*args: Any, **options: Any) -> Any:
        if next(tries) < 2:
            raise BlockingIOError(11, "Resource temporarily unavailable")
        return popen(*args, **options)

    monkeypatch.setattr("actors.reward.judge_pool.subprocess.Popen", fail)
    child = JudgeChild(spec)
    assert asked(child, "", 0) == right(1.0)
    child.stop()


def test_a_child_that_never_starts_is_an_error(tmp_path: Path) -> None:
    spec = custom(tmp_path, "return 1")
    Path(spec.path).write_text(f"import os, signal\nif True:\n{ENDS_ITSELF}")
    with pytest.raises(RewardError, match=r"\(custom\) did not start: it ended \(signal 9\)"):
        asked(JudgeChild(spec), "", 0)


CHILDREN = """
import os, subprocess, sys, time
from multiprocessing.shared_memory import SharedMemory

HIDDEN = [sys.executable, "-c", "import subprocess; print(subprocess.Popen(['sleep', '600'], env={},"
          " start_new_session=True, stdout=subprocess.DEVNULL).pid)"]

def compute_score(data_source, solution_str, ground_truth, extra_info):
    plain = subprocess.Popen(["sleep", "600"]).pid
    orphan = int(subprocess.check_output(HIDDEN, env={}))
    for _ in range(2):  # a chain of forks, each in a session of its own
        if os.fork() == 0:
            os.setsid()
            if os.fork():
                os._exit(0)
            time.sleep(600)
    memory = SharedMemory(create=True, size=8)
    with open(solution_str + ".memory", "w") as file:
        file.write(memory.name)
    with open(solution_str + ".partial", "w") as file:
        file.write(f"{plain} {orphan}")
    os.rename(solution_str + ".partial", solution_str)
    time.sleep(600 if ground_truth else 0)
    return {"score": 1, "pid": os.getpid()}
"""
PROGRAM = """
import sys
from actors.reward.judge_pool import JudgeChild, JudgeSpec, Question

child = JudgeChild(JudgeSpec(kind="custom", timeout_s=600.0, path=sys.argv[1], name="compute_score"))
child.ask(Question(data_source="", solution=sys.argv[2], ground_truth=int(sys.argv[3]), extra_info={}), 600.0)
print(child.pid, flush=True)
input()
"""


def pids_in(path: Path) -> list[int]:
    wait_for(path)
    return [int(pid) for pid in path.read_text().split()]


def test_a_judge_that_took_too_long_is_ended_with_all_that_it_started(tmp_path: Path) -> None:
    path, pids = tmp_path / "children.py", tmp_path / "pids"
    path.write_text(CHILDREN)
    child = JudgeChild(JudgeSpec(kind="custom", timeout_s=3.0, path=str(path), name="compute_score"))
    assert asked(child, str(pids), 1) == Failure(kind="timeout", text="took longer than 3 s")
    assert [pid for pid in pids_in(pids) if not gone(pid)] == []
    memory = (tmp_path / "pids.memory").read_text()
    assert not Path("/dev/shm", memory).exists()  # multiprocessing's tracker had the time to remove it
    child.stop()


@pytest.mark.parametrize("whose", ["judge", "owner"])
def test_a_judge_that_dies_leaves_nothing(tmp_path: Path, whose: str) -> None:
    """By itself, and with its owner, of which nothing runs any more that could end it."""
    path, program, pids = tmp_path / "children.py", tmp_path / "program.py", tmp_path / "pids"
    path.write_text(CHILDREN)
    program.write_text(PROGRAM)
    owner = subprocess.Popen(
        [sys.executable, str(program), str(path), str(pids), "0"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])},
    )
    assert owner.stdout is not None
    judge = int(owner.stdout.readline())
    os.kill(judge if whose == "judge" else owner.pid, signal.SIGKILL)
    wait_until_gone(judge, *pids_in(pids))
    owner.kill()
    owner.communicate()


@pytest.mark.parametrize(
    "end", ["os.killpg(0, 9)", "os.kill(os.getppid(), 9)", "os.execv('/bin/true', ['true'])"]
)
def test_what_a_judge_does_to_its_group_or_its_parent_costs_one_answer(tmp_path: Path, end: str) -> None:
    child = JudgeChild(custom(tmp_path, f"{end} if solution_str else None; time.sleep(0.1); return 1"))
    verdict = asked(child, "now", 0)
    assert isinstance(verdict, Failure)
    assert verdict.text.startswith("ended its process (")
    assert asked(child, "", 0) == right(1.0)
    child.stop()


def test_a_keeper_does_not_have_the_mark_of_a_run() -> None:
    """What ends a run by it would end the keeper first, and its judge's children would live on."""
    assert RUN_MARK == guardian.MARK
