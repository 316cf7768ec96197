import datetime
import decimal
import json
import pickle
import struct
import uuid
import zoneinfo

import numpy as np
import pytest
import torch

from neoproto.data import DataProto
from neoproto.data.persist import json_text


class Custom:
    pass


def test_every_kind_of_column_comes_back_with_its_bytes(tmp_path):
    nan = np.array([np.nan, -0.0])
    data = DataProto.from_dict(
        tensors={
            "bf16": torch.tensor([[1.5], [2.5]], dtype=torch.bfloat16),
            "fp8": torch.tensor([1.0, 2.0]).to(torch.float8_e4m3fn),
            "bool": torch.tensor([True, False]),
            "empty": torch.zeros(2, 0),
        },
        non_tensors={
            "nan": nan,
            "text": np.array(["ä", "long text"]),
            "day": np.array(["2020-01-01", "NaT"], "datetime64[D]"),
            "mixed": [
                {"role": "user", "n": np.int64(3), 5: (1, "x")},
                [
                    None,
                    2.5,
                    float("inf"),
                    b"\x00\xff",
                    np.arange(3),
                    torch.ones(2, dtype=torch.bfloat16),
                    {"$": 1},
                ],
            ],
            "nested": [np.array([{"a": 1}, None], dtype=object), []],
        },
        meta_info={"step": 3, "when": (1, 2.5)},
    )
    file = tmp_path / "batch.bin"
    data[[1, 0]].save_to_disk(file)
    back = DataProto.load_from_disk(file)
    assert back.meta_info == {"step": 3, "when": (1, 2.5)}
    for key in ("bf16", "fp8", "bool", "empty"):
        assert back[key].dtype == data[key].dtype
        assert torch.equal(back[key].view(torch.uint8), data[key][[1, 0]].view(torch.uint8))
    assert back["nan"].tobytes() == nan[::-1].tobytes()
    assert back["text"].tolist() == ["long text", "ä"]
    assert back["day"].dtype == "datetime64[D]"
    listed, mapped = back["mixed"]
    assert mapped == {"role": "user", "n": 3, 5: (1, "x")}
    assert type(mapped["n"]) is np.int64
    assert listed[:4] == [None, 2.5, float("inf"), b"\x00\xff"]
    assert listed[4].tolist() == [0, 1, 2]
    assert listed[5].dtype == torch.bfloat16
    assert listed[6] == {"$": 1}
    assert back["nested"][1].tolist() == [{"a": 1}, None]


def test_what_needs_a_pickle_is_refused_by_place(tmp_path):
    file = tmp_path / "batch.bin"
    data = DataProto.from_dict(non_tensors={"info": [{"ok": 1}, {"bad": [Custom()]}]})
    with pytest.raises(ValueError, match=r"info\[1\]\['bad'\]\[0\] is a .*Custom: only a pickle"):
        data.save_to_disk(file)
    with pytest.raises(ValueError, match=r"meta_info\['f'\] is a builtins.function"):
        DataProto(meta_info={"f": lambda: 0}).save_to_disk(file)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("content", [b"", b"something else entirely", pickle.dumps({"a": 1})])
def test_other_files_are_refused(tmp_path, content):
    file = tmp_path / "other"
    file.write_bytes(content)
    with pytest.raises(ValueError, match="is not a saved batch"):
        DataProto.load_from_disk(file)


def test_a_file_cut_short_is_refused(tmp_path):
    file = tmp_path / "batch.bin"
    DataProto.from_dict({"x": torch.zeros(100)}).save_to_disk(file)
    content = file.read_bytes()
    file.write_bytes(content[:-1])
    with pytest.raises(ValueError, match="cut short inside column 'x'"):
        DataProto.load_from_disk(file)
    file.write_bytes(content[:30])
    with pytest.raises(ValueError, match="header of the saved batch is damaged"):
        DataProto.load_from_disk(file)


