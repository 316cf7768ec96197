"""Functions that a user names by a Python file and a name in it. Loading one runs the file."""

from __future__ import annotations

import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from neoproto.data.paths import user_path, wrong_kind
from neoproto.errors import ConfigError
from neoproto.wording import one_line, shown


def load_function(
    path: str | Path,
    name: str,
    *,
    field: str,
    positional: tuple[str, ...] = (),
    keywords: tuple[str, ...] = (),
) -> Callable[..., Any]:
    """Import `name` from the Python file `path`, anew on every call.

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
    try:
        function: Any = getattr(module, name, module)
        signature = inspect.signature(function) if callable(function) else None
        called = f"{name}{' '.join(str(signature).split())}"
    except Exception as error:  # looking at what a user wrote can run it (`__getattr__`, `__signature__`)
        raise ConfigError(
            f"{field}.name: {name!r} in {file} does not say its arguments: {error_place(error, file)}; "
            "a function of Python's is needed"
        ) from error
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
    what = one_line(error)
    text = f"{type(error).__name__}: {what}" if what != type(error).__name__ else what
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
    module_name = f"neoproto_user_{file.stem}_{abs(hash(str(file))):x}"
    spec = importlib.util.spec_from_file_location(module_name, file)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{field}.path: {file} is not a Python file (.py)")
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException as error:
        sys.modules.pop(module_name, None)
        if isinstance(error, KeyboardInterrupt) or hasattr(error, "signal_name"):
            raise  # a signal came while the file was running: the command ends as signals end it
        raise ConfigError(f"{field}.path: {file} cannot be imported: {error_place(error, file)}") from error
    return module
