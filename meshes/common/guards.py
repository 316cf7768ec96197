"""The controller's ends of its guardians (`meshes/common/guardian.py`): its own, and those of applied hosts.

    Guardian ──pipe: what to guard──> guardian on this machine   dies, or stays stopped ──> another is started
    host: guardian ──connects, sends the token and its node──> controller: HostGuards
    controller ──what to guard, "kill"──> guardian               end ──> it sweeps, reports what is left

A host's guardian has the connection itself for its input. However the controller ends, the kernel ends the
connection.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import select
import socket
import subprocess
import sys
import threading
import time
import weakref
from dataclasses import dataclass, field

from meshes.common import guardian
from meshes.common.deaths import DeathWatch
from meshes.common.guardian import MARK, Folder, check_shm_prefix, path_word, read_message, write_message

logger = logging.getLogger(__name__)

STOPPED_S = 3.0
"""A guardian that has been stopped for so long is replaced: it could not do its work."""
MOST_STARTS = 20
"""So many are started, one after another, before it is given up."""
LOOK_S = 1.0
"""How often it is looked whether the guardians of hosts are still connected."""
GO_S = 2.0
"""How long a guardian may take to end when it is asked to."""
CONNECT_S = 10.0
# A controller whose machine has gone without a word is noticed after 10 + 4 x 5 seconds.
_KEEPALIVE = ((socket.TCP_KEEPIDLE, 10), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 4))


def new_folder(path: str) -> Folder:
    """A folder of temporary files that is yet to be made.

    Raises:
        ValueError: the path is not an absolute one.
    """
    if not os.path.isabs(path):
        raise ValueError(f"a guarded folder has an absolute path, got {path!r}")
    return Folder(path=os.fsencode(path), owner=secrets.token_hex(16))


class Guardian:
    """The controller's own guardian. While this process lives there is one: if it dies, another is started.

    Args:
        run_id: whose processes are ended; no process has that of a guardian for files alone.
    """

    def __init__(self, run_id: str) -> None:
        self.run_id = run_id
        self.folders: list[Folder] = []
        self.shm_prefixes: list[str] = []
        self._owner = os.getpid()
        self._lock = threading.RLock()
        self._pipe = -1
        self._starts = 0
        self._dismissed = False
        self._deaths = DeathWatch(self._on_death, stopped_timeout_s=STOPPED_S)
        try:
            self._start()
        except BaseException:
            self._deaths.close()
            raise
        # A forked child would hold the pipe open beyond the controller's end.
        this = weakref.ref(self)
        os.register_at_fork(after_in_child=lambda: _let_go(this()))

    @property
    def pid(self) -> int:
        """Of the one that there is now."""
        return self._process.pid

    def make_folder(self, path: str) -> None:
        """Make a folder that is removed at the end, also if this process is killed while it makes it.

        Raises:
            OSError: it cannot be made, or is there already.
        """
        folder = new_folder(path)
        with self._lock:
            self.folders.append(folder)
            self._tell("dir", path_word(path), folder.owner)
        try:
            folder.make()
        except FileExistsError:  # of another run or program
            with self._lock:
                self.folders.remove(folder)
                self._tell("forget", path_word(path))
            raise
        with self._lock:
            self._tell("made", path_word(path))

    def guard_shm(self, prefix: str) -> None:
        """Have shared-memory files whose names begin so removed at the end.

        Raises:
            ValueError: the run's id is not in it.
        """
        check_shm_prefix(self.run_id, prefix)
        with self._lock:
            self.shm_prefixes.append(prefix)
            self._tell("shm", prefix)

    def dismiss(self) -> None:
        """Everything is closed: let it go, by force if it is stopped."""
        if os.getpid() != self._owner:
            return
        with self._lock:
            if self._dismissed:
                return
            self._dismissed = True
            self._tell("bye")
            self.let_go()
        self._deaths.close()
        try:
            self._process.wait(timeout=GO_S)
        except subprocess.TimeoutExpired:
            # Nothing is left for it to do, and a stopped one would stay behind.
            self._process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout=GO_S)

    def let_go(self) -> None:
        """Close this process's end of the pipe."""
        pipe, self._pipe = self._pipe, -1
        if pipe >= 0:
            os.close(pipe)

    def _start(self) -> None:
        read_end, pipe = os.pipe()
        try:
            process = subprocess.Popen(
                [sys.executable, "-I", "-S", guardian.__file__, self.run_id],
                stdin=read_end,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        except BaseException:
            os.close(pipe)
            raise
        finally:
            os.close(read_end)
        self.let_go()
        self._process, self._pipe = process, pipe
        self._starts += 1
        for folder in self.folders:
            self._tell("dir", path_word(folder.path), folder.owner)
            if folder.made:
                self._tell("made", path_word(folder.path))
        for prefix in self.shm_prefixes:
            self._tell("shm", prefix)
        self._deaths.watch("guardian", self._starts, process.pid)

    def _on_death(self, _: str, number: int, cause: str | None) -> None:
        """Start another as soon as its death is known; the cause may come later."""
        if cause is not None and not self._dismissed:
            logger.warning("guardian %d of run %s died: %s", number, self.run_id, cause)
        with self._lock:
            if self._dismissed or number != self._starts:
                return
            self._process.wait()
            if self._starts >= MOST_STARTS:
                logger.error("guardian %d died; if this process is killed now, its run stays behind", number)
                return
            try:
                self._start()
            except OSError as error:
                logger.error("no guardian starts (%s); if this process is killed now, its run stays", error)
                return
            logger.info("guardian %d of run %s is process %d", self._starts, self.run_id, self.pid)

    def _tell(self, *words: str) -> None:
        if self._pipe < 0:  # in a forked child, or after its dismissal
            return
        # One that is gone must not end the run it guards: the next one receives everything again.
        with contextlib.suppress(BrokenPipeError):
            os.write(self._pipe, write_message(*words))


def _let_go(guardian: Guardian | None) -> None:
    if guardian is not None:
        guardian.let_go()


@dataclass(frozen=True, kw_only=True, slots=True)
class GuardAddress:
    """Where guardians connect, and the word by which they are known."""

    host: str
    port: int
    token: str = field(repr=False)


def start_guardian(address: GuardAddress, run_id: str, name: str, folder: Folder) -> None:
    """On a host: start its guardian, which outlives this process.

    Args:
        name: what the controller calls it.
        folder: removed at the end; need not be there yet. Once it is, the controller sends "made".

    Raises:
        OSError: the controller is not reached.
    """
    connection = socket.create_connection((address.host, address.port), timeout=CONNECT_S)
    with connection:
        connection.sendall(write_message(address.token, name))
        connection.settimeout(None)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in _KEEPALIVE:
            connection.setsockopt(socket.IPPROTO_TCP, option, value)
        told = write_message("dir", path_word(folder.path), folder.owner)
        # Not a Popen: its end is not waited for here.
        os.posix_spawn(
            sys.executable,
            [sys.executable, "-I", "-S", guardian.__file__, run_id, told.decode()],
            {name: value for name, value in os.environ.items() if name != MARK},
            file_actions=[
                (os.POSIX_SPAWN_DUP2, connection.fileno(), 0),
                (os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0),
                (os.POSIX_SPAWN_OPEN, 2, os.devnull, os.O_WRONLY, 0),
            ],
            setsid=True,
        )


class HostGuards:
    """Listens for guardians, tells them what to guard, and has them sweep at the end."""

    def __init__(self, host: str, count: int) -> None:
        """Listen for the guardians of the hosts.

        Args:
            host: the address of this machine at which the hosts reach it.
            count: how many are expected.
        """
        self._listener = socket.create_server((host, 0), backlog=max(16, 2 * count))
        self._connections: dict[str, socket.socket] = {}
        self._gone: set[str] = set()
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="neoproto-host-guards", daemon=True)
        self._thread.start()
        self.address = GuardAddress(
            host=host, port=int(self._listener.getsockname()[1]), token=secrets.token_hex(16)
        )

    def accept(self, count: int) -> None:
        """Take the connections of `count` guardians, which announce themselves by it.

        Raises:
            TimeoutError: one of them is not there.
        """
        until = time.monotonic() + CONNECT_S
        wanted = len(self._connections) + count
        while len(self._connections) < wanted:
            self._listener.settimeout(max(0.01, until - time.monotonic()))
            connection, _ = self._listener.accept()
            connection.settimeout(max(0.01, until - time.monotonic()))
            with contextlib.suppress(OSError, ValueError):  # the latter of words that are no text
                match read_message(_read_line(connection)):
                    case [token, name] if secrets.compare_digest(token.encode(), self.address.token.encode()):
                        self._connections[name] = connection
                        continue
            connection.close()  # a stranger

    def _watch(self) -> None:
        """Report which guardian has ended during the run: its connection has ended."""
        while not self._ending.wait(LOOK_S):
            for name, connection in list(self._connections.items()):
                poll = select.poll()
                poll.register(connection, select.POLLRDHUP)
                if name not in self._gone and poll.poll(0) and not self._ending.is_set():
                    self._gone.add(name)
                    logger.warning(
                        "the guardian of host %s has gone; if this process is killed, its run stays there",
                        name,
                    )

    def _end_watch(self) -> None:
        self._ending.set()
        self._thread.join(timeout=2 * LOOK_S)

    def tell(self, *words: str | int, name: str | None = None) -> None:
        """Say something to one guardian, or to all; to one that is gone, nothing happens."""
        for other, connection in self._connections.items():
            if name in (None, other):
                with contextlib.suppress(OSError):
                    connection.sendall(write_message(*words))

    def sweep(self, timeout_s: float, *, again: bool) -> dict[str, str]:
        """Have them end what is left of the run on their hosts.

        Args:
            again: something may be on its way to start there: they look once more, some seconds later.

        Returns:
            host -> what is wrong, for those that could not, or did not answer in time.
        """
        self._end_watch()
        if not again:
            self.tell("last")
        for connection in self._connections.values():
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_WR)
        until = time.monotonic() + timeout_s
        wrong: dict[str, str] = {}
        for name, connection in self._connections.items():
            connection.settimeout(max(0.01, until - time.monotonic()))
            try:
                answer = read_message(_read_line(connection))
                connection.recv(1)  # its end
            except OSError as error:
                wrong[name] = f"no answer ({error})"
                continue
            match answer:
                case ["left", "0"]:
                    pass
                case ["left", count]:
                    wrong[name] = f"{count} processes left"
                case _:
                    wrong[name] = "no answer"
        return wrong

    def close(self) -> None:
        """Let go of the connections; guardians that were not asked to sweep do so now."""
        self._end_watch()
        self._listener.close()
        for connection in self._connections.values():
            connection.close()


def _read_line(connection: socket.socket) -> bytes:
    """One short line, or what there is of it when the other side is done."""
    got = b""
    while not got.endswith(b"\n") and len(got) < 512:
        piece = connection.recv(512)
        if not piece:
            break
        got += piece
    return got
