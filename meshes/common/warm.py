"""The warm parent of a host: imports once what the run's workers need, and forks them.

    stub ──request──> root: imports the modules that all its workers need ──fork──> worker
                       └──fork──> branch: imports more (vLLM) ──────────────fork──> worker
    stub <──"forked", pidfd── worker        stub <──"ended", wait status── root or branch

A stub (`meshes/common/warm_stub.py`) stands for each worker where its host starts one; the first one on a
host starts the root. No worker depends on a parent: what it refuses, or does not do, a fresh process does.

Only a process of one thread is forked, in which nothing has run but imports, and no accelerator is in use. A
worker has the environment it was asked for; if that differs in what an import may have read, it is refused.
"""

from __future__ import annotations

import array
import contextlib
import ctypes
import faulthandler
import fcntl
import gc
import importlib
import itertools
import json
import multiprocessing
import os
import select
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

from meshes.common import bootstrap
from meshes.common.stacks import STACKS_SIGNAL
from meshes.common.warm_stub import ENDED, FORKED, FRESH, PLAN_VARIABLE, STATUS

THREADS = "OMP_NUM_THREADS"
"""Read when torch is imported, but it can be set again."""
READ_LATER = frozenset(
    {
        THREADS,
        "CUDA_VISIBLE_DEVICES",
        "LOCAL_RANK",
        "RANK",
        "LOCAL_WORLD_SIZE",
        "WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
        "GLOO_SOCKET_IFNAME",
        "NCCL_SOCKET_IFNAME",
        "PYTHONUNBUFFERED",
        "BOOTSTRAP_LOG_CHANNEL",
        "_MONARCH_WORKER_ADDR",
    }
)
"""Variables that nothing has read by the time of a fork: a worker may have others than its parent."""
READ_LATER_PREFIXES = ("NEOPROTO_", "HYPERACTOR_", "MONARCH_")
"""Ours are read when a worker starts, and Monarch is not imported in a parent."""
SET_FIRST = frozenset({"HF_HUB_OFFLINE", "TOKENIZERS_PARALLELISM", "OMP_WAIT_POLICY", THREADS})
"""Variables that imports read, and no interpreter or loader before them: the root sets them by itself."""
OF_BRANCHES, OF_BRANCHES_PREFIXES = frozenset({"TORCHDYNAMO_DISABLE"}), ("VLLM_",)
"""What is read by nothing that a root imports, so that a branch may set it for what that imports."""
_CONNECTION_S = 1.0
_FILES = 6


@dataclass(frozen=True, kw_only=True, slots=True)
class BranchPlan:
    """Workers that need more than the others.

    Attributes:
        modules: all that they need, beginning with the root's.
        env: environment that they have beside the host's.
    """

    modules: tuple[str, ...]
    env: Mapping[str, str]


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """What a root is started with.

    Attributes:
        log_dir: folder of its log.
        entry: "module:function" that a forked worker runs.
        modules: what it imports, in order.
        env: environment that all workers have beside the host's, as far as it is in `SET_FIRST`.
        branches: those that are made at once; others are when they are asked for.
    """

    log_dir: str
    entry: str
    modules: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    branches: tuple[BranchPlan, ...] = ()

    def to_text(self) -> str:
        """As the value of a variable."""
        branches = [[list(one.modules), dict(one.env)] for one in self.branches]
        return json.dumps([self.log_dir, self.entry, list(self.modules), dict(self.env), branches])

    @classmethod
    def from_text(cls, text: str) -> Plan:
        """Of such a value."""
        log_dir, entry, modules, env, branches = json.loads(text)
        found = tuple(BranchPlan(modules=tuple(names), env=extra) for names, extra in branches)
        return cls(log_dir=log_dir, entry=entry, modules=tuple(modules), env=env, branches=found)


