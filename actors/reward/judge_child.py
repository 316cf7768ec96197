"""The child of `judge_pool`: judges one answer after another until its input ends."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import itertools
import math
import os
import pickle
import resource
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from actors.reward.function import NotAScore, load_reward_function, to_score
from actors.reward.judge_pool import CUSTOM, TAKEN, JudgeSpec, read_frame, write_frame
from neoproto.errors import ConfigError
from neoproto.packages import users_first
from neoproto.rewards.builtin import REWARDS
from neoproto.rewards.score import Failure, Question, Score, Verdict
from neoproto.user_code import end_fork, error_place

_CPU_GRACE_S = 3

JudgeFn = Callable[[Question], Verdict]


def load_judge(spec: JudgeSpec) -> JudgeFn:
    """The judge of a spec, ready for its first question.

    Raises:
        ConfigError: the user's function cannot be loaded.
    """
    if spec.kind == CUSTOM:
        function = load_reward_function(spec.path, spec.name)
        return lambda question: judge_custom(function, question)
    reward = REWARDS[spec.kind]
    reward.prepare()
    return reward.verdict


def judge_custom(function: Callable[..., Any], question: Question) -> Verdict:
    """The user's function."""
    with users_first():
        returned = function(
            data_source=question.data_source,
            solution_str=question.solution,
            ground_truth=question.ground_truth,
            extra_info=question.extra_info,
        )
        if inspect.isawaitable(returned):
            returned = asyncio.run(awaited(returned))
    try:
        return to_score(returned)
    except NotAScore as error:
        return Failure(kind="error", text=str(error))


async def awaited(value: Awaitable[Any]) -> Any:
    return await value


def serve() -> None:
    """Answer until the input ends, each time within a limit on CPU time.

    The kernel enforces it, so an answer ends even inside C code, and if no process is left to kill the child.
    """
    judge_pid = os.getpid()
    # What functions read and print must not get among the frames.
    questions, answers = os.dup(0), os.dup(1)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    # A function may fork. The process that is not the judge must neither read nor write here.
    os.register_at_fork(after_in_child=lambda: _close(questions, answers))
    spec: JudgeSpec = read_frame(questions, 0, None)
    try:
        judge = load_judge(spec)
    except ConfigError as error:
        write_frame(answers, 0, str(error), None)
        return
    if spec.memory_bytes is not None:
        hard = resource.getrlimit(resource.RLIMIT_AS)[1]
        resource.setrlimit(resource.RLIMIT_AS, (spec.memory_bytes, hard))
    write_frame(answers, 0, judge_pid, None)
    for number in itertools.count(1):
        try:
            question: Question = read_frame(questions, number, None)
        except EOFError:
            return
        write_frame(answers, number, TAKEN, None)
        _limit_cpu(spec.timeout_s)
        write_frame(answers, number, verdict_on(question, judge, spec.path, judge_pid), None)


def verdict_on(question: Question, judge: JudgeFn, path: str, judge_pid: int) -> Verdict:
    """The judge's verdict; whatever it raises is a failure of this answer.

    Only process `judge_pid` comes back from here; one that the function forked ends.

    Args:
        path: the user's file, if it is one's.
    """
    raised: BaseException | None = None
    try:
        verdict = sendable(judge(question))
    except BaseException as error:  # noqa: BLE001 — an exit of the function's must not end the child either
        raised = error
        verdict = Failure(kind="error", text=f"raised {error_place(error, Path(path))}")
    end_fork(judge_pid, raised)
    return verdict


def sendable(verdict: Verdict) -> Verdict:
    """The verdict, or a failure if what a function returned beside the score cannot travel."""
    if isinstance(verdict, Score):
        for name, value in verdict.extra.items():
            try:
                pickle.dumps(value)
            except BaseException as error:  # noqa: BLE001 — pickling runs the object's own code
                return Failure(kind="error", text=f"it returned {name!r}, which cannot be pickled: {error}")
    return verdict


def _close(*numbers: int) -> None:
    for number in numbers:
        with contextlib.suppress(OSError):
            os.close(number)


def _limit_cpu(seconds: float) -> None:
    used = resource.getrusage(resource.RUSAGE_SELF)
    limit = math.ceil(used.ru_utime + used.ru_stime + seconds) + _CPU_GRACE_S
    hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
    resource.setrlimit(resource.RLIMIT_CPU, (limit, hard))


if __name__ == "__main__":
    sys.stdout = sys.stderr
    serve()
