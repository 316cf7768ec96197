"""What a host starts in place of a worker that is forked from the warm parent (`meshes/common/warm.py`).

    host ──starts──> stub ──environment, folder, standard streams──> warm parent ──fork──> worker
                      │ <────pidfd of the worker, later its exit status────────┘             │
                      └──lifeline (a pipe without a writer)──────────────────────────────────┘

To its host the stub is the worker: signals are passed on, it ends as the worker ends, and the kernel kills
the worker when the stub ends. Where there is no warm parent, or none that can be used, the stub becomes the
worker itself by `exec`.

Run as a script with nothing but the standard library, so that it starts in milliseconds and weighs little.
"""

from __future__ import annotations

import array
import contextlib
import ctypes
import fcntl
import os
import resource
import select
import signal
import socket
import struct
import sys
import time
from collections.abc import Sequence
from typing import NoReturn

PLAN_VARIABLE = "NEOPROTO_WARM_PLAN"
"""What a parent is started with, as text. Not an argument: it may hold what other users must not read."""
WAIT_S = 18.0
"""How long the warm parent is waited for, imports included.

Monarch 0.7 never notices a process that answers its host more than 30 s after it was asked for, whatever its
settings are: a fresh one still has time to start in."""
STATUS_S = 5.0
"""How long the exit status of a worker that has ended is waited for."""
FRESH, FORKED, ENDED = b"f", b"w", b"e"
"""What is answered: start it afresh; it is forked, here is its pidfd; it has ended, with this wait status."""
STATUS = struct.Struct("=i")
PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)

_worker: list[int] = []
"""The worker's pidfd, once it is forked."""
_PR_SET_PDEATHSIG = 1
# include/uapi/linux/pidfd.h: the exit status of a reaped process, since Linux 6.15.
_PIDFD_GET_INFO = 0xC040FF0B
_PIDFD_INFO_EXIT = 1 << 3
_INFO = struct.Struct("=QQ11Ii")


def main() -> None:
    """Its arguments are those of `stub_arguments`."""
    modules, wait_s, count, *rest = sys.argv[1:]
    own, command = rest[: int(count)], rest[int(count) :]
    plan = os.environ.pop(PLAN_VARIABLE)
    host = os.getppid()
    # One that has been adopted has lost its host; a parent would live as long as what has adopted it.
    adopted = os.getsid(host) != os.getsid(0)
    parent = None if adopted else connect(host, own, plan, float(wait_s))
    if parent is not None and modules:
        end_with_host(signal.SIGKILL, host)
        pass_signals_on()
        lifeline, write_end = os.pipe()
        if ask(parent, modules, lifeline):
            os.close(lifeline)
            worker = wait_for_fork(parent)
            if worker is not None:
                leave(wait_for_end(parent, worker))
        os.close(write_end)  # a worker that is forked too late ends by it
        end_with_host(0, host)
    os.execv(sys.executable, [sys.executable, *command])


def connect(host: int, own: Sequence[str], plan: str, wait_s: float) -> socket.socket | None:
    """A connection to the host's warm parent, which is started if there has been none; None if it is gone."""
    folder = os.environ.get("TMPDIR", "")
    path = f"{folder}/warm-{host}.sock"
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.settimeout(wait_s)
    for _ in range(2):
        try:
            connection.connect(path)
            return connection
        except FileNotFoundError:
            if not folder or not start_parent(host, path, own, plan):
                break
        except OSError:
            break
    connection.close()
    return None


def start_parent(host: int, path: str, own: Sequence[str], plan: str) -> bool:
    """Start the parent, unless another stub does; False if it cannot be."""
    unnamed = f"{path}.{os.getpid()}"
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            listener.bind(unnamed)
            try:
                listener.listen(256)
                # The process that makes the name starts the parent; one that finds it can connect at once.
                os.link(unnamed, path)
            except FileExistsError:
                return True
            finally:
                os.unlink(unnamed)
            middle = os.fork()
            if not middle:
                _become_parent(host, listener, own, plan)
            # The parent is no child of this process: this process may become the worker, which knows of none.
            os.waitpid(middle, 0)
    except OSError:
        return False
    return True


def _become_parent(host: int, listener: socket.socket, own: Sequence[str], plan: str) -> NoReturn:
    try:
        if os.fork():
            os._exit(0)
        os.setpgid(0, 0)
        null = os.open(os.devnull, os.O_RDWR)
        for number in (0, 1, 2):
            os.dup2(null, number)
        environment = {name: value for name, value in os.environ.items() if name not in own}
        environment[PLAN_VARIABLE] = plan
        os.set_inheritable(listener.fileno(), True)
        module = ["-P", "-m", "neoproto", "meshes.common.warm"]
        arguments = [*module, str(listener.fileno()), str(host)]
        os.execve(sys.executable, [sys.executable, *arguments], environment)
    finally:
        os._exit(127)


