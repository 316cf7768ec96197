"""The child of `judge_pool`: judges one answer after another until its input ends."""

from __future__ import annotations

import asyncio
import inspect
import math
import os
import pickle
import resource
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from actors.judge_pool import Failure, JudgeSpec, Question, Verdict, read_frame, write_frame
from actors.reward_function import NotAScore, load_reward_function, to_score
from actors.rewards import RowError, Score, reasoning_gym_score
from neoproto.data.user_code import error_place
from neoproto.errors import ConfigError
from neoproto.packages import users_first

_MATH_LIMIT_S = 3
"""For parsing, and again for comparing: math-verify's own limits, which are signals."""
_CPU_GRACE_S = 3

JudgeFn = Callable[[Question], Verdict]


def load_judge(spec: JudgeSpec) -> JudgeFn:
    """The judge of a spec, ready for its first question.

    Raises:
        ConfigError: the user's function cannot be loaded.
    """
    if spec.kind == "custom":
        function = load_reward_function(spec.path, spec.name)
        return lambda question: judge_custom(function, spec.path, question)
    if spec.kind == "reasoning_gym":
        import reasoning_gym.factory  # noqa: F401 — seconds, which the first answer should not pay

        return judge_reasoning_gym
    judge_math(Question(data_source="", solution="1", ground_truth="1", extra_info={}))
    return judge_math


def judge_custom(function: Callable[..., Any], path: str, question: Question) -> Verdict:
    """The user's function; whatever it raises is a failure of this answer."""
    try:
        with users_first():
            returned = function(
                data_source=question.data_source,
                solution_str=question.solution,
                ground_truth=question.ground_truth,
                extra_info=question.extra_info,
            )
            if inspect.isawaitable(returned):
                returned = asyncio.run(awaited(returned))
    except BaseException as error:  # noqa: BLE001 — an exit of the function's must not end the child either
        return Failure(kind="error", text=f"raised {error_place(error, Path(path))}")
    try:
        return to_score(returned)
    except NotAScore as error:
        return Failure(kind="error", text=str(error))


async def awaited(value: Awaitable[Any]) -> Any:
    return await value


def judge_reasoning_gym(question: Question) -> Verdict:
    """The task's own verifier; rows that it cannot judge are the input's fault."""
    try:
        return reasoning_gym_score(
            question.solution, question.ground_truth, question.data_source, question.extra_info
        )
    except RowError as error:
        return Failure(kind="input", text=str(error))
    except Exception as error:  # noqa: BLE001 — whatever an answer provokes
        return Failure(kind="error", text=f"raised {type(error).__name__}: {error}")


def judge_math(question: Question) -> Verdict:
    """1 if the answer is mathematically equal to the ground truth, else 0."""
    from math_verify import parse, verify
    from math_verify.errors import TimeoutException

    try:
        gold = parse(str(question.ground_truth), parsing_timeout=_MATH_LIMIT_S)
        if not gold:
            text = f"math-verify finds no expression in the ground truth {question.ground_truth!r}"
            return Failure(kind="input", text=text)
        answer = parse(question.solution, parsing_timeout=_MATH_LIMIT_S)
        right = float(verify(gold, answer, timeout_seconds=_MATH_LIMIT_S))
        return Score(score=right, acc=right)
    except TimeoutException:
        return Failure(kind="timeout", text="math-verify gave up on it")
    except (MemoryError, RecursionError) as error:
        return Failure(kind="error", text=f"math-verify gave up on it: {type(error).__name__}")


def serve() -> None:
    """Answer until the input ends, each time within a limit on CPU time.

    The kernel enforces it, so an answer ends even inside C code, and when nobody is left to kill the child.
    """
    # What functions read and print must not get among the frames.
    questions, answers = os.dup(0), os.dup(1)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    spec: JudgeSpec = read_frame(questions, None)
    try:
        judge = load_judge(spec)
    except ConfigError as error:
        write_frame(answers, str(error), None)
        return
    if spec.memory_bytes is not None:
        hard = resource.getrlimit(resource.RLIMIT_AS)[1]
        resource.setrlimit(resource.RLIMIT_AS, (spec.memory_bytes, hard))
    write_frame(answers, "", None)
    while True:
        try:
            question: Question = read_frame(questions, None)
        except EOFError:
            return
        _limit_cpu(spec.timeout_s)
        write_frame(answers, sendable(judge(question)), None)


def sendable(verdict: Verdict) -> Verdict:
    """The verdict, or a failure if what a function returned beside the score cannot travel."""
    if isinstance(verdict, Score):
        for name, value in verdict.extra.items():
            try:
                pickle.dumps(value)
            except Exception as error:  # noqa: BLE001 — pickling runs the object's own code
                return Failure(kind="error", text=f"it returned {name!r}, which cannot be pickled: {error}")
    return verdict


def _limit_cpu(seconds: float) -> None:
    used = resource.getrusage(resource.RUSAGE_SELF)
    limit = math.ceil(used.ru_utime + used.ru_stime + seconds) + _CPU_GRACE_S
    hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
    resource.setrlimit(resource.RLIMIT_CPU, (limit, hard))


if __name__ == "__main__":
    sys.stdout = sys.stderr
    serve()
