"""Values and errors on one line."""

from __future__ import annotations

import pytest

from neoproto.errors import ConfigError
from neoproto.text import Problems, cut, first_line, one_line, shown, shown_with_type


class Mute(Exception):
    def __str__(self) -> str:
        raise ValueError("no words")

    __repr__ = __str__


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("a", "'a'"),
        ("a" * 80, "'" + "a" * 58 + "…"),
        pytest.param(-(10**5000), "an integer of thousands of digits", id="long"),
        ("a  b\n", "'a  b\\n'"),
        ([10**5000], "a value of type list"),
        (Mute(), "a value of type Mute"),
    ],
)
def test_a_value_is_shown_on_one_line(value: object, text: str) -> None:
    assert shown(value) == text


def test_its_type_is_said_once() -> None:
    assert shown_with_type(3) == "3 (int)"
    assert shown_with_type("a" * 9, 4) == "'aa… (str)"
    assert shown_with_type(10**5000) == "an integer of thousands of digits (int)"
    assert shown_with_type(Mute()) == "a value of type Mute"


def test_text_is_cut_to_a_length() -> None:
    assert cut("abc", 3) == "abc"
    assert cut("abcd", 3) == "ab…"


def test_the_lines_of_a_value_are_joined() -> None:
    class Tall:
        def __repr__(self) -> str:
            return "one\n  two"

    assert shown(Tall()) == "one two"


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (ValueError("bad field:\n    got 3\n"), "bad field: got 3"),
        (ValueError(""), "ValueError"),
        (Mute(), "Mute"),
        (ValueError("x" * 400), "x" * 299 + "…"),
    ],
)
def test_an_error_is_one_line(error: Exception, text: str) -> None:
    assert one_line(error) == text


def test_the_first_line_of_an_error() -> None:
    assert first_line(ValueError(" one\n  two")) == "one"
    assert first_line(ValueError()) == "ValueError"


def test_problems_are_capped() -> None:
    problems = Problems()
    problems.raise_any()
    for index in range(12):
        problems.add(str(index))
    with pytest.raises(ConfigError) as caught:
        problems.raise_any()
    assert caught.value.problems == (*map(str, range(10)), "… and 2 more problems")