def make_plan(log_dir: str, entry: str, groups: Sequence[tuple[Sequence[str], Mapping[str, str]]]) -> Plan:
    """The plan for worker groups, each given as (modules, environment): the root has what all begin with."""
    columns = zip(*(names for names, _ in groups), strict=False)
    modules = tuple(column[0] for column in itertools.takewhile(lambda one: len(set(one)) == 1, columns))
    first = dict(groups[0][1])
    env = {
        name: value
        for name, value in first.items()
        if name in SET_FIRST and all(one.get(name) == value for _, one in groups)
    }
    branches: dict[tuple[str, ...], BranchPlan] = {}
    for names, one in groups:
        if tuple(names) != modules:
            branches.setdefault(tuple(names), BranchPlan(modules=tuple(names), env=dict(one)))
    return Plan(log_dir=log_dir, entry=entry, modules=modules, env=env, branches=tuple(branches.values()))


@dataclass(kw_only=True, slots=True)
class Request:
    """A worker that is asked for.

    Attributes:
        connection: to its stub.
        files: what describes it, standard input, output and error, the folder it works in, its lifeline.
        modules: what it needs.
        env: its environment.
    """

    connection: socket.socket
    files: list[int]
    modules: tuple[str, ...] = ()
    env: dict[bytes, bytes] = field(default_factory=dict)

    def read(self) -> None:
        """Read its own report."""
        size = os.fstat(self.files[0]).st_size
        modules, *environment = os.pread(self.files[0], size, 0).split(b"\0")
        self.modules = tuple(modules.decode().split(","))
        entries = (entry.partition(b"=") for entry in environment if entry)
        self.env = {name: value for name, _, value in entries}

    def is_wanted(self) -> bool:
        """Whether its stub is still there."""
        poll = select.poll()
        poll.register(self.connection, select.POLLRDHUP)
        return not poll.poll(0)

    def close_files(self) -> None:
        """Let go of the files alone."""
        for one in self.files:
            os.close(one)
        self.files.clear()

    def close(self) -> None:
        """Let go of it: it is gone, or another process has it."""
        self.connection.close()
        self.close_files()

    def refuse(self) -> None:
        """Have it started afresh."""
        with contextlib.suppress(OSError):
            self.connection.send(FRESH)
        self.close()


