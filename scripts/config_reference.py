"""Write `docs/config.md`, the reference of every option, and the tables of columns in `docs/data.md`.

python scripts/config_reference.py            # after changing an option or a column; a test compares
"""

from __future__ import annotations

import textwrap
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from neoproto.config import RunConfig
from neoproto.config.verl import REFUSED_KEYS, REFUSED_VALUES
from neoproto.data.schema import COLUMNS, META_INFO, STAGES

TARGET = Path(__file__).resolve().parent.parent / "docs" / "config.md"
DATA_PAGE = TARGET.with_name("data.md")
BEGIN, END = "<!-- written by scripts/config_reference.py -->\n\n", "\n<!-- end -->"
HEAD = """\
# Every option

Written by `scripts/config_reference.py` from the schema (`neoproto/config/`). An option is set on the
command line (`data.train_batch_size=32`) or in a file of your own ([extending](extending.md)); `--cfg job`
prints all of them as they are. Types are not coerced, unknown keys are refused with the nearest known one.
The defaults are the schema's; `ppo_monarch` and `grpo_monarch` set what suits the tiny model, see `configs/`.
"""
SIGNS = {"gt": ">", "ge": "≥", "lt": "<", "le": "≤"}


def reference() -> str:
    """The whole page."""
    return "\n".join([HEAD, *sections(RunConfig, ""), *refused()]) + "\n"


def sections(model: type[BaseModel], path: str) -> Iterator[str]:
    """The options of a section as a table, then those of the sections in it."""
    inner = {name: section for name, field in model.model_fields.items() if (section := section_of(field))}
    rows = [row(name, field) for name, field in model.model_fields.items() if name not in inner]
    if rows:
        title = f"`{path}`" if path else "At the top"
        yield f"## {title}\n"
        if path and model.__doc__:
            yield textwrap.fill(one_line(model.__doc__), 120, break_on_hyphens=False) + "\n"
        yield "| option | type | default | |\n|---|---|---|---|"
        yield from rows
        yield ""
    for name, section in inner.items():
        yield from sections(section, f"{path}.{name}" if path else name)
    for name, field in model.model_fields.items():
        for item in items_of(field.annotation):
            yield from sections(item, f"{path}.{name}[…]" if path else name)


def section_of(field: FieldInfo) -> type[BaseModel] | None:
    """The section that a field is, if it is one and not a value."""
    found = field.annotation
    return found if isinstance(found, type) and issubclass(found, BaseModel) else None


def items_of(found: Any) -> Iterator[type[BaseModel]]:
    """The sections that a value may hold: an optional one, or those of a list."""
    for one in get_args(found):
        if isinstance(one, type) and issubclass(one, BaseModel):
            yield one
        elif get_origin(one) is typing.Annotated:
            yield from items_of(one)


def row(name: str, field: FieldInfo) -> str:
    cells = (f"`{name}`", shown_type(field), shown_default(field), one_line(field.description or ""))
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def shown_type(field: FieldInfo) -> str:
    """A type in words: `integer > 0`, `cpu, gpu`, `list of text`."""
    text = type_text(field.annotation)
    return f"{text} {limits(field.metadata)}".rstrip()


def type_text(found: Any) -> str:
    origin, inner = get_origin(found), get_args(found)
    if origin is typing.Annotated:
        return f"{type_text(inner[0])} {limits(inner[1:])}".rstrip()
    if origin is Literal:
        return ", ".join(f"`{value}`" for value in inner)
    if origin in (types.UnionType, typing.Union):
        return " or ".join(dict.fromkeys(type_text(one) for one in inner))
    if origin is tuple:
        return f"list of {type_text(inner[0])}"
    if origin is dict:
        return f"{type_text(inner[0])} to {type_text(inner[1])}"
    if isinstance(found, type) and issubclass(found, BaseModel):
        return "sections (below)"
    names = {
        int: "integer",
        float: "number",
        str: "text",
        bool: "true, false",
        type(None): "null",
        Any: "any",
    }
    return names.get(found, str(found))


def limits(metadata: Any) -> str:
    """`> 0`, `≤ 1`, out of a field's constraints."""
    found = []
    for one in metadata:
        if isinstance(one, FieldInfo):
            found.append(limits(one.metadata))
        else:
            found += [f"{sign} {getattr(one, name)}" for name, sign in SIGNS.items() if hasattr(one, name)]
    return ", ".join(text for text in found if text)


def shown_default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    if value is None or isinstance(value, bool):
        return f"`{'null' if value is None else str(value).lower()}`"
    if isinstance(value, tuple):
        return f"`[{', '.join(map(str, value))}]`"
    return f"`{value}`"


def refused() -> Iterator[str]:
    """verl's options that there are not here."""
    yield "## Options of verl that are refused by name\n"
    yield "| option | why, and what instead |\n|---|---|"
    yield from (f"| `{key}` | {text} |".replace("\n", " ") for key, text in sorted(REFUSED_KEYS.items()))
    yield "\nAnd these values:\n"
    yield "| option | |\n|---|---|"
    yield from (f"| `{key}` | {text} |" for key, text in sorted(REFUSED_VALUES.items()))


def with_columns(page: str) -> str:
    """`docs/data.md` with the tables of columns and meta_info as they are now."""
    before, _, rest = page.partition(BEGIN)
    return before + BEGIN + "\n".join(column_tables()) + "\n" + END + rest.partition(END)[2]


def column_tables() -> Iterator[str]:
    yield "| column | shape, dtype | what | since | written by | read by |\n|---|---|---|---|---|---|"
    for one in COLUMNS:
        since = f"`{STAGES[one.writer]}`" + (" only" if one.last == STAGES[one.writer] else "")
        text = f"{one.text} (with: {one.when})" if one.when else one.text
        readers = ", ".join(one.readers) or "–"
        yield f"| `{one.name}` | {one.shape} {one.dtype} | {text} | {since} | {one.writer} | {readers} |"
    yield "\n| key of meta_info | type | what | batches of | read by |\n|---|---|---|---|---|"
    for key in META_INFO:
        yield f"| `{key.name}` | {key.dtype} | {key.text} | {key.kind} | {', '.join(key.readers)} |"


def one_line(text: str) -> str:
    return " ".join(text.split())


if __name__ == "__main__":
    TARGET.write_text(reference(), encoding="utf-8")
    DATA_PAGE.write_text(with_columns(DATA_PAGE.read_text(encoding="utf-8")), encoding="utf-8")
