"""Tab completion of the commands: which words may stand where the cursor is.

    bash ──line, cursor──> words_for ──> options | configurations | groups and their files | keys | values

What is offered comes from the schema and the YAML files, so it is never out of date. Nothing is composed, and
neither Hydra nor torch is imported: an answer takes 0.3 s, most of it for Python and the schema.

Why it is ours: Hydra's own completion composes the configuration at each Tab (1 s) and offers no values, and
argcomplete reads an argparse parser, which knows no keys, and completes `python -m` only through a hook for
all of Python.
"""

from __future__ import annotations

import os
import re
import sys
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import yaml
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from neoproto.config import CONFIG_NAMES, RunConfig

SHELLS = ("bash",)
SCRIPT = """\
_neoproto_complete() {
    local line=${COMP_LINE:0:COMP_POINT}
    local s='[[:space:]]'
    local ours="(^|$s)([^[:space:]]*python[0-9.]*)$s+-m$s+neoproto[.](run|eval)$s"
    COMPREPLY=()
    if [[ $line =~ $ours ]]; then
        local IFS=$'\\n'
        COMPREPLY=($(COMP_LINE=$line COMP_WORDBREAKS=$COMP_WORDBREAKS "${BASH_REMATCH[2]/#\\~/$HOME}" \\
            -m neoproto.run --shell-completion query=bash 2>/dev/null))
        if [[ ${#COMPREPLY[@]} == 1 && ${COMPREPLY[0]} == *[=.] ]]; then compopt -o nospace; fi
    elif [[ -n ${_neoproto_before-} ]]; then
        "$_neoproto_before" "$@"
    fi
}
_neoproto_found=$(complete -p python 2>/dev/null | sed -n 's/.*-F \\([^ ]*\\) .*/\\1/p')
if [[ $_neoproto_found != _neoproto_complete ]]; then _neoproto_before=$_neoproto_found; fi
unset _neoproto_found
complete -o bashdefault -o default -F _neoproto_complete python python3
"""
"""Completes `python -m neoproto.run` and `… neoproto.eval`. What else is typed after `python` is completed as
before: by the function that did, else as file names, which are also what an empty answer comes to."""

OPTIONS: Mapping[str, tuple[str, ...]] = {
    "neoproto.run": ("--config-name", "--config-dir", "--cfg", "--help"),
    "neoproto.eval": ("--config-name", "--config-dir", "--help"),
}
SHORT_KEYS = {"neoproto.run": (), "neoproto.eval": ("model=", "n=")}
NAME_OPTIONS, FOLDER_OPTIONS = ("--config-name", "-cn"), ("--config-dir", "-cd")
PRIMARY = "ppo_monarch"
"""Its list of defaults has how each group is written; the other configuration has the same."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Typed:
    """A command line as far as the cursor.

    Attributes:
        command: `neoproto.run` or `neoproto.eval`.
        before: the whole words in front.
        word: the one that is being typed; empty at the start of one.
        folder: of `--config-dir`, if it is there.
    """

    command: str
    before: tuple[str, ...]
    word: str
    folder: Path | None


def main(request: str) -> int:
    """`install=SHELL` prints what the shell has to evaluate, `query=SHELL` answers it; the exit code."""
    what, _, shell = request.partition("=")
    if shell not in SHELLS or what not in ("install", "query"):
        # Not where what the shell evaluates goes.
        wanted = f"wanted install={'|'.join(SHELLS)}, got {request}"
        print(f"error: --shell-completion: {wanted}", file=sys.stderr, flush=True)
        return 2
    if what == "install":
        print(SCRIPT, end="")
        return 0
    typed = read_line(os.environ.get("COMP_LINE", ""))
    if typed is not None:
        cut = cut_off(typed.word, os.environ.get("COMP_WORDBREAKS", ""))
        answer = "".join(f"{word[cut:]}\n" for word in words_for(typed))
        sys.stdout.buffer.write(os.fsencode(answer))  # file names as they are, UTF-8 or not
        sys.stdout.flush()
    return 0


def read_line(line: str) -> Typed | None:
    """Take a line apart; None if it is none of our commands."""
    found = re.search(r"python[0-9.]*\s+-m\s+(neoproto\.(?:run|eval))\s(.*)", line, re.DOTALL)
    if found is None:
        return None
    words = found[2].split()
    word = "" if not found[2] or found[2][-1].isspace() else words.pop()
    folder = next((after for one, after in options_of(words) if one in FOLDER_OPTIONS), None)
    path = None if folder is None else folder_at(folder)
    return Typed(command=found[1], before=tuple(words), word=word, folder=path)


def folder_at(text: str) -> Path | None:
    """The folder, if there is one; a wrong path gives no message while it is typed."""
    with suppress(OSError, RuntimeError):  # a name that is too long; a user without a home
        path = Path(text).expanduser()
        return path if path.is_dir() else None
    return None


def options_of(words: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Options with their values, written as two words or as one."""
    for index, word in enumerate(words):
        name, equals, value = word.partition("=")
        if name in (*NAME_OPTIONS, *FOLDER_OPTIONS, "--cfg"):
            yield name, value if equals else "".join(words[index + 1 : index + 2])


