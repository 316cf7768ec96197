"""Prompt rows, in the layout verl uses, from Parquet and JSON Lines files or from a task's dictionaries.

file ──> row (dict) ──> PromptRow          every row that cannot be used is reported, with file and line
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from neoproto.data.paths import user_path
from neoproto.errors import ConfigError

REQUIRED_COLUMNS = ("prompt", "data_source", "reward_model")
_JSON_SUFFIXES = (".jsonl", ".json")
_MOST_PROBLEMS = 10


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptRow:
    """One prompt and what is needed to judge an answer to it.

    Attributes:
        uid: names the row; unique in its data set and the same in every run, since sampling seeds derive
            from it.
        messages: chat messages, each with `role` and `content`.
        data_source: where the row comes from; validation figures are reported by it.
        reward_model: `style` (which built-in judge suits) and `ground_truth`.
        extra_info: whatever else the reward function needs.
        origin: file and line or row, or the task's name and index, for messages to the user.
    """

    uid: str
    messages: tuple[dict[str, str], ...]
    data_source: str
    reward_model: dict[str, Any]
    extra_info: dict[str, Any]
    origin: str


@dataclass(frozen=True, kw_only=True, slots=True)
class _RawRow:
    values: Any
    uid: str
    origin: str


class _Problems:
    """Collects sentences; keeps the first few and the number of the rest."""

    def __init__(self) -> None:
        self._kept: list[str] = []
        self._total = 0

    def add(self, problem: str) -> None:
        self._total += 1
        if len(self._kept) < _MOST_PROBLEMS:
            self._kept.append(problem)

    def raise_any(self) -> None:
        if self._total > len(self._kept):
            raise ConfigError(*self._kept, f"… and {self._total - len(self._kept)} more problems")
        if self._kept:
            raise ConfigError(*self._kept)


def read_rows(files: Sequence[str | Path], *, field: str = "data.train_files") -> list[PromptRow]:
    """Read prompt rows from `.parquet` files and JSON Lines files (`.jsonl`, `.json`), in order.

    A row has `prompt` (chat messages), `data_source`, `reward_model` (`style`, `ground_truth`) and, if
    wanted, `extra_info`. Blank lines are skipped.

    Args:
        files: paths.
        field: the configuration key they come from, for messages.

    Raises:
        ConfigError: a file that is missing, empty, unreadable, of an unknown kind or without a needed
            column; or malformed rows, each with its file and line (JSON Lines, from 1) or row (Parquet,
            from 0). The first ten problems are listed and the rest counted.
    """
    if not files:
        raise ConfigError(f"{field}: no files given")
    paths = [user_path(file, field=field) for file in files]
    problems = _Problems()
    for path in paths:
        if problem := _file_problem(path):
            problems.add(f"{field}: {problem}")
    problems.raise_any()
    rows: list[PromptRow] = []
    for path, name in zip(paths, _short_names(paths), strict=True):
        raw_rows = (
            _parquet_rows(path, name) if path.suffix == ".parquet" else _json_rows(path, name, problems)
        )
        found = 0
        for raw in raw_rows:
            found += 1
            if (row := _checked(raw, problems)) is not None:
                rows.append(row)
        if found == 0:
            problems.add(f"{field}: {path} has no rows")
    problems.raise_any()
    _refuse_repeated_uids(rows)
    return rows


def rows_from_dicts(values: Iterable[Mapping[str, Any]], *, name: str) -> list[PromptRow]:
    """Rows from dictionaries in the same layout, such as a task's; `uid` in a dictionary is kept.

    Args:
        values: one dictionary a row.
        name: what they are, for `uid`s and messages.

    Raises:
        ConfigError: as `read_rows`.
    """
    problems = _Problems()
    raw_rows = (
        _RawRow(values=value, uid=f"{name}:{index}", origin=f"{name}, row {index}")
        for index, value in enumerate(values)
    )
    rows = [row for raw in raw_rows if (row := _checked(raw, problems)) is not None]
    problems.raise_any()
    _refuse_repeated_uids(rows)
    return rows


def _file_problem(path: Path) -> str | None:
    if path.suffix != ".parquet" and path.suffix not in _JSON_SUFFIXES:
        return f"{path}: unknown kind of file {path.suffix!r}; known: .parquet, {', '.join(_JSON_SUFFIXES)}"
    if path.is_dir():
        return f"{path} is a folder, a file is needed"
    if not path.is_file():
        return f"{path} does not exist"
    if path.stat().st_size == 0:
        return f"{path} is empty"
    return None


def _short_names(paths: Sequence[Path]) -> list[str]:
    """File names, or whole paths where two names are equal."""
    names = [path.name for path in paths]
    return [name if names.count(name) == 1 else str(path) for name, path in zip(names, paths, strict=True)]


def _parquet_rows(path: Path, name: str) -> Iterator[_RawRow]:
    import pyarrow
    import pyarrow.parquet

    try:
        table = pyarrow.parquet.read_table(path)
    except (pyarrow.ArrowException, OSError) as error:
        raise ConfigError(f"{path} cannot be read as Parquet: {_first_line(error)}") from error
    missing = [column for column in REQUIRED_COLUMNS if column not in table.column_names]
    if missing:
        raise ConfigError(
            f"{path} has no column {', '.join(missing)}; it has {', '.join(table.column_names) or 'none'}"
        )
    for index, values in enumerate(table.to_pylist()):
        yield _RawRow(values=values, uid=f"{name}:{index}", origin=f"{path}, row {index}")


def _json_rows(path: Path, name: str, problems: _Problems) -> Iterator[_RawRow]:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if number == 1:
                line = line.removeprefix(codecs.BOM_UTF8)  # Windows programs begin files with one
            if not line.strip():
                continue
            origin = f"{path}:{number}"
            try:
                values = json.loads(line.decode("utf-8"))
                if b"\\u" in line:  # an escaped half of a surrogate pair is legal JSON, and no text
                    json.dumps(values, ensure_ascii=False).encode("utf-8")
            except UnicodeEncodeError:
                problems.add(f"{origin}: not Unicode text: half of a surrogate pair (\\ud800 to \\udfff)")
                values = _UNREADABLE
            except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
                problems.add(f"{origin}: not a JSON object on one line: {_first_line(error)}")
                values = _UNREADABLE
            yield _RawRow(values=values, uid=f"{name}:{number}", origin=origin)


_UNREADABLE = object()


def _checked(raw: _RawRow, problems: _Problems) -> PromptRow | None:
    """The row, or None after its problems were noted."""
    if raw.values is _UNREADABLE:
        return None
    found = list(_row_problems(raw.values))
    for problem in found:
        problems.add(f"{raw.origin}: {problem}")
    if found:
        return None
    values = raw.values
    return PromptRow(
        uid=str(values.get("uid") or raw.uid),
        messages=tuple(dict(message) for message in values["prompt"]),
        data_source=values["data_source"],
        reward_model=dict(values["reward_model"]),
        extra_info=dict(values.get("extra_info") or {}),
        origin=raw.origin,
    )


def _row_problems(values: Any) -> Iterator[str]:
    if not isinstance(values, Mapping):
        yield f"a row is an object with {', '.join(REQUIRED_COLUMNS)}, got {_shown(values)}"
        return
    missing = [column for column in REQUIRED_COLUMNS if values.get(column) is None]
    if missing:
        yield f"no {', '.join(missing)}"
    if "prompt" not in missing:
        yield from _message_problems(values["prompt"])
    if "data_source" not in missing and not (
        isinstance(values["data_source"], str) and values["data_source"]
    ):
        yield f"data_source: a non-empty string is needed, got {_shown(values['data_source'])}"
    if "reward_model" not in missing:
        yield from _reward_problems(values["reward_model"])
    extra = values.get("extra_info")
    if extra is not None and not isinstance(extra, Mapping):
        yield f"extra_info: an object is needed, got {_shown(extra)}"


def _message_problems(prompt: Any) -> Iterator[str]:
    if not isinstance(prompt, list) or not prompt:
        yield f'prompt: a list of messages {{"role": "user", "content": "…"}} is needed, got {_shown(prompt)}'
        return
    for index, message in enumerate(prompt):
        if not isinstance(message, Mapping):
            yield f"prompt[{index}]: an object with role and content is needed, got {_shown(message)}"
            continue
        for key in ("role", "content"):
            if not isinstance(message.get(key), str):
                yield f"prompt[{index}].{key}: a string is needed, got {_shown(message.get(key))}"


def _reward_problems(reward_model: Any) -> Iterator[str]:
    if not isinstance(reward_model, Mapping):
        yield f"reward_model: an object with style and ground_truth is needed, got {_shown(reward_model)}"
        return
    if not isinstance(reward_model.get("style"), str):
        yield f"reward_model.style: a string is needed, got {_shown(reward_model.get('style'))}"
    if "ground_truth" not in reward_model:
        yield "reward_model.ground_truth is missing"


def _refuse_repeated_uids(rows: Sequence[PromptRow]) -> None:
    first: dict[str, PromptRow] = {}
    problems = _Problems()
    for row in rows:
        earlier = first.setdefault(row.uid, row)
        if earlier is not row:
            problems.add(f"{row.origin}: uid {row.uid!r} is also that of {earlier.origin}")
    problems.raise_any()


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}…"


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
