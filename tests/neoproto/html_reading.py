"""Reads HTML back as a browser would: which tags there are, and the text of each cell."""

from __future__ import annotations

from html.parser import HTMLParser

HARMLESS = {"div", "b", "table", "thead", "tbody", "tr", "th", "td"}


class Page(HTMLParser):
    """Attributes:
    tags: all that were opened, with anything but a style of ours in `foreign`.
    cells: the text of each `th` and `td`, of titles, and of the lines between tables.
    """

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[str] = []
        self.foreign: list[str] = []
        self.cells: list[str] = []
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert self._open == [], self._open

    @property
    def rows(self) -> int:
        return self.tags.count("tr")

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in HARMLESS or [one for one in attrs if one != ("style", "text-align:left")]:
            self.foreign.append(self.get_starttag_text() or tag)
        self.tags.append(tag)
        self._open.append(tag)
        if tag in ("th", "td", "b", "div"):
            self.cells.append("")

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.cells[-1] += data

    def handle_comment(self, data: str) -> None:
        self.foreign.append(data)

    def handle_decl(self, decl: str) -> None:
        self.foreign.append(decl)

    def handle_pi(self, data: str) -> None:
        self.foreign.append(data)
