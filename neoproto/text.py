"""Values and errors in words, for messages of one line, however the value or a library's error looks."""

from __future__ import annotations

from neoproto.errors import ConfigError

_LONGEST_ERROR = 300
_MOST_PROBLEMS = 10
_LONGEST_INT = 10**4000
"""Python does not write integers that are a little longer."""


def cut(text: str, most: int) -> str:
    """The text, or its beginning with an ellipsis."""
    return text if len(text) <= most else f"{text[: most - 1]}…"


def shown(value: object, most: int = 60) -> str:
    """A value as Python writes it, on one line of at most `most` characters."""
    text = _written(value)
    return f"a value of type {type(value).__name__}" if text is None else cut(text, most)


def shown_with_type(value: object, most: int = 60) -> str:
    """The same, and its type in brackets."""
    text = _written(value)
    return shown(value) if text is None else f"{cut(text, most)} ({type(value).__name__})"


def _written(value: object) -> str | None:
    if isinstance(value, int) and abs(value) >= _LONGEST_INT:
        return "an integer of thousands of digits"
    try:
        text = repr(value)
    except Exception:  # noqa: BLE001 — a user's object has a `repr` of its own; a list of such integers, none
        return None
    return text if text.isprintable() else " ".join(text.split())


def one_line(error: BaseException) -> str:
    """The text of an exception, its lines joined and cut short; its class if it has no text."""
    try:
        text = " ".join(str(error).split())
    except Exception:  # noqa: BLE001 — a user's exception has a `str` of its own
        text = ""
    return cut(text or type(error).__name__, _LONGEST_ERROR)


def first_line(error: BaseException) -> str:
    """The first line of an exception's text, where further lines are details; its class if it has no text."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


class Problems:
    """Collects sentences; keeps the first ten and the number of the rest."""

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
