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

from neoproto.data.persist import json_text
from neoproto.errors import ConfigError
from neoproto.files import user_path, wrong_kind
from neoproto.text import Problems, one_line, shown

REQUIRED_COLUMNS = ("prompt", "data_source", "reward_model")
_JSON_SUFFIXES = (".jsonl", ".json")


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptRow:
    """One prompt and what is needed to judge an answer to it.

    Attributes:
        uid: names the row; unique in its data set and the same in every run, since sampling seeds derive
            from it.
        messages: chat messages, each with `role` and `content`, but for one with `tool_calls` alone; a key
            that is null is left out.
        data_source: where the row comes from; validation metrics are reported by it.
        reward_model: `style` (which built-in judge suits) and `ground_truth`.
        extra_info: whatever else the reward function needs.
        origin: file and line or row, or the task's name and index, for messages to the user.
    """

    uid: str
    messages: tuple[dict[str, Any], ...]
    data_source: str
    reward_model: dict[str, Any]
    extra_info: dict[str, Any]
    origin: str


@dataclass(frozen=True, kw_only=True, slots=True)
class _RawRow:
    values: Any
    uid: str
    origin: str


def read_rows(files: Sequence[str | Path], *, field: str = "data.train_files") -> list[PromptRow]:
    """Read prompt rows from `.parquet` files and JSON Lines files (`.jsonl`, `.json`), in order.

    A row has `prompt` (chat messages), `data_source`, `reward_model` (`style`, `ground_truth`) and, if
    wanted, `extra_info`. Blank lines are skipped. A key of a message that is null is absent, at any depth: a
    Parquet file has every key in every message.

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
    problems = Problems()
    for path in paths:
        if problem := _file_problem(path):
            problems.add(f"{field}: {problem}")
    whole = [path.resolve() for path in paths]
    for path in {
        same: path for path, same in zip(paths, whole, strict=True) if whole.count(same) > 1
    }.values():
        problems.add(f"{field}: {path} is listed more than once")
    problems.raise_any()
    rows: list[PromptRow] = []
    for path, name in zip(paths, _short_names(paths), strict=True):
        read = _parquet_rows if path.suffix == ".parquet" else _json_rows
        found = 0
        for raw in read(path, name, problems):
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
    problems = Problems()
    raw_rows = (
        _RawRow(values=value, uid=f"{name}:{index}", origin=f"{name}, row {index}")
        for index, value in enumerate(values)
    )
    rows = [row for raw in raw_rows if (row := _checked(raw, problems)) is not None]
    problems.raise_any()
    _refuse_repeated_uids(rows)
    return rows


def _file_problem(path: Path) -> str | None:
    if problem := wrong_kind(path, "file"):
        return problem
    if path.suffix != ".parquet" and path.suffix not in _JSON_SUFFIXES:
        return f"{path}: unknown kind of file {path.suffix!r}; known: .parquet, {', '.join(_JSON_SUFFIXES)}"
    if not path.is_file():
        return f"{path} does not exist"
    if path.stat().st_size == 0:
        return f"{path} is empty"
    return None


def _short_names(paths: Sequence[Path]) -> list[str]:
    """File names; with as many folders before them as it takes where names are equal.

    The folders above these do not matter: rows keep their uids when the files are moved together.
    """
    whole = [path.absolute().parts for path in paths]
    names = []
    for parts in whole:
        length = next(
            length
            for length in range(1, len(parts) + 1)
            if sum(other[-length:] == parts[-length:] for other in whole) == 1
        )
        names.append("/".join(parts[-length:]))
    return names


def _parquet_rows(path: Path, name: str, problems: Problems) -> Iterator[_RawRow]:
    import pyarrow
    import pyarrow.parquet

    try:
        table = pyarrow.parquet.read_table(path)
    except (pyarrow.ArrowException, OSError) as error:
        raise ConfigError(f"{path} cannot be read as Parquet: {one_line(error)}") from error
    missing = [column for column in REQUIRED_COLUMNS if column not in table.column_names]
    if missing:
        raise ConfigError(
            f"{path} has no column {', '.join(missing)}; it has {', '.join(table.column_names) or 'none'}"
        )
    for index, values in enumerate(_python_rows(table)):
        if isinstance(values, _Unreadable):
            problems.add(f"{path}, row {index}: {values.reason}")
        yield _RawRow(values=values, uid=f"{name}:{index}", origin=f"{path}, row {index}")


def _python_rows(table: Any) -> Iterator[Any]:
    """The rows of an Arrow table as dictionaries."""
    from pyarrow import ArrowException

    try:
        yield from table.to_pylist()
    except (ArrowException, ValueError, OverflowError):
        # Some value has no counterpart in Python: which one is found row by row, column by column.
        for index in range(table.num_rows):
            values: dict[str, Any] = {}
            for column in table.column_names:
                try:
                    values[column] = table.column(column)[index].as_py()
                except (ArrowException, ValueError, OverflowError) as error:
                    yield _Unreadable(reason=f"{column}: {one_line(error)}")
                    break
            else:
                yield values


def _json_rows(path: Path, name: str, problems: Problems) -> Iterator[_RawRow]:
    try:
        with path.open("rb") as file:
            lines = [(number, _parsed(line)) for number, line in _lines(file)]
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {one_line(error)}") from error
    unreadable = [(number, values) for number, values in lines if isinstance(values, _Unreadable)]
    if unreadable and not any(isinstance(values, Mapping) for _, values in lines):
        # Not JSON Lines at all, which is one problem, not one for each line.
        number, values = unreadable[0]
        lines = [(number, _Unreadable(reason=f"{values.reason}; one object a line is needed"))]
    for number, values in lines:
        if isinstance(values, _Unreadable):
            problems.add(f"{path}:{number}: {values.reason}")
        yield _RawRow(values=values, uid=f"{name}:{number}", origin=f"{path}:{number}")


def _lines(file: Iterable[bytes]) -> Iterator[tuple[int, bytes]]:
    """Lines that are not blank, with their numbers."""
    for number, line in enumerate(file, start=1):
        if number == 1:
            line = line.removeprefix(codecs.BOM_UTF8)  # Windows programs begin files with one
        if line.strip():
            yield number, line


def _parsed(line: bytes) -> Any:
    try:
        values = json.loads(line.decode("utf-8"))
        if b"\\u" in line:  # an escaped half of a surrogate pair is legal JSON, and no text
            json.dumps(values, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError:
        return _Unreadable(reason="not Unicode text: half of a surrogate pair (\\ud800 to \\udfff)")
    except (ValueError, RecursionError) as error:  # a ValueError: no text, no JSON, endless digits
        return _Unreadable(reason=f"not a JSON object on one line: {one_line(error)}")
    return values


@dataclass(frozen=True, kw_only=True, slots=True)
class _Unreadable:
    """In place of a row's values: why there are none."""

    reason: str


