"""Judging in child processes: only another process can end a judge that a hostile answer blocks.

    JudgePool ──question──> child ──verdict──> JudgePool         frames of pickles: one program on both sides
                 │ too late, or dead
                 └─> killed, with all that it started; the answer counts as failed, the next question starts
                     a new child

A regular expression that backtracks for hours, a power that fills memory or an `os._exit` thus cost one
answer and its time limit. A keeper (`judge_keeper`) starts and ends each child; it does not outlive the pool.

Frames are numbered: the start is frame 0, the answers to a question have the question's number. A child
answers twice: when it has taken a question, and with the verdict. So a child that died before it took a
question costs no answer. A frame with another number is not read; its child is killed.
"""

from __future__ import annotations

import asyncio
import contextlib
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
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from neoproto.errors import RewardError
from neoproto.rewards.score import Failure, Question, Score, Verdict
from neoproto.text import one_line
from neoproto.threads import on_thread

HEADER = struct.Struct("<QQ")
"""Of a frame: its number, and the bytes that follow."""

TAKEN = "taken"
"""A child's first answer to a question."""

START_S = 60.0
START_TRIES = 3
"""A child that dies while it starts is started again; one that reports an error is not."""

KEEPER = Path(__file__).with_name("judge_keeper.py")
RUN_MARK = "NEOPROTO_RUN_ID"
"""A run's processes are ended by this variable. A keeper must be the last to end, so it does not get it."""

_GROW_S = 0.2
"""How long questions wait before another child is started for them."""

_ENDING_S = 1.0
"""How long the exit code of a child is waited for that has closed its pipes."""

_ENDED_S = 15.0
"""How long a keeper may take to end a judge; longer than it tries to."""

_lifelines: set[int] = set()
"""Of the judges of this process. A process that a user's code forks here must not keep them alive."""
os.register_at_fork(after_in_child=lambda: _let_go())

CUSTOM = "custom"
"""The kind of judge that is a function of the user's; the other kinds are built-in rewards."""


@dataclass(frozen=True, kw_only=True, slots=True)
class JudgeSpec:
    """What a child judges with.

    Attributes:
        kind: a built-in, or `CUSTOM`.
        path, name: file and name of the function, for `custom`.
        timeout_s: seconds of one answer; the child's CPU time of one answer is bounded a little above it.
        memory_bytes: bound on a child's address space; None is no bound.
    """

    kind: str
    timeout_s: float
    path: str = ""
    name: str = ""
    memory_bytes: int | None = None


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
                    lanes.create_task(
                        on_thread(partial(self._lane, work, _GROW_S * number), name="judge-lane")
                    )
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
        """The next question, unless time is up or no caller waits any more."""
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
        self._keeper: subprocess.Popen[bytes] | None = None
        self._end: Callable[[], object] | None = None
        self._pid: int | None = None
        self._number = 0
        with contextlib.suppress(OSError):  # no process can be made now: tried again when it is asked
            self._start()

    @property
    def pid(self) -> int | None:
        """Of the process that judges; None if there is none that is ready."""
        return self._pid

    def ask(self, question: Question, budget_s: float) -> Verdict:
        """The verdict, after the spec's time limit or `budget_s` seconds at the latest.

        Raises:
            RewardError: the child cannot be started.
        """
        over = time.monotonic() + budget_s
        for _ in range(START_TRIES):
            if not self._is_ready(over):
                return Failure(kind="timeout", text="was not judged before the call's time was over")
            verdict = self._ask(question, over)
            if isinstance(verdict, Score | Failure):
                return verdict
        return Failure(kind="error", text=f"{verdict}, before the question was taken")

    def stop(self) -> None:
        """Kill the process, and all that it started. Twice is a no-op."""
        self._keeper, self._pid = None, None
        if self._end is not None:
            self._end()

    def _ask(self, question: Question, over: float) -> Verdict | str:
        """The verdict, or how the child ended that did not take the question."""
        assert self._keeper is not None
        limit = min(self._spec.timeout_s, max(0.0, over - time.monotonic()))
        until = time.monotonic() + limit
        self._number += 1
        taken, value = False, None
        try:
            if write_frame(_fd(self._keeper.stdin), self._number, question, until):
                value = read_frame(_fd(self._keeper.stdout), self._number, until)
                if taken := value == TAKEN:
                    value = read_frame(_fd(self._keeper.stdout), self._number, until)
        except (BrokenPipeError, EOFError):
            ending = f"ended its process ({_ending(self._keeper)})"
            self.stop()
            return Failure(kind="error", text=ending) if taken else ending
        except FrameError as error:
            self.stop()
            return Failure(kind="error", text=str(error))
        if isinstance(value, Score | Failure):
            return value
        self.stop()
        return Failure(kind="timeout", text=f"took longer than {limit:g} s")

    def _start(self) -> None:
        root = str(Path(__file__).parents[2])
        # Last, so that a package of the user's that has the name of one of ours is found before it.
        path = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), root]))
        command = [sys.executable, "-m", "neoproto", "actors.reward.judge_child"]
        env = {**os.environ, "PYTHONPATH": path}
        mark = env.pop(RUN_MARK, None)
        control, lifeline = os.pipe()
        extra = "" if mark is None else f"{RUN_MARK}={mark}"
        try:
            keeper = subprocess.Popen(
                [sys.executable, "-I", "-S", str(KEEPER), str(control), extra, *command],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=env,
                bufsize=0,
                pass_fds=(control,),
                start_new_session=True,
            )
        except BaseException:
            os.close(lifeline)
            raise
        finally:
            os.close(control)
        _lifelines.add(lifeline)
        self._keeper, self._number = keeper, 0
        # Also when the owner is dropped without a word.
        self._end = weakref.finalize(self, end, keeper, lifeline)
        with contextlib.suppress(BrokenPipeError):  # it is dead already, which is found when it is asked
            write_frame(_fd(keeper.stdin), 0, self._spec, None)  # it fits into the pipe

    def _is_ready(self, over: float) -> bool:
        """Whether a child waits for a question; False if there was none at `over` on the monotonic clock.

        Raises:
            RewardError: no child can be started.
        """
        problem = ""
        for _ in range(START_TRIES):
            if self._keeper is not None and self._keeper.poll() is not None:
                self.stop()
            if self._pid is not None:
                return True
            until = time.monotonic() + START_S
            try:
                if self._keeper is None:
                    self._start()
                assert self._keeper is not None
                started = read_frame(_fd(self._keeper.stdout), 0, min(until, over))
            except EOFError:
                problem = f"it ended ({_ending(self._keeper)})"
            except (OSError, FrameError) as error:
                problem = str(error)
            else:
                if isinstance(started, int):
                    self._pid = started
                    return True
                if isinstance(started, str):
                    problem = started
                    break
                if over <= until:  # the next call finds it further on
                    return False
                problem = f"no answer within {START_S:g} s"
            self.stop()
        self.stop()
        raise RewardError(f"the process that judges ({self._spec.kind}) did not start: {problem}")


