"""`python -m neoproto.run` as a person runs it, in a folder of its own, and what it leaves behind."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from meshes.common import procs

ROOT = Path(__file__).resolve().parents[2]
MARK = "NEOPROTO_E2E"
BOUND_S = 15.0
"""Everything of a run is closed within so many seconds of its end."""
LIMIT_S = 240.0
"""No run of these tests takes longer, even on a busy machine."""
NOT_OURS = re.compile(r"torchinductor_\w+|vllm_dist_[0-9a-f]+")
"""torch's compile cache, one a user, which outlives processes on purpose; and the small file by which vLLM's
processes meet, which an engine that is killed cannot remove."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Finished:
    """A run that has ended. `seconds`: from the start, or from the signal that ended it."""

    code: int
    out: str
    errors: str
    folder: Path
    seconds: float

    @property
    def metrics(self) -> list[dict[str, Any]]:
        return json_lines(self.folder / "metrics.jsonl")

    @property
    def steps(self) -> list[dict[str, Any]]:
        return [row for row in self.metrics if "training/global_step" in row]

    def validation(self, step: int) -> list[dict[str, Any]]:
        return json_lines(self.folder / "validation" / f"step_{step}.jsonl")


class Command:
    """One run of the command: started, watched, ended.

    Every process it starts inherits a mark in its environment, and a temporary folder of its own: whatever is
    left of either is the run's.

    Attributes:
        cwd, folder: where it runs, and its run folder in there.
        shm: where its shared memory is seen from here.
        tmp: its temporary folder.
    """

    def __init__(
        self,
        cwd: Path,
        env: Mapping[str, str],
        *words: str,
        within: Sequence[str] = (),
        folder: Path | None = None,
        program: Sequence[str] = ("-m", "neoproto.run"),
    ) -> None:
        """Args:
        within: a program that replaces itself by the command, which is the rest of its arguments.
        program: what Python runs; a script takes the same arguments.
        folder: the run folder, if it is not the one in `cwd`.
        """
        self.cwd = cwd
        self.folder = folder or cwd / "run"
        self.shm = "/dev/shm"
        self._mark = uuid.uuid4().hex
        # Short, since sockets lie in it: their paths have 108 bytes at most.
        self.tmp = Path(tempfile.mkdtemp(prefix="npe2e-", dir="/tmp"))
        self._shared: set[int] = set()
        self._out, self._errors = cwd / "stdout", cwd / "stderr"
        with self._out.open("wb") as out, self._errors.open("wb") as errors:
            self.process = subprocess.Popen(
                [*within, sys.executable, *program, *words, f"runtime.run_dir={self.folder}"],
                cwd=cwd,
                env={**env, MARK: self._mark, "TMPDIR": str(self.tmp), "PYTHONPATH": str(ROOT)},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=errors,
                start_new_session=True,
            )
        self._started = time.monotonic()

    @property
    def out(self) -> str:
        return self._out.read_text(errors="replace")

    @property
    def errors(self) -> str:
        return self._errors.read_text(errors="replace")

    def wait(self, seconds: float = LIMIT_S) -> Finished:
        """Wait for its own end."""
        until = time.monotonic() + seconds
        while self.process.poll() is None:
            assert time.monotonic() < until, f"went on for {seconds} s:\n{self.out}\n{self.errors}"
            self.look()
            time.sleep(0.2)
        return self._finished(time.monotonic() - self._started)

    def wait_for(self, line: str, seconds: float = LIMIT_S) -> None:
        """Wait until it has printed a line that begins so."""
        until = time.monotonic() + seconds
        while not re.search(rf"^{re.escape(line)}", self.out, re.MULTILINE):
            told = f"{self.out}\n{self.errors}"
            assert self.process.poll() is None, f"ended before it printed {line!r}:\n{told}"
            assert time.monotonic() < until, f"did not print {line!r} in {seconds} s:\n{told}"
            time.sleep(0.05)
        self.look()

    def look(self) -> None:
        """Note which shared memory its processes use now; on a busy machine there is that of others too."""
        for pid in self.processes():
            with contextlib.suppress(OSError):
                # By inode: a semaphore is mapped under another name than it ends up with.
                self._shared |= {inode for _, inode in procs.mapped_shm(pid)}

    def signal(self, signum: signal.Signals) -> Finished:
        """Send a signal to the controller alone, and wait for its end."""
        sent = time.monotonic()
        self.process.send_signal(signum)
        self.process.wait(LIMIT_S)
        return self._finished(time.monotonic() - sent)

    def left(self) -> list[str]:
        """What there still is of it: processes, temporary files and sockets, shared memory."""
        found = [f"process {pid}: {name}" for pid, name in self.processes().items()]
        names = sorted(path.name for path in self.tmp.iterdir())
        found += [f"temporary {name}" for name in names if not NOT_OURS.fullmatch(name)]
        shared = [entry.name for entry in os.scandir(self.shm) if entry.inode() in self._shared]
        found += [f"shared memory {name}" for name in sorted(shared)]
        return found + [f"socket {name}" for name in procs.unix_sockets(str(self.tmp))]

    def left_after(self, seconds: float) -> list[str]:
        """Wait until nothing is left; what is after `seconds`."""
        until = time.monotonic() + seconds
        while (found := self.left()) and time.monotonic() < until:
            time.sleep(0.1)
        return found

    def processes(self) -> dict[int, str]:
        """Living processes that carry the mark, with their command lines."""
        needle = f"{MARK}={self._mark}".encode()
        return {pid: name for pid in procs.pids() if (name := _marked(pid, needle)) is not None}

    def worker(self, group: str, rank: int = 0) -> int:
        """The process of one rank, told by the log it writes to; not its children, which write there too."""
        log = str(self.folder / "logs" / group / f"rank{rank}.log")
        writers = {pid for pid in self.processes() if _output_of(pid) == log}
        (pid,) = [pid for pid in writers if psutil.Process(pid).ppid() not in writers]
        return pid

    def discard(self) -> None:
        """End what is left, so that one failed test does not disturb the next."""
        until = time.monotonic() + BOUND_S
        while (left := self.processes()) and time.monotonic() < until:
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.05)
        self.process.wait()
        shutil.rmtree(self.tmp, ignore_errors=True)

    def _finished(self, seconds: float) -> Finished:
        return Finished(
            code=self.process.returncode,
            out=self.out,
            errors=self.errors,
            folder=self.folder,
            seconds=seconds,
        )


Start = Callable[..., Command]


def _marked(pid: int, needle: bytes) -> str | None:
    """The command line of a living process with the needle in its environment."""
    try:
        marked = needle in procs.environ(pid)
    except OSError:
        return None
    return procs.command(pid) if marked and procs.lives(pid) else None


def _output_of(pid: int) -> str | None:
    try:
        return os.readlink(f"/proc/{pid}/fd/1")
    except OSError:
        return None


def json_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
