"""From a plain mapping to a validated configuration, with every problem in one error."""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from neoproto.config.checks import cross_check
from neoproto.config.schema import RunConfig, RuntimeRoot
from neoproto.config.topology import nearest
from neoproto.config.verl import refused_key, refused_value
from neoproto.errors import ConfigError
from neoproto.text import shown_with_type

SectionT = TypeVar("SectionT", bound=BaseModel)
Path = tuple[str | int, ...]

_MOST_SHOWN = 120
"""Characters of a wrong value that are quoted."""

_WANTED = {
    "int_type": "wanted an integer",
    "int_parsing": "wanted an integer",
    "int_from_float": "wanted an integer",
    "float_type": "wanted a number",
    "finite_number": "wanted a finite number",
    "string_type": "wanted a string",
    "bool_type": "wanted true or false",
    "model_type": "wanted a mapping",
    "model_attributes_type": "wanted a mapping",
    "dict_type": "wanted a mapping",
    "tuple_type": "wanted a list",
}

_OUTSIDE = ("literal_error", "greater_than_equal", "less_than_equal")


def load_config(mapping: Mapping[str, Any]) -> RunConfig:
    """Validate a composed configuration (plain containers, interpolations resolved).

    Raises:
        ConfigError: with one sentence for each problem: unknown keys, wrong types and values, options that
            verl has and we do not, and values that do not go together.
    """
    problems, broken = schema_problems(RunConfig, mapping)
    config = RunConfig.model_validate(_without(mapping, broken))
    known_bad = {dotted(path) for path in broken}
    for problem in cross_check(config):
        if not any(_overlap(path, bad) for path in problem.paths for bad in known_bad):
            problems.append(problem.text)
    if problems:
        raise ConfigError(*problems)
    return config


def load_runtime(mapping: Mapping[str, Any]) -> RuntimeRoot:
    """Validate `runtime` and `topology` alone; the other sections of a run are not looked at.

    Raises:
        ConfigError: with one sentence for each problem.
    """
    if isinstance(mapping, Mapping):
        others = RunConfig.model_fields.keys() - RuntimeRoot.model_fields.keys()
        mapping = {key: value for key, value in mapping.items() if key not in others}
    return load_section(RuntimeRoot, mapping)


def load_section(section: type[SectionT], mapping: Any, *, prefix: Path = ()) -> SectionT:
    """Validate one section by itself; `prefix` is where it stands in the whole.

    Raises:
        ConfigError: with one sentence for each problem.
    """
    problems, _ = schema_problems(section, mapping, prefix=prefix)
    if problems:
        raise ConfigError(*problems)
    return section.model_validate(mapping)


def schema_problems(
    section: type[BaseModel], mapping: Any, *, prefix: Path = ()
) -> tuple[list[str], list[Path]]:
    """What the types alone find wrong in `mapping`: a sentence and a path (without `prefix`) for each."""
    try:
        section.model_validate(mapping)
    except ValidationError as error:
        details = error.errors(include_url=False)
        return [_sentence(section, one, prefix) for one in details], [one["loc"] for one in details]
    return [], []


def dotted(path: Sequence[str | int]) -> str:
    """`("topology", "models", 1, "name")` as `topology.models[1].name`."""
    plain = (isinstance(key, str) and re.fullmatch(r"[\w-]+", key) for key in path)
    text = "".join(f".{key}" if name else f"[{key!r}]" for key, name in zip(path, plain, strict=True))
    return text.removeprefix(".") or "configuration"


def _sentence(section: type[BaseModel], error: ErrorDetails, prefix: Path) -> str:
    path, kind = error["loc"], error["type"]
    if path and path[-1] == "[key]":
        path = path[:-1]
    where = dotted((*prefix, *path))
    if kind == "extra_forbidden":
        reason = refused_key(path)
        if reason is not None:
            return f"{where}: not supported: {reason}"
        return f"{where}: unknown key{nearest(str(path[-1]), _known_keys(section, path[:-1]))}"
    if kind == "missing":
        return f"{where}: a value is needed"
    got = f"got {shown_with_type(error['input'], _MOST_SHOWN)}"
    reason = refused_value(where) if kind in _OUTSIDE else None
    if reason is not None:
        return f"{where}: {got} is not supported: {reason}"
    wanted = _WANTED.get(kind) or _reworded(kind, error["msg"])
    return f"{where}: {wanted}, {got}"


def _reworded(kind: str, message: str) -> str:
    if kind == "string_pattern_mismatch":
        return f"wanted a name that matches{message.partition('pattern')[2]}"
    between = "wanted a value" if kind.startswith(("greater", "less")) else "wanted"
    return re.sub(r"^(Input should be|[A-Z]\w+ should have)", between, message, count=1)


def _known_keys(section: type[BaseModel], path: Path) -> list[str]:
    """Field names of the section that lies at `path` below `section`."""
    current = section
    for key in path:
        if isinstance(key, str):
            current = _section_in(current.model_fields[key].annotation) or current
    return list(current.model_fields)


def _section_in(annotation: Any) -> type[BaseModel] | None:
    """The section type inside `X`, `X | None` or `tuple[X, ...]`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((found for one in get_args(annotation) if (found := _section_in(one))), None)


def _without(mapping: Any, broken: Sequence[Path]) -> dict[str, Any]:
    """A copy of `mapping` in which everything at a broken path falls back to its default.

    A topology is dropped whole: its items have no defaults, and a part of one means nothing.
    """
    repaired = copy.deepcopy(dict(mapping)) if isinstance(mapping, Mapping) else {}
    for path in broken:
        if path:
            _drop(repaired, path)
    return repaired


def _drop(tree: dict[Any, Any], path: Path) -> None:
    """Remove the smallest part of `tree` that has a default and holds `path`."""
    head, *rest = path
    below = tree.get(head)
    whole = head == "topology" or not rest or not isinstance(rest[0], str) or rest[0] == "[key]"
    if whole or not isinstance(below, dict):
        tree.pop(head, None)
    else:
        _drop(below, tuple(rest))


def _overlap(path: str, bad: str) -> bool:
    """Whether one path is the other or lies below it."""
    return path == bad or path.startswith((bad + ".", bad + "[")) or bad.startswith((path + ".", path + "["))