class WarmParent(ABC):
    """A process that forks workers.

    Consumes requests; waits for them, for the ends of its children and of its host; produces workers, and for
    their stubs the word of their ends; unblocked by the end of its host.
    """

    def __init__(self, entry: str, modules: Sequence[str], source: socket.socket, host: int) -> None:
        """Args:
        entry: "module:function" that a worker runs.
        modules: what it is to import; a branch has some of it already.
        source: where requests come from.
        host: pidfd of its host.
        """
        self._entry, self._modules, self._source, self._host = entry, tuple(modules), source, host
        self._base: dict[bytes, bytes] = {}
        self._made: dict[bytes, bytes | None] = {}
        self._workers: dict[int, socket.socket] = {}
        self._unsafe = "it has not imported anything yet"
        self._wake, self._wake_write = os.pipe()
        for number in (self._wake, self._wake_write):
            os.set_blocking(number, False)
        # A handler in Python, though it does nothing: without one the signal wakes no waiting thread.
        signal.signal(signal.SIGCHLD, lambda signum, frame: None)
        signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False)

    def warm_up(
        self, wanted: Mapping[bytes, bytes] | None = None, made: Mapping[bytes, bytes | None] | None = None
    ) -> None:
        """Import, in the environment that this process has now.

        Args:
            wanted: what it was made with; None is what it has now.
            made: what imports of its parent have changed of that.
        """
        before = dict(os.environb)
        self._base = before if wanted is None else dict(wanted)
        bootstrap.settle()
        for name in self._modules:
            try:
                importlib.import_module(name)
            except Exception:  # noqa: BLE001 - whatever a module does when it is imported
                # The worker that needs it fails by itself, where its reason is looked for.
                say(f"{name} cannot be imported\n{traceback.format_exc()}")
        after = dict(os.environb)
        self._made = {**(made or {})} | {
            name: after.get(name)
            for name in before.keys() | after.keys()
            if after.get(name) != before.get(name)
        }
        # What is here now is shared with the workers: their collector must not write to it.
        gc.collect()
        gc.freeze()
        self._unsafe = why_unsafe()
        say(f"not used: {self._unsafe}" if self._unsafe else f"ready: {' '.join(self._modules)}")

    def serve(self) -> None:
        """Answer requests until the host has ended, or requests have."""
        poll = select.poll()
        for number in (self._host, self._wake, self._source.fileno()):
            poll.register(number, select.POLLIN)
        while True:
            ready = {number for number, _ in poll.poll()}
            if self._host in ready:
                return
            if self._wake in ready:
                with contextlib.suppress(BlockingIOError):
                    os.read(self._wake, 4096)
                self._reap()
            if self._source.fileno() in ready:
                try:
                    request = self.receive()
                except EOFError:
                    return
                if request is not None:
                    self._answer(request)

    @abstractmethod
    def receive(self) -> Request | None:
        """The next request; None if it was not a whole one.

        Raises:
            EOFError: there are no more.
        """

    def pass_on(self, request: Request) -> bool:
        """Hand a request that needs other modules to the branch that has them; False if none has."""
        return False

    def release(self) -> None:
        """In a child: let go of all that is the parent's alone."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for number in (self._wake, self._wake_write):
            os.close(number)
        for one in (self._source, *self._workers.values()):
            one.close()

    def _answer(self, request: Request) -> None:
        request.read()
        if not request.is_wanted():
            request.close()
            return
        if request.modules != self._modules and self.pass_on(request):
            return
        pid = 0
        if not (reason := self._why_not(request)):
            try:
                pid = os.fork()
            except OSError as error:
                reason = str(error)
            else:
                if not pid:
                    self._become(request)
        if reason:
            say(f"a worker is started afresh: {reason}")
            request.refuse()
            return
        # From here on only the worker holds what keeps it alive.
        self._workers[pid] = request.connection
        request.close_files()

    def _why_not(self, request: Request) -> str:
        if self._unsafe:
            return self._unsafe
        if request.modules != self._modules:
            return f"it needs {' '.join(request.modules)}"
        if wrong := self._unfit(request.env):
            return f"of its own it has {', '.join(wrong)}"
        if (threads := len(os.listdir("/proc/self/task"))) > 1:
            return f"there are {threads} threads"
        return ""

    def _unfit(self, wanted: Mapping[bytes, bytes]) -> list[str]:
        """Names of variables for which a child would not be the same as a process of its own."""
        # What a module makes of another value than it has found here is not known.
        changed = [os.fsdecode(name) for name in self._made if wanted.get(name) != self._base.get(name)]
        return sorted({*changed, *unfit_variables(wanted, self._base)})

    def _become(self, request: Request) -> NoReturn:
        """In a child: be the worker. The stack below is the parent's, and is never returned to."""
        try:
            self.release()
            os.close(self._host)
            become_worker(request, self._base, self._made)
            module, _, function = self._entry.partition(":")
            getattr(importlib.import_module(module), function)()
        except BaseException:  # noqa: BLE001 - said, and the process ends
            traceback.print_exc()
        finally:
            os._exit(1)

    def _reap(self) -> None:
        """Collect children, and tell their stubs how they ended."""
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                pid, status = ended
                if connection := self._workers.pop(pid, None):
                    with contextlib.suppress(OSError):
                        connection.send(ENDED + STATUS.pack(status))
                    connection.close()


