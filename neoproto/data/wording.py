"""Bad input in words: every message one line, however the value or the library's error looks."""

from __future__ import annotations

from neoproto.errors import ConfigError

_LONGEST_ERROR = 300
_MOST_PROBLEMS = 10


def shown(value: object, most: int = 60) -> str:
    """A value as Python writes it, on one line of at most `most` characters."""
    try:
        text = " ".join(repr(value).split())
    except Exception:  # noqa: BLE001 — a user's object has a `repr` of its own, and long integers have none
        return f"a value of type {type(value).__name__}"
    return text if len(text) <= most else f"{text[: most - 3]}…"


def one_line(error: BaseException) -> str:
    """What an exception says, its lines joined and cut short; its class if it says nothing."""
    try:
        text = " ".join(str(error).split())
    except Exception:  # noqa: BLE001 — a user's exception has a `str` of its own
        text = ""
    text = text or type(error).__name__
    return text if len(text) <= _LONGEST_ERROR else f"{text[:_LONGEST_ERROR]}…"


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
