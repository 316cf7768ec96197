"""Lets a user's file import what lies beside it, as a script can.

Each loaded file gets a package of its own name, whose path is the file's folder. An import statement in the
file, or in one of its neighbours, looks into that folder first:

    import helper   ──in /a/reward.py──> neoproto_user_1.helper   (/a/helper.py)
                    ──in /b/loss.py────> neoproto_user_2.helper   (/b/helper.py)
                    ──elsewhere────────> helper                   (as ever)

The folder is not put on `sys.path`: that would lend its modules to this program and to every installed
package, and two files could not have neighbours of one name. Modules of the standard library and `neoproto`
are never looked for in the folder; `actors`, `configs` and `meshes` only where users' packages come first.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import importlib
import importlib.util
import itertools
import sys
from collections.abc import Mapping, Sequence
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

from neoproto.packages import NAMES, clash, elsewhere, is_ours, users_win

_NEVER = sys.stdlib_module_names | {"neoproto"}
_PREFIX = "neoproto_user_"
_numbers = itertools.count(1)


class UserPackage:
    """The package of one loaded file.

    Args:
        file: a Python file.
    """

    def __init__(self, file: Path) -> None:
        self.name = f"{_PREFIX}{next(_numbers)}"
        self._file, self._folder = file, str(file.parent)
        self._main = f"{self.name}.{file.stem.replace('.', '_')}"
        # Import statements call the `__import__` of their module's builtins.
        self.builtins: dict[str, Any] = {**vars(builtins), "__import__": self._import}

    def load(self) -> ModuleType | None:
        """Run the file; None if it is not one of Python's.

        Raises:
            Whatever the file raises; nothing of it stays loaded then.
        """
        spec = importlib.util.spec_from_file_location(self._main, self._file)
        if spec is None or spec.loader is None:
            return None
        package = ModuleType(self.name)
        package.__path__ = [self._folder]
        sys.modules[self.name] = package
        _finder.add(self)
        module = importlib.util.module_from_spec(_finder.adopted(self, spec))
        sys.modules[self._main] = module
        try:
            spec.loader.exec_module(module)
        except BaseException:
            _finder.remove(self)
            for name in [one for one in sys.modules if f"{one}.".startswith(f"{self.name}.")]:
                del sys.modules[name]
            raise
        return module

    def _import(
        self,
        name: str,
        globals: Mapping[str, object] | None = None,
        locals: Mapping[str, object] | None = None,
        fromlist: Sequence[str] | None = (),
        level: int = 0,
    ) -> ModuleType:
        top = name.partition(".")[0]
        importer = (globals or {}).get("__name__")
        if not level and top in NAMES and not users_win():
            place = elsewhere(top, [self._folder]) or elsewhere(top)
            if place is not None:  # even if ours has what is asked for: theirs may have been meant
                raise ImportError(clash(top, place), name=top)
        if level or not self._is_neighbour(top, importer):
            return builtins.__import__(name, globals, locals, fromlist or (), level)
        module = builtins.__import__(f"{self.name}.{name}", globals, locals, fromlist or (), 0)
        return module if fromlist else sys.modules[f"{self.name}.{top}"]

    def _is_neighbour(self, top: str, importer: object) -> bool:
        if top in _NEVER:
            return False
        if top in NAMES:
            return users_win() and elsewhere(top, [self._folder]) is not None
        name = f"{self.name}.{top}"
        if name == self._main == importer:  # math_verify.py wants the installed package, and not itself
            return False
        if name in sys.modules:
            return True
        spec = PathFinder.find_spec(name, [self._folder])
        # A folder without __init__.py is a package only where nothing else has the name.
        return spec is not None and (spec.origin is not None or not _is_found(top))


def source_files(file: Path) -> list[Path]:
    """The file, and the neighbours that its import statements and theirs name, sorted after it.

    Read, not run; a file that cannot be read or parsed names none.
    """
    found, todo = {file}, [file]
    while todo:
        one = todo.pop()
        with contextlib.suppress(OSError, ValueError, LookupError, SyntaxError, RecursionError, MemoryError):
            named = _named_files(one, file) - found
            found |= named
            todo += named
    return [file, *sorted(found - {file})]


def _named_files(one: Path, file: Path) -> set[Path]:
    named = set()
    for node in ast.walk(ast.parse(one.read_bytes())):
        base, modules, relative = file.parent, [], False
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            if relative := node.level > 0:
                base = one.parents[node.level - 1]
            modules = [".".join(filter(None, (node.module, alias.name))) for alias in node.names]
        for module in modules:
            parts = module.split(".")
            ours = parts[0] in NAMES and is_ours(str(base / parts[0]))
            if not relative and (parts[0] in _NEVER or ours):
                continue
            for count in range(1, len(parts) + 1):
                place = base.joinpath(*parts[:count])
                named |= {place.with_suffix(".py"), place / "__init__.py"}
    return {path for path in named if path.is_relative_to(file.parent) and path.is_file()}


class _Finder:
    """Finds neighbours for `sys.meta_path`, and has their import statements look at their folder too."""

    def __init__(self) -> None:
        self._packages: dict[str, UserPackage] = {}

    def add(self, package: UserPackage) -> None:
        self._packages[package.name] = package
        if self not in sys.meta_path:
            sys.meta_path.insert(0, self)

    def remove(self, package: UserPackage) -> None:
        del self._packages[package.name]

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        package = self._packages.get(fullname.partition(".")[0])
        if package is None:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        return None if spec is None else self.adopted(package, spec)

    @staticmethod
    def adopted(package: UserPackage, spec: ModuleSpec) -> ModuleSpec:
        if isinstance(spec.loader, SourceFileLoader):
            spec.loader = _Loader(spec.loader.name, spec.loader.path)
            spec.loader.builtins = package.builtins
        return spec


class _Loader(SourceFileLoader):
    builtins: dict[str, Any]

    def exec_module(self, module: ModuleType) -> None:
        vars(module)["__builtins__"] = self.builtins
        super().exec_module(module)


def _is_found(name: str) -> bool:
    try:
        return name in sys.modules or importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        return False


_finder = _Finder()
