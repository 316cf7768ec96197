"""Judging in child processes: what a hostile answer does to a judge can only be ended from outside.

    JudgePool ──question──> child ──verdict──> JudgePool         frames of pickles: one program on both sides
                 │ too late, or dead
                 └─> killed; the answer counts as failed, the next question starts a new child

A regular expression that backtracks for hours, a power that fills memory or an `os._exit` thus cost one
answer and its time limit. A child ends when its standard input does, so it does not outlive its parent.
"""

from __future__ import annotations

import asyncio
import os
import pickle
import select
import struct
import subprocess
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from actors.rewards import Score
from actors.threads import in_thread
from neoproto.errors import RewardError

LENGTH = struct.Struct("<Q")
START_S = 60.0
_GROW_S = 0.2
"""How long questions wait before another child is started for them."""

_ENDING_S = 1.0
"""How long the exit code of a child is waited for that has closed its pipes."""

JudgeKind = Literal["math_verify", "reasoning_gym", "custom"]


@dataclass(frozen=True, kw_only=True, slots=True)
class JudgeSpec:
    """What a child judges with.

    Attributes:
        kind: a built-in, or the user's function.
        path, name: file and name of the function, for `custom`.
        timeout_s: seconds of one answer; the child's CPU time of one answer is bounded a little above it.
        memory_bytes: bound on a child's address space; None is no bound.
    """

    kind: JudgeKind
    timeout_s: float
    path: str = ""
    name: str = ""
    memory_bytes: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    """One answer to judge; what reward functions are called with."""

    data_source: str
    solution: str
    ground_truth: Any
    extra_info: dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """An answer without a score.

    Attributes:
        kind: `timeout`: no verdict in time. `error`: the judge raised, died or returned no score. `input`:
            the row cannot be judged, whatever the answer.
        text: what happened.
    """

    kind: Literal["timeout", "error", "input"]
    text: str


Verdict = Score | Failure


class JudgePool:
    """Up to `size` children of one kind. The first is started at once, others when questions pile up."""

    def __init__(self, spec: JudgeSpec, size: int) -> None:
        self._spec, self._size = spec, size
        self._lock = threading.Lock()
        self._permits = threading.Semaphore(size)
        self._free: list[JudgeChild] = [JudgeChild(spec)]
        self._closed = False

    async def judge(self, questions: Sequence[Question], budget_s: float) -> list[Verdict]:
        """Verdicts in the order of the questions; all are there after `budget_s` seconds.

        Raises:
            RewardError: no child can be started.
        """
        work = _Work(questions, budget_s)
        try:
            async with asyncio.TaskGroup() as lanes:
                for number in range(min(self._size, len(questions))):
                    lanes.create_task(in_thread(partial(self._lane, work, _GROW_S * number)))
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0] from None
        finally:
            work.stop.set()
        return work.verdicts()

    def close(self) -> None:
        """End the children that are not judging, and keep new ones from starting. Twice is a no-op."""
        with self._lock:
            self._closed = True
            children, self._free = self._free, []
        for child in children:
            child.stop()

    def _lane(self, work: _Work, delay_s: float) -> None:
        """One thread: takes a child, and questions until none is left."""
        if work.stop.wait(delay_s) or work.is_empty or not self._permits.acquire(timeout=work.left):
            return
        try:
            with self._lock:
                if self._closed:
                    return
                child = self._free.pop() if self._free else JudgeChild(self._spec)
            try:
                while (taken := work.take()) is not None:
                    place, question = taken
                    work.give(place, child.ask(question, work.left))
            finally:
                self._give_back(child)
        finally:
            self._permits.release()

    def _give_back(self, child: JudgeChild) -> None:
        with self._lock:
            if not self._closed:
                self._free.append(child)
                return
        child.stop()


class _Work:
    """The questions of one call, shared by its lanes."""

    def __init__(self, questions: Sequence[Question], budget_s: float) -> None:
        self._todo = deque(enumerate(questions))
        self._until = time.monotonic() + budget_s
        self._found: list[Verdict | None] = [None] * len(questions)
        self.stop = threading.Event()

    @property
    def left(self) -> float:
        """Seconds."""
        return max(0.0, self._until - time.monotonic())

    @property
    def is_empty(self) -> bool:
        return not self._todo

    def take(self) -> tuple[int, Question] | None:
        """The next question, unless time is up or nobody waits any more."""
        if self.stop.is_set() or not self.left:
            return None
        try:
            return self._todo.popleft()
        except IndexError:
            return None

    def give(self, place: int, verdict: Verdict) -> None:
        self._found[place] = verdict

    def verdicts(self) -> list[Verdict]:
        late = Failure(kind="timeout", text="was not judged before the call's time was over")
        return [late if one is None else one for one in self._found]