def ask(parent: socket.socket, modules: str, lifeline: int) -> bool:
    """Ask for the worker. In a file, so that nothing waits for the parent, which may be importing."""
    request = os.memfd_create("request")
    folder = os.open(".", os.O_PATH | os.O_DIRECTORY)  # it need not be readable
    environment = b"\0".join(name + b"=" + value for name, value in os.environb.items())
    with open(request, "wb", closefd=False) as file:
        file.write(modules.encode() + b"\0" + environment)
    handed = array.array("i", [request, 0, 1, 2, folder, lifeline])
    try:
        parent.sendmsg([b"r"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, handed)])
    except OSError:
        return False
    finally:
        os.close(request)
        os.close(folder)
    return True


def pass_signals_on() -> None:
    """From now on signals go to the worker; before there is one they end this process."""

    def pass_on(signum: int, _: object) -> None:
        if not _worker:
            leave(signum)
        with contextlib.suppress(OSError):
            signal.pidfd_send_signal(_worker[0], signum)

    for signum in PASSED_ON:
        if signal.getsignal(signum) is not signal.SIG_IGN:  # its worker ignores it too
            signal.signal(signum, pass_on)


def wait_for_fork(parent: socket.socket) -> int | None:
    """The worker's pidfd; None if there will be none."""
    try:
        answer, files, _, _ = parent.recvmsg(1, socket.CMSG_SPACE(4), socket.MSG_CMSG_CLOEXEC)
    except OSError:
        return None
    # The worker itself reports it, and holds the connection until then: its end means that there is none.
    if answer == FORKED and files:
        _worker.append(int.from_bytes(files[0][2][:4], sys.byteorder))
    return _worker[0] if _worker else None


def wait_for_end(parent: socket.socket, worker: int) -> int | None:
    """The wait status of the worker; None if nothing reports how it ended."""
    poll = select.poll()
    poll.register(parent, select.POLLIN)
    poll.register(worker, select.POLLIN)
    parent.setblocking(False)
    give_up, told = float("inf"), b""
    while True:
        left = give_up - time.monotonic()
        if left <= 0:
            return exit_status(worker)
        for number, _ in poll.poll(None if left == float("inf") else 1000 * left):
            if number == worker:
                poll.unregister(worker)
                give_up = time.monotonic() + STATUS_S
                continue
            piece = b""
            with contextlib.suppress(OSError):
                piece = parent.recv(64)
            told += piece
            if told.startswith(ENDED) and len(told) > STATUS.size:
                return int(STATUS.unpack(told[1 : 1 + STATUS.size])[0])
            if not piece:  # the parent is gone; the worker, which is not, has to be waited for without it
                poll.unregister(parent)
                parent.close()
                if give_up < float("inf"):
                    return exit_status(worker)
                return wait_without_parent(worker)


def wait_without_parent(worker: int) -> int | None:
    """The same, where only the kernel can tell."""
    poll = select.poll()
    poll.register(worker, select.POLLIN)
    poll.poll()
    time.sleep(0.05)  # until it has been reaped, by init
    return exit_status(worker)


def exit_status(worker: int) -> int | None:
    """The wait status of a process that another one has reaped, where the kernel tells."""
    info = bytearray(_INFO.pack(_PIDFD_INFO_EXIT, 0, *[0] * 11, 0))
    try:
        fcntl.ioctl(worker, _PIDFD_GET_INFO, info)
    except OSError:
        return None
    mask, *_, status = _INFO.unpack(info)
    return int(status) if mask & _PIDFD_INFO_EXIT else None


def end_with_host(signum: int, host: int) -> None:
    """Have the kernel end this process when its host ends, whatever both do."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signum, 0, 0, 0)
    if signum and os.getppid() != host:
        os._exit(1)


def leave(status: int | None) -> NoReturn:
    """End as the worker has ended: that is what the host is to see."""
    code = 1 if status is None else os.waitstatus_to_exitcode(status)
    if code >= 0:
        os._exit(code)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(OSError):  # SIGKILL has no action to reset
        signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)
    os._exit(1)


def stub_arguments(
    own: Sequence[str],
    modules: Sequence[str],
    command: Sequence[str],
    wait_s: float = WAIT_S,
) -> list[str]:
    """What the interpreter is started with to run the stub.

    Args:
        own: variables of the worker's environment that the parent must not be started with.
        modules: what the worker needs of the parent; without any the parent is started, and the worker too.
        command: what the worker's own interpreter is started with.
        wait_s: how long the parent is waited for.
    """
    counted = [str(len(own)), *own]
    return ["-I", "-S", os.path.abspath(__file__), ",".join(modules), str(wait_s), *counted, *command]


if __name__ == "__main__":
    main()