def _checked(raw: _RawRow, problems: Problems) -> PromptRow | None:
    """The row, or None after its problems were noted."""
    if isinstance(raw.values, _Unreadable):
        return None
    found = list(_row_problems(raw.values))
    for problem in found:
        problems.add(f"{raw.origin}: {problem}")
    if found:
        return None
    values = raw.values
    return PromptRow(
        uid=str(values.get("uid") or raw.uid),
        messages=tuple(_without_nulls(message) for message in values["prompt"]),
        data_source=values["data_source"],
        reward_model=dict(values["reward_model"]),
        extra_info=dict(values.get("extra_info") or {}),
        origin=raw.origin,
    )


def _without_nulls(value: Any) -> Any:
    """The value without keys whose value is None; items of lists stay, which of them is which may count."""
    if isinstance(value, Mapping):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value


def _row_problems(values: Any) -> Iterator[str]:
    if not isinstance(values, Mapping):
        yield f"a row is an object with {', '.join(REQUIRED_COLUMNS)}, got {shown(values)}"
        return
    missing = [column for column in REQUIRED_COLUMNS if values.get(column) is None]
    if missing:
        yield f"no {', '.join(missing)}"
    if "prompt" not in missing:
        yield from _message_problems(values["prompt"])
    if "data_source" not in missing and not (
        isinstance(values["data_source"], str) and values["data_source"]
    ):
        yield f"data_source: a non-empty string is needed, got {shown(values['data_source'])}"
    if "reward_model" not in missing:
        yield from _reward_problems(values["reward_model"])
    extra = values.get("extra_info")
    if extra is not None and not isinstance(extra, Mapping):
        yield f"extra_info: an object is needed, got {shown(extra)}"
    for column in ("prompt", "reward_model", "extra_info"):
        try:
            json_text(values.get(column), column)
        except ValueError as error:
            yield one_line(error)


def _message_problems(prompt: Any) -> Iterator[str]:
    if not isinstance(prompt, list) or not prompt:
        yield f'prompt: a list of messages {{"role": "user", "content": "…"}} is needed, got {shown(prompt)}'
        return
    found = False
    for index, message in enumerate(prompt):
        if not isinstance(message, Mapping):
            found = True
            yield f"prompt[{index}]: an object with role and content is needed, got {shown(message)}"
            continue
        for key in ("role", "content"):
            if key == "content" and message.get(key) is None and message.get("tool_calls"):
                continue  # the assistant called tools and said nothing
            if not isinstance(message.get(key), str):
                found = True
                yield f"prompt[{index}].{key}: a string is needed, got {shown(message.get(key))}"
    if not found:
        yield from _question_problems(prompt)


def _question_problems(prompt: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    if all(message["role"] in ("system", "developer") for message in prompt):
        yield "prompt: nothing is asked, all messages are of the system"
    elif not any(message.get("content") for message in prompt):
        yield "prompt: nothing is asked, all messages are empty"
    elif prompt[-1]["role"] == "assistant" and prompt[-1].get("tool_calls"):
        yield "prompt: an answer continues the assistant's last message, and cannot continue its tool_calls"
    elif prompt[-1]["role"] == "assistant" and not str(prompt[-1].get("content") or "").strip():
        yield "prompt: the assistant's last message has no text to continue; leave the message out"


def _reward_problems(reward_model: Any) -> Iterator[str]:
    if not isinstance(reward_model, Mapping):
        yield f"reward_model: an object with style and ground_truth is needed, got {shown(reward_model)}"
        return
    if not isinstance(reward_model.get("style"), str):
        yield f"reward_model.style: a string is needed, got {shown(reward_model.get('style'))}"
    if "ground_truth" not in reward_model:
        yield "reward_model.ground_truth is missing"


def _refuse_repeated_uids(rows: Sequence[PromptRow]) -> None:
    first: dict[str, PromptRow] = {}
    problems = Problems()
    for row in rows:
        earlier = first.setdefault(row.uid, row)
        if earlier is not row:
            problems.add(f"{row.origin}: uid {row.uid!r} is also that of {earlier.origin}")
    problems.raise_any()
