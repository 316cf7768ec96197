"""Reading prompt rows, and what is said about bad ones."""

from __future__ import annotations

import datetime
import decimal
import json
import math
import uuid
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from neoproto.data import DataProto
from neoproto.data.rows import read_rows, rows_from_dicts
from neoproto.errors import ConfigError


def row(text: str = "spell abc", **changes: Any) -> dict[str, Any]:
    values: dict[str, Any] = {
        "prompt": [{"role": "user", "content": text}],
        "data_source": "spelling",
        "reward_model": {"style": "exact_match", "ground_truth": "cba"},
        "extra_info": {"index": 3},
    }
    return {key: value for key, value in (values | changes).items() if value is not ...}


def write_jsonl(path: Path, *lines: Any) -> Path:
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


def problems(path: Path) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        read_rows([path])
    return caught.value.problems


def test_parquet_and_json_lines_hold_the_same_rows(tmp_path: Path) -> None:
    json_file = write_jsonl(tmp_path / "a.jsonl", row("one"), "", row("two"))
    parquet_file = tmp_path / "b.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row("one"), row("two")]), parquet_file)
    rows = read_rows([json_file, parquet_file])
    assert [r.messages[0]["content"] for r in rows] == ["one", "two", "one", "two"]
    assert [r.uid for r in rows] == ["a.jsonl:1", "a.jsonl:3", "b.parquet:0", "b.parquet:1"]
    assert rows[1].origin == f"{json_file}:3"
    assert rows[3].origin == f"{parquet_file}, row 1"
    for r in rows:
        assert (r.data_source, r.reward_model, r.extra_info) == (
            "spelling",
            {"style": "exact_match", "ground_truth": "cba"},
            {"index": 3},
        )


def test_extra_info_is_optional_and_a_uid_is_kept(tmp_path: Path) -> None:
    (found,) = read_rows([write_jsonl(tmp_path / "a.json", row(extra_info=..., uid="mine"))])
    assert (found.extra_info, found.uid) == ({}, "mine")


def test_files_of_one_name_give_distinct_uids(tmp_path: Path) -> None:
    (tmp_path / "x").mkdir()
    files = [write_jsonl(tmp_path / "a.jsonl", row()), write_jsonl(tmp_path / "x" / "a.jsonl", row())]
    parent = tmp_path.name
    assert [r.uid for r in read_rows(files)] == [f"{parent}/a.jsonl:1", "x/a.jsonl:1"]


def test_rows_keep_their_uids_when_their_files_are_moved_together(tmp_path: Path) -> None:
    def uids(root: Path) -> list[str]:
        files = [root / name / "a.jsonl" for name in ("x", "y")]
        for file in files:
            file.parent.mkdir(parents=True)
            write_jsonl(file, row())
        return [found.uid for found in read_rows(files)]

    assert uids(tmp_path / "here") == uids(tmp_path / "there") == ["x/a.jsonl:1", "y/a.jsonl:1"]


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("absent.jsonl", None, "does not exist"),
        ("empty.jsonl", "", "is empty"),
        ("blank.jsonl", "\n\n", "has no rows"),
        ("table.csv", "a,b\n", "unknown kind of file '.csv'"),
        ("broken.parquet", "not parquet", "cannot be read as Parquet"),
        (
            "pretty.json",
            json.dumps([row()], indent=1),
            ":1: not a JSON object on one line: Expecting value: ",
        ),
        ("binary.jsonl", "\x1f\n" * 40, "; one object a line is needed"),
    ],
)
def test_an_unusable_file_is_named(tmp_path: Path, name: str, content: str | None, said: str) -> None:
    path = tmp_path / name
    if content is not None:
        path.write_text(content)
    (problem,) = problems(path)
    assert said in problem
    assert str(path) in problem


def test_a_folder_is_called_one(tmp_path: Path) -> None:
    assert problems(tmp_path) == (f"data.train_files: {tmp_path} is a folder, a file is needed",)


def test_no_files_is_an_error_of_the_field() -> None:
    with pytest.raises(ConfigError, match=r"data\.val_files: no files given"):
        read_rows([], field="data.val_files")


