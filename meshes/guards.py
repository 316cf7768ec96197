"""The controller's ends of the connections to the guardians of hosts that are not the run's own.

    host: guardian ──connects, says the token and its node──> controller: HostGuards
    controller ──"dir PATH", "shm PREFIX", "kill PID"──> guardian      end ──> it sweeps, says what is left

A guardian's input is the connection itself. However the controller ends, the kernel ends the connection.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import sys
import time
from dataclasses import dataclass, field

from meshes import guardian
from meshes.guardian import MARK

CONNECT_S = 10.0
# A controller whose machine has gone without a word is noticed after 10 + 4 x 5 seconds.
_KEEPALIVE = ((socket.TCP_KEEPIDLE, 10), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 4))


@dataclass(frozen=True, kw_only=True, slots=True)
class GuardAddress:
    """Where guardians connect, and the word by which they are known."""

    host: str
    port: int
    token: str = field(repr=False)


def start_guardian(address: GuardAddress, run_id: str, name: str, folder: str) -> None:
    """On a host: start its guardian, which outlives this process.

    Args:
        name: what the controller calls it.
        folder: removed at the end; need not be there yet.

    Raises:
        OSError: the controller is not reached.
    """
    connection = socket.create_connection((address.host, address.port), timeout=CONNECT_S)
    with connection:
        connection.sendall(f"{address.token} {name}\n".encode())
        connection.settimeout(None)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in _KEEPALIVE:
            connection.setsockopt(socket.IPPROTO_TCP, option, value)
        # Not a Popen: nobody here waits for its end.
        os.posix_spawn(
            sys.executable,
            [sys.executable, "-I", "-S", guardian.__file__, run_id, folder],
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
        """Args:
        host: the address of this machine at which the hosts reach it.
        count: how many are expected.
        """
        self._listener = socket.create_server((host, 0), backlog=max(16, 2 * count))
        self._connections: dict[str, socket.socket] = {}
        self.address = GuardAddress(
            host=host, port=int(self._listener.getsockname()[1]), token=secrets.token_hex(16)
        )

    def accept(self, count: int) -> None:
        """Take the connections of `count` guardians, which say that they have connected.

        Raises:
            TimeoutError: one of them is not there.
        """
        until = time.monotonic() + CONNECT_S
        wanted = len(self._connections) + count
        while len(self._connections) < wanted:
            self._listener.settimeout(max(0.01, until - time.monotonic()))
            connection, _ = self._listener.accept()
            connection.settimeout(max(0.01, until - time.monotonic()))
            with contextlib.suppress(OSError):
                token, _, name = _read_line(connection).partition(" ")
                if secrets.compare_digest(token, self.address.token):
                    self._connections[name] = connection
                    continue
            connection.close()  # a stranger

    def tell(self, line: str, name: str | None = None) -> None:
        """Say something to one guardian, or to all; to one that is gone, nothing happens."""
        for other, connection in self._connections.items():
            if name in (None, other):
                with contextlib.suppress(OSError):
                    connection.sendall(f"{line}\n".encode())

    def sweep(self, timeout_s: float, *, again: bool) -> dict[str, str]:
        """Have them end what is left of the run on their hosts.

        Args:
            again: something may be on its way to start there: they look once more, some seconds later.

        Returns:
            host -> what is wrong, for those that could not, or did not say so in time.
        """
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
                left = _read_line(connection)
                connection.recv(1)  # its end
            except OSError as error:
                left = f"no answer ({error})"
            if left != "0":
                wrong[name] = f"{left or 'no'} processes left" if left.isdigit() else left or "no answer"
        return wrong

    def close(self) -> None:
        """Let go of the connections; guardians that were not told to sweep do so now."""
        self._listener.close()
        for connection in self._connections.values():
            connection.close()


def _read_line(connection: socket.socket) -> str:
    """One short line, or what there is of it when the other side is done."""
    got = b""
    while not got.endswith(b"\n") and len(got) < 512:
        piece = connection.recv(512)
        if not piece:
            break
        got += piece
    return got.decode(errors="replace").strip()
