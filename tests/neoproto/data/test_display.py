"""What a notebook shows of a batch, and what it reads for that."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from neoproto.data import DataProto
from neoproto.data.display import FIRST_ROWS, LARGEST_ROW
from neoproto.store import MemoryStore, use_store
from tests.neoproto.html_reading import Page


@pytest.fixture
def store() -> Iterator[MemoryStore]:
    made = MemoryStore()
    with use_store(made):
        yield made
    made.close()


def test_columns_their_places_and_the_first_rows() -> None:
    batch = DataProto.from_dict(
        {"x": torch.arange(12.0).reshape(6, 2), "ids": torch.arange(48).reshape(6, 8)},
        {"text": [f"<b>{row}</b>" for row in range(6)], "n": np.arange(6, dtype=np.int32)},
        {"step": 3},
    )
    page = Page(batch._repr_html_())
    assert page.foreign == []
    cells = page.cells
    assert "DataProto: 6 rows, 4 columns" in cells
    for row in (
        ["x", "tensor", "float32", "[6, 2]", "inline (cpu)"],
        ["text", "array", "object", "[6]", "inline"],
        ["n", "array", "int32", "[6]", "inline"],
        ["step", "3"],
        ["0", "[0, 1]", "[0, 1, 2, 3, …]", "<b>0</b>", "0"],
        ["4", "[8, 9]", "[32, 33, 34, 35, …]", "<b>4</b>", "4"],
    ):
        assert any(cells[at : at + len(row)] == row for at in range(len(cells))), (row, cells)
    assert "… 1 more rows" in cells


def test_of_stored_columns_only_the_rows_that_are_shown_are_read(store: MemoryStore) -> None:
    rows = 100_000
    batch = DataProto.from_dict({"x": torch.zeros(rows, 4)}, {"text": ["a"] * rows})
    before, trips = store.bytes_out, store.trips
    html = batch._repr_html_()
    assert store.bytes_out - before < 4096
    assert store.trips - trips == 1
    assert "stored, 1.5 MiB (volume" in html
    assert "… 99,995 more rows" in html
    assert len(html) < 8000


def test_large_rows_are_not_read(store: MemoryStore) -> None:
    wide = LARGEST_ROW // 4 + 1
    batch = DataProto.from_dict(
        {"wide": torch.zeros(8, wide), "n": torch.arange(8)}, {"o": ["z" * wide * 4] * 8}
    )
    before = store.bytes_out
    html = batch._repr_html_()
    assert store.bytes_out - before < 1024
    assert "first rows, without 2 column(s) of large rows" in html
    assert f"[8, {wide}]" in html


def test_parts_of_several_stored_objects_and_inline_ones(store: MemoryStore) -> None:
    stored = DataProto.from_dict({"x": torch.arange(4)})
    with use_store(None):
        inline = DataProto.from_dict({"x": torch.arange(4)})
    both = DataProto.concat([stored, inline, stored])
    assert "stored, 32 B, 1 inline (volume" in both._repr_html_()
    more = DataProto.concat([stored, DataProto.from_dict({"x": torch.arange(4)})])
    assert "2 stored objects, 64 B (volume" in more._repr_html_()


def test_what_is_gone_is_said(store: MemoryStore) -> None:
    batch = DataProto.from_dict({"x": torch.arange(4)})
    batch.release()
    html = batch._repr_html_()
    assert "[4]" in html
    assert "Its rows cannot be read: " in html
    store.close()
    assert "Its rows cannot be read: " in batch._repr_html_()


def test_an_empty_batch() -> None:
    assert "0 rows, 0 columns" in DataProto()._repr_html_()
    assert "0 rows, 1 columns" in DataProto.from_dict({"x": torch.zeros(0, 3)})._repr_html_()


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.text(max_size=30), min_size=1, max_size=8), st.text(min_size=1, max_size=20))
def test_no_text_becomes_html(texts: list[str], name: str) -> None:
    others = [{"role": "user", "content": f"<img src=x onerror={text}>"} for text in texts]
    batch = DataProto.from_dict(None, {f"<{name}": texts, "messages": others}, {f"</{name}": texts[0]})
    page = Page(batch._repr_html_())
    assert page.foreign == []
    assert page.rows == 1 + 2 + 1 + 1 + min(len(texts), FIRST_ROWS)


def test_many_columns_and_much_text_are_bounded() -> None:
    batch = DataProto.from_dict(
        None, {f"column {n}": ["<&>" * 1000] * 3 for n in range(500)}, {"m": "<" * 10**6}
    )
    html = batch._repr_html_()
    assert len(html) < 100_000
    assert "… 470 more rows" in html
