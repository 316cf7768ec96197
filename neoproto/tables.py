"""Small HTML tables, in which notebooks show our objects.

Whatever goes in is text: it is cut to a length, then escaped. However much there is, a table has `MOST_ROWS`
rows and `MOST_COLUMNS` columns at most, and tells how many more there are. `rich`, which draws our tables in
a terminal, shows preformatted text of a fixed width in a notebook.
"""

from __future__ import annotations

import html
import reprlib
from collections.abc import Iterable, Sequence
from itertools import islice

from neoproto.text import cut

MOST_ROWS, MOST_COLUMNS = 30, 24
LONGEST_CELL = 120
"""Characters of a cell, before they are escaped."""

_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = LONGEST_CELL
_SHORT.maxlist = _SHORT.maxtuple = _SHORT.maxdict = _SHORT.maxset = 4
_SHORT.maxlevel = 4


def short(value: object) -> str:
    """What a value is, as text of bounded length, whatever it is and however large; text stays as it is."""
    return cut(str.__str__(value) if isinstance(value, str) else _SHORT.repr(value), LONGEST_CELL)


def text_html(text: str) -> str:
    """Text as HTML that shows it."""
    return html.escape(text, quote=True)


def table_html(
    title: str, columns: Sequence[str], rows: Iterable[Sequence[object]], *, total: int | None = None
) -> str:
    """One table.

    Args:
        title: above it.
        columns: names; none: the rows are names and values.
        rows: of cells, as many as there are columns; only the first `MOST_ROWS` are taken.
        total: how many rows there are, if `rows` is not all of them, or does not know its length.
    """
    first = list(islice(rows, MOST_ROWS))
    if total is None:
        total = len(rows) if isinstance(rows, Sequence) else len(first)
    left_out = max(0, len(columns) - MOST_COLUMNS)
    names = [*columns[:MOST_COLUMNS], *([f"… {left_out:,} more"] if left_out else [])]
    head = f"<thead><tr>{_cells('th', names)}</tr></thead>" if columns else ""
    body = "".join(f"<tr>{_cells('td', _fitted(row, left_out))}</tr>" for row in first)
    more = f"<div>… {total - len(first):,} more rows</div>" if total > len(first) else ""
    return (
        f"<div><b>{text_html(cut(title, 2 * LONGEST_CELL))}</b>"
        f"<table>{head}<tbody>{body}</tbody></table>{more}</div>"
    )


def _fitted(row: Sequence[object], left_out: int) -> Sequence[object]:
    return [*row[:MOST_COLUMNS], ""] if left_out else row[:MOST_COLUMNS]


def _cells(tag: str, values: Iterable[object]) -> str:
    # Left-aligned: notebooks align numbers and text of tables to the right.
    return "".join(f'<{tag} style="text-align:left">{text_html(short(value))}</{tag}>' for value in values)