def cut_off(word: str, breaks: str) -> int:
    """How much of a word readline takes for an earlier one: it replaces what comes after a break only."""
    return max((word.rfind(character) + 1 for character in breaks), default=0)


def words_for(typed: Typed) -> list[str]:
    """Everything that may stand in place of the word that is being typed, in order, each once."""
    word, last = typed.word, typed.before[-1] if typed.before else ""
    option, equals, _ = word.partition("=")
    if equals and option in NAME_OPTIONS:
        found: Iterator[str] = (f"{option}={name}" for name in configurations(typed.folder))
    elif last in NAME_OPTIONS:
        found = configurations(typed.folder)
    elif last in FOLDER_OPTIONS or option in FOLDER_OPTIONS:
        found = iter(())  # the shell knows folders
    elif last == "--cfg":
        found = iter(("job",))
    elif word.startswith("-"):
        found = iter(OPTIONS[typed.command])
    else:
        found = overrides(typed)
    return sorted({one for one in found if one.startswith(word)})


def configurations(folder: Path | None) -> Iterator[str]:
    """Names for `--config-name`."""
    yield from CONFIG_NAMES
    if folder is not None:
        yield from (path.stem for path in folder.glob("*.yaml"))


def overrides(typed: Typed) -> Iterator[str]:
    """`key=value`, as far as the word has got: the next part of the key, or the values."""
    mark = (re.match(r"\+\+|\+|~", typed.word) or [""])[0]
    bare = typed.word.removeprefix(mark)
    key, equals, _ = bare.partition("=")
    groups = shipped_groups()
    if equals:
        values = [*group_files(groups[key], typed.folder)] if key in groups else [*values_of(key)]
        yield from (f"{mark}{key}={value}" for value in values)
        return
    if mark == "+":
        yield "+smoke="
        return
    end = "" if mark == "~" else "="
    if mark != "++":
        yield from (f"{mark}{group}{end}" for group in groups if group != "smoke")
    if not mark:
        yield from (*SHORT_KEYS[typed.command], *(OPTIONS[typed.command] if not bare else ()))
    above = bare.rpartition(".")[0]
    for name, more in keys_below(above):
        path = f"{above}.{name}" if above else name
        yield f"{mark}{path}{'.' if more else end}"


def shipped_groups() -> dict[str, str]:
    """How a group is written on the command line (`model@actor_rollout_ref.model`), with its folder."""
    listed = yaml.safe_load((configs() / f"{PRIMARY}.yaml").read_text(encoding="utf-8"))["defaults"]
    groups = {key: key.partition("@")[0] for entry in listed if isinstance(entry, dict) for key in entry}
    return groups | {"smoke": "smoke"}


def group_files(group: str, folder: Path | None) -> Iterator[str]:
    """The files of a group, the shipped and the user's own."""
    yield from (one.name.removesuffix(".yaml") for one in (configs() / group).iterdir() if is_yaml(one))
    if folder is not None and (folder / group).is_dir():
        yield from (path.stem for path in (folder / group).glob("*.yaml"))


def is_yaml(entry: Traversable) -> bool:
    return entry.name.endswith(".yaml")


def configs() -> Traversable:
    return files("configs")


def keys_below(path: str) -> Iterator[tuple[str, bool]]:
    """Names in the section at a dotted path, and whether more follows each; nothing if there is none."""
    section = section_at(path)
    if section is not None:
        for name, field in section.model_fields.items():
            is_open = get_origin(field.annotation) is dict
            yield name, is_open or section_of(field) is not None


def values_of(key: str) -> Iterator[str]:
    """What an option may be, where that is a handful of words."""
    above, _, name = key.rpartition(".")
    section = section_at(above)
    if section is not None and name in section.model_fields:
        yield from choices(section.model_fields[name].annotation)


def choices(kind: Any) -> Iterator[str]:
    origin = get_origin(kind)
    if origin is Literal:
        yield from (one if isinstance(one, str) else yaml.safe_dump(one).split()[0] for one in get_args(kind))
    elif origin in (types.UnionType, typing.Union):
        for one in get_args(kind):
            yield from choices(one)
    elif origin is typing.Annotated:
        yield from choices(get_args(kind)[0])
    elif kind is bool:
        yield from ("true", "false")
    elif kind is type(None):
        yield "null"


def section_at(path: str) -> type[BaseModel] | None:
    section: type[BaseModel] | None = RunConfig
    for name in filter(None, path.split(".")):
        field = section.model_fields.get(name) if section is not None else None
        section = None if field is None else section_of(field)
    return section


def section_of(field: FieldInfo) -> type[BaseModel] | None:
    kind = field.annotation
    return kind if isinstance(kind, type) and issubclass(kind, BaseModel) else None
