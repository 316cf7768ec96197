"""The few places where Monarch is touched with care: its client, terminal output, futures, the program's end.

Import this before anything of Monarch's: what it registers for the end of the program has to come first.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import functools
import logging
import os
import pwd
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, wait
from pathlib import Path
from typing import Any, TypeVar

from meshes.common import procs
from meshes.common.guards import Guardian
from meshes.common.machine import can_be_written, unmade_folder
from neoproto.errors import ConfigError, RuntimeClosed
from neoproto.files import named_errors
from neoproto.private_api import monarch as private
from neoproto.private_api.monarch import ensure_context
from neoproto.runtime.logfile import LogFileHandler
from neoproto.runtime.signals import held_signals

T = TypeVar("T")

logger = logging.getLogger(__name__)


def monarch_log(root: Path = Path("/tmp")) -> Path:
    """Where Monarch writes its own log, whatever TMPDIR is: by the user's name, if the user id has one."""
    try:
        user = pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        user = "unknown"
    return root / user / "monarch_log.log"


_LOG_IS_PRINTED = not can_be_written(monarch_log())
"""Monarch's own log, hundreds of lines: its file is another user's. Users without a name share one."""
if _LOG_IS_PRINTED:
    os.environ.setdefault("MONARCH_FILE_LOG", "error")

CLOSED = "the runtime has been closed"
MONARCH_THREADS = b"monarch-pytokio"
EXIT_WAIT_S = 20.0
"""How long the end of the program may be held up by Monarch; a second or less unless the machine is busy."""
HELPER_WAIT_S = 5.0


def _wait_for_monarch_threads() -> None:
    """Let Monarch's threads end before the interpreter does.

    Monarch gives them a second. On a busy machine one may be left that then asks for the interpreter's lock,
    and Python ends such a thread in a way that aborts the program ("exception not rethrown") or hangs it.
    """
    begin = time.monotonic()
    while time.monotonic() < begin + EXIT_WAIT_S:
        with contextlib.suppress(OSError):
            helpers = helpers_left() and time.monotonic() < begin + HELPER_WAIT_S
            if not helpers and not any(name.startswith(MONARCH_THREADS) for name in procs.thread_names()):
                return
        time.sleep(0.01)


if "monarch" not in sys.modules:
    # What is registered first runs last: after Monarch's own shutdown, which importing Monarch registers.
    atexit.register(_wait_for_monarch_threads)

_client_started = False
_lock = threading.Lock()


def start_client(log_path: Path, first: Callable[[], None] = lambda: None) -> None:
    """Bootstrap this process's root client, once; what it prints goes to `log_path`.

    It lives as long as the process, beyond the runs. Its sockets lie in a folder of ours, which a guardian of
    its own removes after a SIGKILL.

    Args:
        first: done every time, before a client is made: sets how it is reached, and raises if there is one
            that is reached otherwise.
    """
    global _client_started
    with _lock:
        if _client_started:
            first()
            return
        if private.client_exists():
            first()
            private.pin_context(client=True)
            _client_started = True
            return
        client_dir = _make_client_dir()
        with held_signals():
            with quiet_terminal(log_path), _environment("TMPDIR", client_dir):
                first()
                with _panics_said():
                    private.pin_context(client=True)
            _client_started = True
            atexit.register(_shut_down_client)  # after Monarch registered its own, so it runs before


