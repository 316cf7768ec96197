"""`math-verify` in a child process, since what it does with a hostile answer cannot be interrupted from a
thread.

    MathJudge ──{"solution", "ground_truth"}──> child ──{"score"}──> MathJudge       one JSON object a line

Its own time limits use signals, which work in a main thread only: the child's. An answer that keeps the
child busy beyond that (a power that fills memory, say) is judged wrong, the child killed, and a new one
started. The child ends when its standard input does, so it does not outlive its parent.
"""

from __future__ import annotations

import json
import math
import os
import resource
import select
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

from neoproto.errors import RewardError

_LIMIT_S = 3
"""For parsing, and again for comparing."""
_REPLY_S = 3 * _LIMIT_S + 3
_START_S = 60.0
_MEMORY_BYTES = 2 << 30


class MathJudge:
    """Asks the child, one question at a time; callable from any thread. The first question starts it.

    Attributes:
        timeouts: answers judged wrong because the child did not answer in time or memory. Comparisons that
            math-verify itself breaks off, which it only logs, are wrong answers and not counted here.
    """

    def __init__(self) -> None:
        self.timeouts = 0
        self._lock = threading.Lock()
        self._child: subprocess.Popen[bytes] | None = None

    def score(self, solution: str, ground_truth: Any) -> float:
        """1.0 if the answer is mathematically equal to the ground truth, else 0.0.

        Raises:
            ValueError: the ground truth cannot be parsed.
            RewardError: the child does not start.
        """
        question = {"solution": solution, "ground_truth": str(ground_truth)}
        with self._lock:
            child = self._running_child()
            assert child.stdin is not None
            child.stdin.write(json.dumps(question).encode() + b"\n")
            child.stdin.flush()
            reply = self._read(child, _REPLY_S)
            if reply is None:
                self.timeouts += 1
                self._stop()
                return 0.0
        if reply.get("gave_up"):
            self.timeouts += 1
        if "error" in reply:
            raise ValueError(reply["error"])
        return float(reply["score"])

    def close(self) -> None:
        """End the child. Closing twice is a no-op."""
        with self._lock:
            self._stop()

    def _running_child(self) -> subprocess.Popen[bytes]:
        if self._child is not None and self._child.poll() is None:
            return self._child
        self._stop()
        command = [sys.executable, "-m", "actors.math_judge"]
        root = str(Path(__file__).parents[1])
        env = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")])),
        }
        self._child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env)
        if self._read(self._child, _START_S) is None:
            self._stop()
            raise RewardError("the math-verify process did not start; its error is in this worker's log")
        return self._child

    def _read(self, child: subprocess.Popen[bytes], timeout_s: float) -> dict[str, Any] | None:
        """The child's next line, None if it died or is too late."""
        assert child.stdout is not None
        ready, _, _ = select.select([child.stdout], [], [], timeout_s)
        line = child.stdout.readline() if ready else b""
        return dict(json.loads(line)) if line else None

    def _stop(self) -> None:
        if self._child is None:
            return
        self._child.kill()
        self._child.wait()
        for pipe in (self._child.stdin, self._child.stdout):
            if pipe is not None:
                pipe.close()
        self._child = None


def judge(solution: str, ground_truth: str) -> dict[str, Any]:
    """One answer, in the child: `score`, and `gave_up` if that was the reason; or `error`."""
    from math_verify import parse, verify
    from math_verify.errors import TimeoutException

    try:
        gold = parse(ground_truth, parsing_timeout=_LIMIT_S)
        if not gold:
            return {"error": f"math-verify finds no expression in the ground truth {ground_truth!r}"}
        answer = parse(solution, parsing_timeout=_LIMIT_S)
        return {"score": float(verify(gold, answer, timeout_seconds=_LIMIT_S))}
    except (TimeoutException, MemoryError, RecursionError):
        return {"score": 0.0, "gave_up": True}


def _serve() -> None:
    """The child: answers until its input ends, each time within a limit on CPU time and memory.

    The kernel enforces both, so an answer ends even inside C code, and when nobody is left to kill the child.
    """
    answers, sys.stdout = sys.stdout, sys.stderr  # what libraries print must not get among the answers
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, resource.getrlimit(resource.RLIMIT_AS)[1]))
    hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
    judge("1", "1")
    print(json.dumps({"ready": True}), file=answers, flush=True)
    for line in sys.stdin:
        used = resource.getrusage(resource.RUSAGE_SELF)
        limit = math.ceil(used.ru_utime + used.ru_stime) + _REPLY_S
        resource.setrlimit(resource.RLIMIT_CPU, (limit, hard))
        print(json.dumps(judge(**json.loads(line))), file=answers, flush=True)


if __name__ == "__main__":
    _serve()