def changed(header: bytes, column: bytes = b"") -> bytes:
    """A file with this header."""
    return b"NEOPROTO\x01" + struct.pack("<Q", len(header)) + header + column


DEEP = b"[" * 5000 + b"]" * 5000
OBJECTS = {"name": "x", "kind": "objects", "dtype": "", "shape": [1], "nbytes": len(DEEP)}


@pytest.mark.parametrize(
    "content",
    [
        changed(DEEP),
        changed(b"[]"),
        changed(b'{"columns": [{}], "meta_info": {}}'),
        changed(b'{"columns": 3, "meta_info": {}}'),
        changed(b'{"columns": [], "meta_info": {"a": {"$": "decimal", "text": "x"}}}'),
        changed(b'{"columns": [], "meta_info": {"a": {"$": "what"}}}'),
        changed(json.dumps({"columns": [OBJECTS], "meta_info": {}}).encode(), DEEP),
        b"NEOPROTO\x01" + b"\xff" * 8,
    ],
)
def test_a_file_that_was_changed_is_refused(tmp_path, content):
    file = tmp_path / "batch.bin"
    file.write_bytes(content)
    with pytest.raises(ValueError, match=r"^.*batch\.bin: the (header of the )?saved batch is damaged: "):
        DataProto.load_from_disk(file)


def test_the_header_is_plain_json(tmp_path):
    file = tmp_path / "batch.bin"
    DataProto.from_dict({"x": torch.zeros(2, 3)}).save_to_disk(file)
    header = json.loads(file.read_bytes()[17:].split(b"\x00")[0])
    assert header["columns"] == [
        {"name": "x", "kind": "tensor", "dtype": "float32", "shape": [2, 3], "nbytes": 24}
    ]


def test_dates_decimals_and_uuids_come_back(tmp_path):
    class Stamp(datetime.datetime):
        """Of a library that counts nanoseconds."""

        nanosecond = 0

    zone = zoneinfo.ZoneInfo("Europe/Berlin")
    values = [
        datetime.date(2026, 2, 28),
        datetime.datetime(2026, 2, 28, 1, 2, 3, 4),
        datetime.datetime(2026, 10, 25, 2, 30, tzinfo=zone, fold=1),
        datetime.datetime(2026, 2, 28, tzinfo=datetime.timezone(datetime.timedelta(hours=3))),
        datetime.time(23, 59, 1),
        datetime.timedelta(days=-1, microseconds=7),
        decimal.Decimal("1.10"),
        uuid.UUID(int=7),
        {decimal.Decimal(1): datetime.date(2026, 1, 1)},
        float("-inf"),
    ]
    file = tmp_path / "batch.bin"
    DataProto.from_dict(non_tensors={"info": [*values, Stamp(2026, 1, 1)]}).save_to_disk(file)
    back = DataProto.load_from_disk(file)["info"].tolist()
    assert back == [*values, datetime.datetime(2026, 1, 1)]
    assert [type(one) for one in back[:-1]] == [type(one) for one in values]
    assert (back[2].tzinfo, back[2].fold, back[2].utcoffset()) == (zone, 1, values[2].utcoffset())
    assert str(back[6]) == "1.10"
    Stamp.nanosecond = 1
    with pytest.raises(ValueError, match="Stamp: only a pickle"):
        DataProto.from_dict(non_tensors={"info": [Stamp(2026, 1, 1)]}).save_to_disk(file)


def test_a_text_of_values_depends_on_them_and_not_on_the_order_of_keys():
    one = {"b": datetime.date(2026, 1, 1), "a": [float("nan"), b"x", np.int64(3)]}
    assert json_text(one) == json_text(dict(reversed(one.items())))
    assert json_text({1: 2, "a": uuid.UUID(int=1)}) != json_text({1: 2, "a": uuid.UUID(int=2)})
    assert json_text(one) != json_text({**one, "b": datetime.date(2026, 1, 2)})
