"""Functions that a user names by a Python file and a name in it. Loading one runs the file.

Whatever a user's code raises is its failure, `SystemExit`, `KeyboardInterrupt` and `GeneratorExit` too. Only
a signal ends the command: `noted_interrupts` tells a person's Ctrl-C from a `KeyboardInterrupt` of code.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from neoproto.errors import ConfigError
from neoproto.files import user_path, wrong_kind
from neoproto.neighbours import UserPackage
from neoproto.text import one_line, shown

T = TypeVar("T")


def load_function(
    path: str | Path,
    name: str,
    *,
    field: str,
    positional: tuple[str, ...] = (),
    keywords: tuple[str, ...] = (),
) -> Callable[..., Any]:
    """Import `name` from the Python file `path`, again on every call.

    Args:
        field: the section of the configuration, whose `path` and `name` these are, for messages.
        positional, keywords: the arguments that it will be called with, in order, and by name.

    Raises:
        ConfigError: the file is missing or cannot be imported (with the line and the original error), has no
            such name, or that is not callable with these arguments.
    """
    file = user_path(path, field=f"{field}.path").resolve()
    if problem := wrong_kind(file, "file"):
        raise ConfigError(f"{field}.path: {problem}")
    if not file.is_file():
        raise ConfigError(f"{field}.path: no such file: {file}")
    module = _imported(file, field)

    def looked_at() -> tuple[Any, inspect.Signature | None, str]:
        function: Any = getattr(module, name, module)
        signature = inspect.signature(function) if callable(function) else None
        return function, signature, f"{name}{' '.join(str(signature).split())}"

    # Looking at what a user wrote can run it (`__getattr__`, `__signature__`).
    function, signature, called = run_users(
        looked_at,
        lambda error: ConfigError(
            f"{field}.name: {name!r} in {file} does not say its arguments: {error_place(error, file)}; "
            "a function of Python's is needed"
        ),
    )
    if function is module:
        raise ConfigError(
            f"{field}.name: {file} has no {name!r}; its functions: {_functions_of(module) or 'none'}"
        )
    if signature is None:
        raise ConfigError(f"{field}.name: {name!r} in {file} is not callable, it is {shown(function)}")
    try:
        signature.bind(*positional, **dict.fromkeys(keywords))
    except TypeError as error:
        wanted = ", ".join((*positional, *keywords))
        raise ConfigError(
            f"{field}.name: {called} in {file} cannot be called as {name}({wanted}): {error}"
        ) from error
    return function  # type: ignore[no-any-return]


def error_place(error: BaseException, file: str | Path) -> str:
    """ "line 7: ZeroDivisionError: division by zero", the line being the innermost one in `file`."""
    text = named(error)
    if isinstance(error, SyntaxError) and error.filename == str(file):
        return f"line {error.lineno}: {type(error).__name__}: {error.msg}"
    lines = [
        frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(file)
    ]
    return f"line {lines[-1]}: {text}" if lines else text


def _functions_of(module: ModuleType) -> str:
    names: Mapping[str, Any] = vars(module)
    return ", ".join(
        key for key, value in names.items() if inspect.isfunction(value) and not key.startswith("_")
    )


def _imported(file: Path, field: str) -> ModuleType:
    module = run_users(
        UserPackage(file).load,
        lambda error: ConfigError(f"{field}.path: {file} cannot be imported: {error_place(error, file)}"),
    )
    if module is None:
        raise ConfigError(f"{field}.path: {file} is not a Python file (.py)")
    return module


def run_users(work: Callable[[], T], failure: Callable[[BaseException], Exception]) -> T:
    """The result of a user's code. A process that it forked does not come back.

    Raises:
        what `failure` makes of whatever it raised; what a signal raised stays as it is.
    """
    pid = os.getpid()
    try:
        result = work()
    except BaseException as error:
        end_fork(pid, error)
        if is_signal(error):
            raise
        raise failure(error) from error
    end_fork(pid, None)
    return result


def end_fork(pid: int, raised: BaseException | None) -> None:
    """End this process, at once, unless its number is `pid`: code of a user's forked it.

    What it would return to is the program of the other process. It ends with the code that `raised` means.
    """
    if os.getpid() == pid:
        return
    code = 0
    if isinstance(raised, SystemExit):
        code = raised.code if isinstance(raised.code, int) else int(raised.code is not None)
    elif raised is not None:
        traceback.print_exception(raised)
        code = 1
    with contextlib.suppress(Exception):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code & 0xFF)


def is_signal(error: BaseException) -> bool:
    """Whether a signal raised it: it ends the command, and is not the failure of the code that it hit."""
    return hasattr(error, "signal_name") or (isinstance(error, KeyboardInterrupt) and _interrupts.came())


def told_exit(error: BaseException) -> str:
    """ "SystemExit: 0 (FILE, line 7)": where it was raised, if that is known."""
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames else ""
    return f"{named(error)}{where}"


def named(error: BaseException) -> str:
    """ "ZeroDivisionError: division by zero"; the class alone if it has no text."""
    what = one_line(error)
    return f"{type(error).__name__}: {what}" if what != type(error).__name__ else what


@contextlib.contextmanager
def noted_interrupts() -> Iterator[None]:
    """Note each Ctrl-C within the block, on the main thread, so that `is_signal` knows the real ones.

    Handlers stay as they are: asyncio has one of its own, and sets it only in place of Python's.
    """
    with _interrupts.noted():
        yield


class _Interrupts:
    """Reads the numbers of signals that Python writes to the wakeup descriptor, before any handler runs."""

    def __init__(self) -> None:
        self._pipe: tuple[int, int] | None = None
        self._came = False

    @contextlib.contextmanager
    def noted(self) -> Iterator[None]:
        if self._pipe is not None or threading.current_thread() is not threading.main_thread():
            yield
            return
        self._pipe, self._came = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC), False
        before = signal.set_wakeup_fd(self._pipe[1], warn_on_full_buffer=False)
        try:
            yield
        finally:
            signal.set_wakeup_fd(before)
            pipe, self._pipe = self._pipe, None
            for end in pipe:
                os.close(end)

    def came(self) -> bool:
        """Whether there was a Ctrl-C; True where they are not noted, as a library cannot know."""
        if threading.current_thread() is not threading.main_thread():
            return False  # Python raises it in the main thread only
        if self._pipe is None:
            return True
        read_end, write_end = self._pipe
        if (found := signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)) != write_end:
            signal.set_wakeup_fd(found)  # another library's now, or taken away by one
            return True
        with contextlib.suppress(BlockingIOError):
            while numbers := os.read(read_end, 4096):
                self._came |= signal.SIGINT in numbers
        return self._came


_interrupts = _Interrupts()
