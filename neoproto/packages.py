"""Finds `actors`, `configs` and `meshes` beside `neoproto`, whatever else on the path has such a name.

    sys.meta_path:   _Ours  ─>  Python's own finders  ─>  _NotOurs (says whose package was asked for)

Every process of ours imports `neoproto` first, and with it this: commands as `python -m neoproto.…`, workers
and judges as `python -m neoproto MODULE`. A module of the user's that has one of these names is not found
then, except within `users_first`, which a judge's process uses around the user's code.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

NAMES = ("actors", "configs", "meshes")
VLLM_SERVER = "actors.rollout.vllm_server"
ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))

_hidden: set[str] = set()
"""Our packages that are not found at present."""
_theirs: dict[str, ModuleType] = {}
"""The user's modules of these names, while ours are found."""
_users_win = False


class _Ours:
    """First of all finders."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: Any = None) -> ModuleSpec | None:
        found = name in NAMES and name not in _hidden
        return PathFinder.find_spec(name, [ROOT]) if found else None


class _NotOurs:
    """Last of all finders: no other has the module."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: Any = None) -> ModuleSpec | None:
        top, dot, _ = name.partition(".")
        if dot and top in NAMES and top not in _hidden and (place := elsewhere(top)) is not None:
            # Not by the module's own name: `from actors import x` would pass over that.
            raise ModuleNotFoundError(f"no module named {name!r}: {clash(top, place)}", name=top)
        return None


def install() -> None:
    """Put the finders in place. A package of the user's that is imported already stays with who imported it.

    Raises:
        ImportError: one is being imported, so it cannot be put aside.
    """
    sys.meta_path.insert(0, _Ours)
    sys.meta_path.append(_NotOurs)
    for name in NAMES:
        module = sys.modules.get(name)
        if module is None or is_ours(_place(module.__spec__, name)):
            continue
        if getattr(module.__spec__, "_initializing", False):
            raise ImportError(
                f"neoproto cannot be imported here: {clash(name, _place(module.__spec__, name))}"
            )
        _take((name,))


def missing_from(package: str) -> Callable[[str], Any]:
    """The `__getattr__` of one of our packages."""

    def missing(name: str) -> Any:
        place = elsewhere(package)
        hint = "" if place is None or name.startswith("__") else f": {clash(package, place)}"
        raise AttributeError(f"module {package!r} has no attribute {name!r}{hint}")

    return missing


def clash(name: str, place: str) -> str:
    """Whose package a name means, and whose it does not."""
    return f"{name!r} is NeoProto's package {os.path.join(ROOT, name)} here, not {place}; rename the latter"


def elsewhere(name: str, within: Sequence[str] | None = None) -> str | None:
    """Where a package or module of this name lies that is not ours: on `sys.path`, or in these folders."""
    folders: list[str] = []
    for entry in sys.path if within is None else within:
        spec = PathFinder.find_spec(name, [entry])
        if spec is None:
            continue
        place = _place(spec, name)
        if is_ours(place):
            continue
        if spec.origin is not None:
            return place
        # A folder without __init__.py is a package too, but one of data is called configs often enough.
        folder = Path(entry or os.curdir, name).absolute()
        if next(folder.glob("*.py"), None) or next(folder.glob("*/*.py"), None):
            folders.append(str(folder))
    return folders[0] if folders else None


@contextlib.contextmanager
def users_first() -> Iterator[None]:
    """Within the block, what is imported by one of these names is the user's package, if there is one.

    The modules of both stay as they are; only `sys.modules` changes, for all threads of this process.
    """
    global _users_win
    names = [name for name in NAMES if name not in _hidden and elsewhere(name) is not None]
    before, _users_win = _users_win, True
    ours = _take(names)
    sys.modules.update({name: module for name, module in _theirs.items() if name.partition(".")[0] in names})
    _hidden.update(names)
    try:
        yield
    finally:
        _theirs.update(_take(names))
        sys.modules.update(ours)
        _hidden.difference_update(names)
        _users_win = before


def users_win() -> bool:
    """Whether this is within `users_first`."""
    return _users_win


def blank(module: str, name: str) -> Any:
    """A new object of a class of ours, for pickles that a program reads which does not import `neoproto`."""
    made = getattr(import_module(module), name)
    return made.__new__(made)


def vllm_plugin() -> None:
    """The entry point `vllm.general_plugins`, here as a stock server does not import `neoproto` before."""
    import_module(VLLM_SERVER).register()


def _take(names: Sequence[str]) -> dict[str, ModuleType]:
    """Remove packages and what is in them from `sys.modules`."""
    found = [name for name in sys.modules if name.partition(".")[0] in names]
    return {name: sys.modules.pop(name) for name in found}


def _place(spec: ModuleSpec | None, name: str) -> str:
    """A package's folder, a module's file."""
    origin = "" if spec is None else spec.origin or ""
    if not origin and spec is not None:
        return next(iter(spec.submodule_search_locations or ()), name)
    return os.path.dirname(origin) if os.path.basename(origin).startswith("__init__.") else origin or name


def is_ours(place: str) -> bool:
    """Whether a package lies where ours do."""
    return os.path.dirname(os.path.realpath(place)) == os.path.realpath(ROOT)