def end(keeper: subprocess.Popen[bytes], lifeline: int) -> None:
    """Have a child and all that it started killed, and close its pipes."""
    if lifeline not in _lifelines:  # in a forked process
        return
    _lifelines.discard(lifeline)
    os.close(lifeline)
    try:
        keeper.wait(_ENDED_S)
    except subprocess.TimeoutExpired:  # it is stopped, or so is the machine; its judge dies with it
        keeper.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):  # the kernel holds it
            keeper.wait(_ENDED_S)
    for pipe in (keeper.stdin, keeper.stdout):
        if pipe is not None:
            pipe.close()


def _let_go() -> None:
    while _lifelines:
        os.close(_lifelines.pop())


class FrameError(Exception):
    """What came is not the frame that was waited for; the text describes it."""


def write_frame(fd: int, number: int, value: Any, until: float | None) -> bool:
    """Send one value; False if it was not all taken at `until` on the monotonic clock (None: no end).

    Raises:
        BrokenPipeError: the other side is gone.
    """
    data = pickle.dumps(value)
    view = memoryview(HEADER.pack(number, len(data)) + data)
    while view:
        if until is not None:
            _, ready, _ = select.select([], [fd], [], max(0.0, until - time.monotonic()))
            if not ready:
                return False
        # A pipe that is ready takes so much at once without blocking.
        view = view[os.write(fd, view[: select.PIPE_BUF]) :]
    return True


def read_frame(fd: int, number: int, until: float | None) -> Any:
    """Receive the value of frame `number`; None if it was not all there at `until` on the monotonic clock.

    Args:
        until: None is no end.

    Raises:
        EOFError: the other side is gone.
        FrameError: it is another frame, or cannot be unpickled here.
    """
    header = _read_exactly(fd, HEADER.size, until)
    if header is None:
        return None
    found, size = HEADER.unpack(header)
    if found != number:
        raise FrameError(f"frame {found} came where frame {number} was due")
    data = _read_exactly(fd, size, until)
    try:
        return None if data is None else pickle.loads(data)
    except BaseException as error:  # a user's class: it may not exist here, and has code of its own
        raise FrameError(f"what it returned cannot be read by others: {one_line(error)}") from error


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


def _ending(keeper: subprocess.Popen[bytes] | None) -> str:
    """How a child ended that has closed its pipes; one that only closed them is about to be killed."""
    assert keeper is not None
    try:
        code = keeper.wait(_ENDING_S)
    except subprocess.TimeoutExpired:
        return "it closed its pipes"
    return f"signal {-code}" if code < 0 else f"exit code {code}"