@contextlib.contextmanager
def _panics_said() -> Iterator[None]:
    """A client that has no address to listen at ends in a panic, which no `except Exception` catches."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise ConfigError(
            f"Monarch's client cannot start: {error}; NEOPROTO_CLIENT=tcp://ADDRESS:0 in the environment "
            "names an address of this machine"
        ) from error


def _shut_down_client() -> None:
    """What Monarch does at exit, with more patience: a busy machine can take longer than its second.

    Its own call then has nothing left to do; where that gives up, it prints a traceback, and the interpreter
    may hang on the threads it leaves.
    """
    from monarch.actor import shutdown_context

    quiet = quiet_terminal(Path(os.devnull)) if _LOG_IS_PRINTED else contextlib.nullcontext()
    with contextlib.suppress(TimeoutError), quiet:
        shutdown_context(host_timeout=0.3).get(timeout=EXIT_WAIT_S)


def run_blocking(body: Callable[[], T], unless: Future[None] | None = None) -> T:
    """Run something that waits for Monarch futures, where it neither holds up nor warns anybody.

    Monarch warns when a future is waited for on a running loop, and the lazy ones could not run at all. On
    the main thread its waits keep Python from handling a signal until they end. In both cases, and where the
    wait may be given up, a helper thread waits in the caller's stead.

    Args:
        unless: done once the runtime closes; then the wait ends, and the helper is left to itself.

    Raises:
        RuntimeClosed: `unless` was done first.
    """
    ensure_context()
    if unless is not None and unless.done():
        raise RuntimeClosed(CLOSED)
    main = threading.current_thread() is threading.main_thread()
    if not main and unless is None and asyncio._get_running_loop() is None:
        return body()
    outcome: Future[T] = Future()

    def run() -> None:
        ensure_context()
        try:
            outcome.set_result(body())
        except BaseException as error:  # noqa: BLE001 - handed to the waiting thread
            outcome.set_exception(error)

    thread = threading.Thread(target=run, name="neoproto-blocking", daemon=True)
    _helpers.add(thread)
    thread.start()
    awaited: list[Future[Any]] = [outcome] if unless is None else [outcome, unless]
    wait(awaited, return_when=FIRST_COMPLETED)
    if outcome.done():
        thread.join()
    else:
        raise RuntimeClosed(CLOSED)
    return outcome.result()


_helpers: weakref.WeakSet[threading.Thread] = weakref.WeakSet()


def helpers_left() -> bool:
    """Whether a helper thread still waits for Monarch after the wait for it was given up."""
    return any(thread.is_alive() for thread in _helpers)


@contextlib.contextmanager
def quiet_terminal(log_path: Path) -> Iterator[None]:
    """Send file descriptors 1 and 2 to a file within the block: native code prints there without asking.

    Raises:
        OSError: at the end of the block: the file cannot be written.
    """
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()
    # In memory first: where a write fails (a full disk), Monarch ends the program without a word.
    target = os.memfd_create("terminal")
    saved = [os.dup(1), os.dup(2)]
    try:
        os.dup2(target, 1)
        os.dup2(target, 2)
        yield
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError, AttributeError):
                stream.flush()
        for number, copy in zip((1, 2), saved, strict=True):
            os.dup2(copy, number)
            os.close(copy)
        with named_errors(log_path), os.fdopen(target, "rb") as said, log_path.open("ab") as log:
            said.seek(0)
            log.write(said.read())


def stop_procs(procs: Any, timeout_s: float) -> bool:
    """Stop the processes of a ProcMesh; False if they did not stop in time. Call it in `run_blocking`."""
    try:
        procs.stop().get(timeout=timeout_s)
    except Exception:
        logger.info("processes did not stop when asked", exc_info=True)
        return False
    return True


class LogFile:
    """Sends lines of Monarch's Python loggers and ours to a file, not the terminal, until closed."""

    def __init__(self, path: Path) -> None:
        import monarch.job  # noqa: F401 - its logger gets a terminal handler of its own when it is imported

        self._handler = LogFileHandler(path)
        self._handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s %(message)s"))
        self._before: list[tuple[logging.Logger, list[logging.Handler], bool]] = []
        for name in ("monarch", private.JOB_LOGGER, "meshes", "neoproto.runtime"):
            one = logging.getLogger(name)
            self._before.append((one, list(one.handlers), one.propagate))
            one.handlers = [self._handler]
            one.propagate = False

    def close(self) -> None:
        """Undo it."""
        for one, handlers, propagate in self._before:
            one.handlers, one.propagate = handlers, propagate
        self._handler.close()


@contextlib.contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


@functools.cache  # a start that was refused may be tried again
def _make_client_dir() -> str:
    owner = os.getpid()
    path = unmade_folder(f"np-client-{owner}-")
    guardian = Guardian(f"client-{owner}")

    def remove() -> None:
        if os.getpid() == owner:  # not a child that was forked
            for folder in guardian.folders:
                folder.remove()
            guardian.dismiss()

    atexit.register(remove)  # before Monarch registers its own shutdown, so this runs after it
    guardian.make_folder(path)
    return path
