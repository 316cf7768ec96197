"""HTML tables: whatever the content is, it is text, and not too much of it."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from neoproto.tables import LONGEST_CELL, MOST_COLUMNS, MOST_ROWS, short, table_html
from tests.neoproto.html_reading import Page

NASTY = st.one_of(
    st.text(max_size=40),
    st.sampled_from(
        ["<b>", "</td></tr>", '"><script>alert(1)</script>', "<!--", "&lt;", "a & b", "<?x", "'"]
    ),
)


@given(NASTY, st.lists(NASTY, min_size=1, max_size=4), st.lists(NASTY, min_size=4, max_size=4))
def test_text_stays_text(title: str, columns: list[str], cells: list[str]) -> None:
    row = cells[: len(columns)]
    page = Page(table_html(title, columns, [row, row]))
    assert page.foreign == []
    # A browser reads a carriage return and a null character as others; nothing else is changed.
    shown = [cell for cell in page.cells if cell]
    wanted = [text for text in (title, *columns, *row, *row) if text]
    assert [_read(cell) for cell in shown] == [_read(text) for text in wanted]


def _read(text: str) -> str:
    return text.replace("\r\n", "\n").replace("\r", "\n").replace("\x00", "\ufffd")


def test_a_table_is_cut_and_says_so() -> None:
    rows = [[f"{row}.{column}" for column in range(100)] for row in range(1000)]
    page = Page(table_html("many", [f"c{column}" for column in range(100)], rows))
    assert page.rows == 1 + MOST_ROWS
    assert "… 970 more rows" in page.cells
    assert "… 76 more" in page.cells
    assert f"0.{MOST_COLUMNS - 1}" in page.cells
    assert f"0.{MOST_COLUMNS}" not in page.cells


def test_rows_that_are_not_all_given_are_counted_by_total() -> None:
    assert "… 9,999 more rows" in table_html("t", ("a",), iter([["x"]]), total=10_000)
    assert "more" not in table_html("t", ("a",), iter([["x"]]))
    assert "<thead>" not in table_html("t", (), [["name", "value"]])


class Bad:
    def __repr__(self) -> str:
        raise ValueError("no")


@pytest.mark.parametrize(
    "value",
    [
        "x" * 10**6,
        ["y" * 10**6] * 10**5,
        dict.fromkeys(range(1000), "z" * 1000),
        np.zeros((1000, 1000)),
        np.str_("w" * 1000),
        Bad(),
        [[[[[[1]]]]]],
    ],
)
def test_what_a_value_is_shown_as_is_short(value: Any) -> None:
    text = short(value)
    assert len(text) <= LONGEST_CELL
    assert text


def test_text_is_shown_as_it_is() -> None:
    assert short("it's") == short(np.str_("it's")) == "it's"
    assert short(["a"]) == "['a']"
    assert sys.intern(short("")) == ""