class Root(WarmParent):
    """The first process of a host's warm parent: has what all workers need, takes requests from stubs."""

    def __init__(self, entry: str, modules: Sequence[str], listener: socket.socket, host: int) -> None:
        super().__init__(entry, modules, listener, host)
        self._branches: dict[tuple[str, ...], socket.socket] = {}

    def receive(self) -> Request | None:
        try:
            connection, _ = self._source.accept()
        except OSError:
            return None
        connection.settimeout(_CONNECTION_S)
        with contextlib.suppress(OSError):
            if files := receive_files(connection, _FILES):
                return Request(connection=connection, files=files)
        connection.close()
        return None

    def pass_on(self, request: Request) -> bool:
        channel = self._branches.get(request.modules)
        if channel is None:
            channel = self._branch(request.modules, request.env, request)
        if channel is None:
            return False
        try:
            send_files(channel, [request.connection.fileno(), *request.files])
        except OSError:  # it has died, or does not read
            self._branches.pop(request.modules).close()
            return False
        request.close()
        return True

    def release(self) -> None:
        super().release()
        for channel in self._branches.values():
            channel.close()

    def make_branch(self, plan: BranchPlan) -> None:
        """Make a branch before it is asked for."""
        env = {os.fsencode(name): os.fsencode(value) for name, value in plan.env.items()}
        self._branch(plan.modules, self._base | env)

    def _branch(
        self, modules: tuple[str, ...], env: Mapping[bytes, bytes], request: Request | None = None
    ) -> socket.socket | None:
        """Fork a branch; None where it would not be the same as a process of its own, or cannot be made.

        Args:
            request: what it is made for, if that is here already.
        """
        unfit = [
            name
            for name in self._unfit(env)
            if name not in OF_BRANCHES and not name.startswith(OF_BRANCHES_PREFIXES)
        ]
        if self._unsafe or unfit or modules[: len(self._modules)] != self._modules:
            return None
        try:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with theirs:
                if not os.fork():
                    self._become_branch(modules, env, ours, theirs, request)
        except OSError as error:
            say(f"no branch: {error}")
            return None
        ours.setblocking(False)
        self._branches[modules] = ours
        return ours

    def _become_branch(
        self,
        modules: tuple[str, ...],
        env: Mapping[bytes, bytes],
        ours: socket.socket,
        theirs: socket.socket,
        request: Request | None,
    ) -> NoReturn:
        """In a child: be a branch, as long as there is a root."""
        try:
            self.release()
            ours.close()
            if request is not None:  # it comes by the socket, as all do
                request.close()
            apply_environment(env, self._base, self._made)
            branch = Branch(self._entry, modules, theirs, self._host)
            branch.warm_up(env, self._made)
            branch.serve()
        except BaseException:  # noqa: BLE001 - said, and the process ends
            traceback.print_exc()
        finally:
            os._exit(0)


class Branch(WarmParent):
    """A child of the root that has imported more; takes requests from the root."""

    def receive(self) -> Request | None:
        files = receive_files(self._source, _FILES + 1)
        if not files:
            raise EOFError
        return Request(connection=socket.socket(fileno=files[0]), files=files[1:])


def why_unsafe() -> str:
    """Why this process must not be forked; "" if it may be."""
    # Pools of numpy's and scipy's threads end before a fork, by themselves, and begin again when needed.
    if not (child := os.fork()):
        os._exit(0)
    os.waitpid(child, 0)
    threads = len(os.listdir("/proc/self/task"))
    if threads > 1 or threading.active_count() > 1:
        return f"it has {threads} threads ({', '.join(one.name for one in threading.enumerate())})"
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return "it uses an accelerator"
    return ""


def unfit_variables(wanted: Mapping[bytes, bytes], had: Mapping[bytes, bytes]) -> list[str]:
    """Names of variables that differ, and may have been read by what was imported."""
    names = sorted(
        os.fsdecode(name) for name in wanted.keys() | had.keys() if wanted.get(name) != had.get(name)
    )
    threads = os.fsencode(THREADS)
    counted = all(one.get(threads, b"").isdigit() for one in (wanted, had))
    later = READ_LATER if counted else READ_LATER - {THREADS}
    return [name for name in names if name not in later and not name.startswith(READ_LATER_PREFIXES)]