def test_a_missing_parquet_column_is_named_with_those_there(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"prompt": ["x"], "answer": ["y"]}), path)
    (problem,) = problems(path)
    assert "no column data_source, reward_model; it has prompt, answer" in problem


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        ("{nonsense", "not a JSON object"),
        pytest.param("[" + "1" * 5000 + "]", "not a JSON object on one line: Exceeds the limit", id="digits"),
        ([1, 2], "a row is an object"),
        (row(prompt=...), "no prompt"),
        (row(prompt="text"), "prompt: a list of messages"),
        (row(prompt=[]), "prompt: a list of messages"),
        (row(prompt=["text"]), "prompt[0]: an object with role and content"),
        (row(prompt=[{"role": "user"}]), "prompt[0].content: a string is needed, got None"),
        (row(data_source=7), "data_source: a non-empty string is needed, got 7"),
        (row(reward_model="exact"), "reward_model: an object"),
        (row(reward_model={"ground_truth": 1}), "reward_model.style: a string"),
        (row(reward_model={"style": "x"}), "reward_model.ground_truth is missing"),
        (row(extra_info=[1]), "extra_info: an object is needed, got [1]"),
    ],
)
def test_a_malformed_row_is_named_by_file_line_and_field(tmp_path: Path, bad: Any, said: str) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", row(), bad)
    (problem,) = problems(path)
    assert problem.startswith(f"{path}:2: ")
    assert said in problem


@pytest.mark.parametrize(
    ("column", "said"),
    [
        (pyarrow.array([0, 1], pyarrow.timestamp("ns")), "extra: Nanosecond"),
        (pyarrow.array([0, 1 << 62], pyarrow.timestamp("ms")), "extra: "),
        (
            pyarrow.Array.from_buffers(
                pyarrow.string(), 2, pyarrow.array([b"a", b"\xff"], pyarrow.binary()).buffers()
            ),
            "extra: 'utf-8' codec can't decode",
        ),
    ],
)
def test_a_parquet_value_that_python_has_not_is_named_by_row_and_column(
    tmp_path: Path, column: Any, said: str
) -> None:
    path = tmp_path / "a.parquet"
    table = pyarrow.Table.from_pylist([row(), row()]).append_column("extra", column)
    pyarrow.parquet.write_table(table, path)
    (problem,) = problems(path)
    assert problem.startswith(f"{path}, row 1: {said}")


def test_a_file_that_is_listed_twice_is_said_to_be(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", row())
    (tmp_path / "b.jsonl").symlink_to(path)
    with pytest.raises(ConfigError) as caught:
        read_rows([path, tmp_path / "b.jsonl", path])
    assert caught.value.problems == (f"data.train_files: {path} is listed more than once",)


def test_half_a_surrogate_pair_is_no_text(tmp_path: Path) -> None:
    path = write_jsonl(
        tmp_path / "a.jsonl", row("\U0001f389 é"), row(reward_model={"ground_truth": "\ud800"})
    )
    assert problems(path) == (f"{path}:2: not Unicode text: half of a surrogate pair (\\ud800 to \\udfff)",)


def test_problems_come_together_and_are_capped(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", *[row(data_source=7) for _ in range(25)])
    found = problems(path)
    assert len(found) == 11
    assert found[-1] == "… and 15 more problems"


def test_repeated_uids_are_refused(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", row(uid="u"), row(uid="u"))
    (problem,) = problems(path)
    assert problem == f"{path}:2: uid 'u' is also that of {path}:1"


def test_dictionaries_of_a_task_become_rows() -> None:
    rows = rows_from_dicts([row("one"), row("two", uid="q2")], name="spelling/train")
    assert [(r.uid, r.origin) for r in rows] == [
        ("spelling/train:0", "spelling/train, row 0"),
        ("q2", "spelling/train, row 1"),
    ]
    with pytest.raises(ConfigError, match=r"spelling, row 0: no prompt"):
        rows_from_dicts([row(prompt=...)], name="spelling")


def test_a_byte_order_mark_at_the_beginning_of_a_file_is_no_text(tmp_path: Path) -> None:
    plain = write_jsonl(tmp_path / "a.jsonl", row())
    marked = tmp_path / "b.jsonl"
    marked.write_bytes(b"\xef\xbb\xbf" + plain.read_bytes())
    assert read_rows([marked])[0].messages == read_rows([plain])[0].messages
    inside = tmp_path / "c.jsonl"
    inside.write_bytes(plain.read_bytes() + marked.read_bytes())
    assert problems(inside)[0].startswith(f"{inside}:2: not a JSON object on one line")


def test_a_home_folder_that_is_not_there_names_the_field() -> None:
    with pytest.raises(ConfigError, match=r"^data\.train_files: ~no-body/x\.jsonl: no home folder"):
        read_rows(["~no-body/x.jsonl"])


CALLS = [
    {"role": "user", "content": "2 + 2?", "tool_calls": None, "name": None},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "1", "function": {"name": "add", "arguments": {"a": 2, "b": None}}}],
        "name": None,
    },
    {"role": "tool", "content": "4", "tool_calls": None, "name": "add"},
]


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_a_null_key_of_a_message_is_absent_at_any_depth(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"a{suffix}"
    if suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row(prompt=CALLS)]), path)
    else:
        write_jsonl(path, row(prompt=CALLS))
    (found,) = read_rows([path])
    assert found.messages == (
        {"role": "user", "content": "2 + 2?"},
        {
            "role": "assistant",
            "tool_calls": [{"id": "1", "function": {"name": "add", "arguments": {"a": 2}}}],
        },
        {"role": "tool", "content": "4", "name": "add"},
    )


