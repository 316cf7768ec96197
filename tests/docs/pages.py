"""The documentation as data: pages, their links and headings, and the code that stands in them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
_FENCED = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_INDENTED = re.compile(r"(?:^(?: {4}.*)?\n)+", re.MULTILINE)
_LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")


@dataclass(frozen=True, kw_only=True, slots=True)
class Block:
    """A piece of code; `language` is empty for an indented one."""

    language: str
    text: str


def blocks(page: str) -> list[Block]:
    """The code of a page, fenced first, then indented."""
    fenced = [Block(language=found[1], text=found[2]) for found in _FENCED.finditer(page)]
    rest = _FENCED.sub("", page)
    indented = [re.sub(r"^ {4}", "", found[0], flags=re.MULTILINE) for found in _INDENTED.finditer(rest)]
    return fenced + [Block(language="", text=text) for text in indented if text.strip()]


def file_in(page: str, name: str) -> str:
    """The block whose first line is a comment with this file name.

    Raises:
        KeyError: there is none.
    """
    for block in blocks(page):
        if block.text.splitlines()[0] == f"# {name}":
            return block.text
    raise KeyError(name)


def prose(page: str) -> str:
    """The page without its code blocks."""
    return _INDENTED.sub("\n", _FENCED.sub("", page))


def links(page: str) -> list[str]:
    """What the page links to, code left out."""
    return _LINK.findall(re.sub(r"`[^`\n]*`", "``", prose(page)))


def anchors(page: str) -> set[str]:
    """The anchors of its headings, as GitHub makes them."""
    found: dict[str, int] = {}
    made = set()
    for title in re.findall(r"^#{1,6} +(.+?) *$", _FENCED.sub("", page), re.MULTILINE):
        text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title)
        slug = re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-")
        count = found[slug] = found.get(slug, -1) + 1
        made.add(slug if count == 0 else f"{slug}-{count}")
    return made


def empty_sections(page: str) -> list[str]:
    """Titles that nothing stands below, not even a section of their own."""
    lines = [line for line in _FENCED.sub("code", page).splitlines() if line.strip()]
    levels = [len(line) - len(line.lstrip("#")) if re.match(r"#{1,6} ", line) else 0 for line in lines]
    return [
        line.lstrip("# ")
        for line, level, after in zip(lines, levels, [*levels[1:], 1], strict=True)
        if level and 0 < after <= level
    ]


def commands(page: str) -> Iterator[str]:
    """Command lines of the page's indented code, continued lines joined, comments taken away."""
    for block in blocks(page):
        if block.language == "":
            for line in block.text.replace("\\\n", " ").splitlines():
                yield re.sub(r"(\s{2,}|\s)#.*$", "", line).strip()