def become_worker(request: Request, base: Mapping[bytes, bytes], made: Mapping[bytes, bytes | None]) -> None:
    """In a child: take over what the stub has handed, and live no longer than it."""
    description, *streams, folder, lifeline = request.files
    # A group of its own, as a process has that the host starts.
    os.setpgid(0, 0)
    # The kernel itself kills this process once the other end is closed: nothing here has to run for that.
    fcntl.fcntl(lifeline, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(lifeline, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(lifeline, fcntl.F_SETFL, os.O_RDONLY | os.O_NONBLOCK | os.O_ASYNC)
    poll = select.poll()
    poll.register(lifeline, 0)
    if poll.poll(0):  # it was closed before that
        os._exit(1)
    pidfd = os.pidfd_open(os.getpid())
    send_files(request.connection, [pidfd], FORKED)
    os.close(pidfd)
    request.connection.close()
    os.fchdir(folder)
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
    for one in (description, folder, *streams):
        os.close(one)
    apply_environment(request.env, base, made)
    tempfile.tempdir = None
    # Python's own `random` is seeded again by itself.
    if (random := sys.modules.get("numpy.random")) is not None:
        random.seed()
    if (processes := sys.modules.get("multiprocessing.process")) is not None:
        processes.current_process().authkey = os.urandom(32)
    del sys.argv[1:]


def apply_environment(
    wanted: Mapping[bytes, bytes], base: Mapping[bytes, bytes], made: Mapping[bytes, bytes | None]
) -> None:
    """In a child: have the wanted environment, and what imports have made of theirs.

    Args:
        base: what the imports found.
        made: what they changed; None is a variable that they removed.
    """
    result: dict[bytes, bytes | None] = {**wanted, **made}
    for name in os.environb.keys() | result.keys():
        value = result.get(name)
        if value is None:
            os.environb.pop(name, None)
        elif os.environb.get(name) != value:
            os.environb[name] = value
    threads = os.fsencode(THREADS)
    if wanted.get(threads) != base.get(threads):
        set_threads(int(wanted[threads]))


def set_threads(count: int) -> None:
    """What `OMP_NUM_THREADS` means to libraries that have been loaded."""
    torch = sys.modules.get("torch")
    # MKL sets torch's threads, too: its own variable comes first, and it takes no more than the cores.
    if torch is not None and "MKL_NUM_THREADS" not in os.environ:
        # Other threads of this process take it over when they first compute.
        torch.set_num_threads(min(count, len(os.sched_getaffinity(0))))
    with open("/proc/self/maps", "rb") as file:
        paths = {line.split(maxsplit=5)[5].strip() for line in file if b"openblas" in line}
    for path in paths:
        library: Any = ctypes.CDLL(os.fsdecode(path))
        for symbol in ("scipy_openblas_set_num_threads64_", "scipy_openblas_set_num_threads"):
            if hasattr(library, symbol):
                getattr(library, symbol)(count)


def send_files(to: socket.socket, files: Sequence[int], message: bytes = b"r") -> None:
    """Send file descriptors."""
    rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", files))
    to.sendmsg([message], [rights])


def receive_files(source: socket.socket, count: int) -> list[int]:
    """File descriptors that were sent together; none if the other side has ended, or has sent others."""
    size = array.array("i").itemsize
    _, ancillary, _, _ = source.recvmsg(1, socket.CMSG_SPACE(count * size), socket.MSG_CMSG_CLOEXEC)
    files = array.array("i")
    for level, kind, data in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            files.frombytes(data[: len(data) - len(data) % size])
    if len(files) == count:
        return list(files)
    for one in files:
        os.close(one)
    return []


def main() -> None:
    """Arguments: the listener's file descriptor, the host's process. The plan is in the environment."""
    listener = socket.socket(fileno=int(sys.argv[1]))
    listener.set_inheritable(False)
    host, plan = int(sys.argv[2]), Plan.from_text(os.environ.pop(PLAN_VARIABLE))
    gone = os.pidfd_open(host)
    log = f"warm-{socket.gethostname()}-{host}.log"
    bootstrap.open_log(os.path.join(plan.log_dir, log))
    faulthandler.register(STACKS_SIGNAL, file=sys.stderr, all_threads=True)
    os.environ.update(plan.env)
    # As Monarch's bootstrap does in a fresh worker, before that imports anything.
    multiprocessing.set_start_method("forkserver", force=True)
    root = Root(plan.entry, plan.modules, listener, gone)
    root.warm_up()
    for branch in plan.branches:
        root.make_branch(branch)
    root.serve()


def say(text: str) -> None:
    """A line of the parent's log. Not by `logging`, whose handlers the workers would inherit."""
    print(f"{time.strftime('%H:%M:%S')} {os.getpid()} {text}", file=sys.stderr)


if __name__ == "__main__":
    main()