def deep(levels: int) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"extra_info": {"a": deep(900)}}, ":1: extra_info['a'][0]"),
        ({"reward_model": {"style": "rule", "ground_truth": deep(101)}}, ":1: reward_model['ground_truth']"),
        ({"prompt": [{"role": "user", "content": "a", "x": deep(400)}]}, ":1: prompt[0]['x'][0]"),
    ],
)
def test_what_is_nested_too_deeply_to_be_sent_is_refused(
    tmp_path: Path, changes: dict[str, Any], said: str
) -> None:
    (problem,) = problems(write_jsonl(tmp_path / "a.jsonl", row(**changes)))
    assert said in problem
    assert problem.endswith("is nested more than 100 levels deep")


def test_many_brackets_are_not_deep(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", row(extra_info={"a": [[1]] * 300, "b": deep(90)}))
    assert len(read_rows([path])) == 1


def test_what_only_a_pickle_could_carry_is_refused_with_its_row() -> None:
    class Custom:
        pass

    with pytest.raises(
        ConfigError, match=r"^mine, row 1: extra_info\['x'\]\[0\] is a .*Custom: only a pickle"
    ):
        rows_from_dicts([row(), row(extra_info={"x": [Custom()]})], name="mine")


@pytest.mark.parametrize(
    ("prompt", "said"),
    [
        ([], "prompt: a list of messages"),
        (
            [{"role": "system", "content": "be kind"}],
            "prompt: nothing is asked, all messages are of the system",
        ),
        ([{"role": "user", "content": ""}], "prompt: nothing is asked, all messages are empty"),
        (
            [
                {"role": "user", "content": "a"},
                {"role": "assistant", "content": "", "tool_calls": [{"id": 1}]},
            ],
            "prompt: an answer continues the assistant's last message, and cannot continue its tool_calls",
        ),
        (
            [{"role": "user", "content": "a"}, {"role": "assistant", "content": " "}],
            "prompt: the assistant's last message has no text to continue; leave the message out",
        ),
    ],
)
def test_a_prompt_that_asks_nothing_is_refused(tmp_path: Path, prompt: list[Any], said: str) -> None:
    (problem,) = problems(write_jsonl(tmp_path / "a.jsonl", row(prompt=prompt)))
    assert said in problem


def test_whatever_a_parquet_file_can_hold_is_kept_as_it_is_in_a_checkpoint(tmp_path: Path) -> None:
    """The asynchronous modes save rows that wait; a value that could not be saved would end the run there."""
    utc = datetime.UTC
    info = {
        "date": datetime.date(2026, 2, 28),
        "when": datetime.datetime(2026, 2, 28, 1, tzinfo=utc),
        "naive": datetime.datetime(2026, 2, 28, 1, 2, 3),
        "time": datetime.time(1, 2),
        "took": datetime.timedelta(seconds=3),
        "price": decimal.Decimal("1.50"),
        "bytes": b"\x00\xff",
        "nan": float("nan"),
    }
    key = pyarrow.array([uuid.UUID(int=7).bytes], pyarrow.uuid())
    table = pyarrow.Table.from_pylist(
        [row(extra_info=info, reward_model={"style": "rule", "ground_truth": decimal.Decimal("2.5")})]
    )
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    pyarrow.parquet.write_table(pyarrow.table({"key": key}), tmp_path / "key.parquet")
    (found,) = read_rows([tmp_path / "a.parquet"])
    key_value = pyarrow.parquet.read_table(tmp_path / "key.parquet").to_pylist()[0]["key"]
    batch = DataProto.from_dict(
        non_tensors={"extra_info": [{**found.extra_info, "key": key_value}], "reward": [found.reward_model]}
    )
    batch.save_to_disk(tmp_path / "saved.batch")
    back = DataProto.load_from_disk(tmp_path / "saved.batch")
    assert (
        back["reward"].tolist()
        == [found.reward_model]
        == [{"style": "rule", "ground_truth": decimal.Decimal("2.5")}]
    )
    (kept,) = back["extra_info"].tolist()
    assert math.isnan(kept.pop("nan"))
    assert kept == {name: value for name, value in info.items() if name != "nan"} | {"key": uuid.UUID(int=7)}