class JudgeChild:
    """One child process; one question at a time."""

    def __init__(self, spec: JudgeSpec) -> None:
        self._spec = spec
        self._process: subprocess.Popen[bytes] | None = None
        self._ready = False
        self._start()

    @property
    def pid(self) -> int | None:
        """Of the process; None if there is none at present."""
        return None if self._process is None else self._process.pid

    def ask(self, question: Question, budget_s: float) -> Verdict:
        """The verdict, after the spec's time limit or `budget_s` seconds at the latest.

        Raises:
            RewardError: the child cannot be started.
        """
        process = self._running()
        limit = min(self._spec.timeout_s, budget_s)
        until = time.monotonic() + limit
        verdict: Verdict | None = None
        try:
            if write_frame(_fd(process.stdin), question, until):
                verdict = read_frame(_fd(process.stdout), until)
        except (BrokenPipeError, EOFError):
            ending = _ending(process)
            self.stop()
            return Failure(kind="error", text=f"ended its process ({ending})")
        if verdict is None:
            self.stop()
            return Failure(kind="timeout", text=f"took longer than {limit:g} s")
        return verdict

    def stop(self) -> None:
        """Kill the process. Twice is a no-op."""
        self._process, self._ready = None, False
        self._end()

    def _start(self) -> None:
        root = str(Path(__file__).parents[1])
        # Last, so that a package of the user's that has the name of one of ours is found before it.
        path = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), root]))
        command = [sys.executable, "-m", "neoproto", "actors.judge_child"]
        env = {**os.environ, "PYTHONPATH": path}
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env, bufsize=0
        )
        # Also when the owner is dropped without a word.
        self._end = weakref.finalize(self, end, self._process)
        write_frame(_fd(self._process.stdin), self._spec, None)  # it fits into the pipe

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None or self._process.poll() is not None:
            self.stop()
            self._start()
        process = self._process
        assert process is not None
        if not self._ready:
            try:
                problem = read_frame(_fd(process.stdout), time.monotonic() + START_S)
            except EOFError:
                problem = f"it ended ({_ending(process)})"
            if problem != "":
                self.stop()
                why = f"not after {START_S:g} s" if problem is None else problem
                raise RewardError(f"the process that judges ({self._spec.kind}) did not start: {why}")
            self._ready = True
        return process


def end(process: subprocess.Popen[bytes]) -> None:
    """Kill a child and close its pipes."""
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()


def write_frame(fd: int, value: Any, until: float | None) -> bool:
    """Send one value; False if it was not all taken at `until` on the monotonic clock (None: no end).

    Raises:
        BrokenPipeError: the other side is gone.
    """
    data = pickle.dumps(value)
    view = memoryview(LENGTH.pack(len(data)) + data)
    while view:
        if until is not None:
            _, ready, _ = select.select([], [fd], [], max(0.0, until - time.monotonic()))
            if not ready:
                return False
        # A pipe that is ready takes so much at once without blocking.
        view = view[os.write(fd, view[: select.PIPE_BUF]) :]
    return True


def read_frame(fd: int, until: float | None) -> Any:
    """Receive one value; None if it was not all there at `until` on the monotonic clock (None: no end).

    Raises:
        EOFError: the other side is gone.
    """
    header = _read_exactly(fd, LENGTH.size, until)
    data = None if header is None else _read_exactly(fd, LENGTH.unpack(header)[0], until)
    return None if data is None else pickle.loads(data)


def _read_exactly(fd: int, size: int, until: float | None) -> bytes | None:
    data = bytearray()
    while len(data) < size:
        if until is not None:
            ready, _, _ = select.select([fd], [], [], max(0.0, until - time.monotonic()))
            if not ready:
                return None
        part = os.read(fd, min(size - len(data), 1 << 20))
        if not part:
            raise EOFError
        data += part
    return bytes(data)


def _fd(pipe: Any) -> int:
    return int(pipe.fileno())


def _ending(process: subprocess.Popen[bytes]) -> str:
    """How a child ended that has closed its pipes; one that only closed them is about to be killed."""
    try:
        code = process.wait(_ENDING_S)
    except subprocess.TimeoutExpired:
        return "it closed its pipes"
    return f"signal {-code}" if code < 0 else f"exit code {code}"
