"""Options whose values are files: advantage estimators, policy losses, rollout engines, built-in rewards.

    folder of modules, each with one CHOICE ──> Choices: name → entry ──> values of the option, checks, help

The folder is the list, so adding a value is adding a file. An entry carries the properties that checks and
help are derived from. The configuration reads entries before anything heavy is imported: such a module
imports torch, vLLM and the like inside its functions.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from typing import Generic, TypeVar


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """One value of an option.

    Attributes:
        name: the value in the configuration; also the name of the module that has the entry.
        about: what it is, in some words, for the reference of the options.
    """

    name: str
    about: str

    @property
    def help(self) -> str:
        """Its text in the reference of the options."""
        return self.about


ChoiceT = TypeVar("ChoiceT", bound=Choice)


class Choices(Mapping[str, ChoiceT], Generic[ChoiceT]):
    """The entries of a folder, by name, in the order of their names; read at first use.

    Args:
        package: dotted name of the folder. Each module in it has an entry called `CHOICE`.
        kind: the class of the entries.
    """

    def __init__(self, package: str, kind: type[ChoiceT]) -> None:
        self._package, self._kind = package, kind

    def __getitem__(self, name: str) -> ChoiceT:
        return self._entries[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def help(self) -> str:
        """All of them, as `name = what it is; …`."""
        return "; ".join(f"{name} = {entry.help}" for name, entry in self.items())

    @cached_property
    def _entries(self) -> dict[str, ChoiceT]:
        names = sorted(one.name for one in pkgutil.iter_modules(import_module(self._package).__path__))
        return {name: self._entry(name) for name in names}

    def _entry(self, name: str) -> ChoiceT:
        place = f"{self._package}.{name}"
        entry = getattr(import_module(place), "CHOICE", None)
        if not isinstance(entry, self._kind) or entry.name != name:
            raise TypeError(f"{place}: wanted CHOICE, a {self._kind.__name__} named {name!r}, got {entry!r}")
        return entry
