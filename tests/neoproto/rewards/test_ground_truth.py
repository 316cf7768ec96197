"""Numbers in texts, and texts of numbers."""

from __future__ import annotations

from decimal import Decimal

import pytest

from neoproto.rewards.ground_truth import find_last_number, number_text


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("it is 12", "12"),
        ("3 plus 4 makes 7.", "7"),
        ("1,234.50 in all", "1234.50"),
        ("-3", "-3"),
        ("x=.5", ".5"),
        ("from 10,20", "20"),
        ("12,345,678", "12345678"),
        ("#### 42", "42"),
    ],
)
def test_the_last_number_of_a_text(text: str, number: str) -> None:
    assert find_last_number(text) == Decimal(number)


@pytest.mark.parametrize(
    ("numbers", "text"),
    [
        (("3", "3.0", "3.00", "+3", "003"), "3"),
        (("100", "100.0", "1e2"), "100"),
        (("0", "-0", "0.0", "-0.00"), "0"),
        (("-.50", "-0.5"), "-0.5"),
        (("1" + 40 * "0" + "1.0", "1" + 40 * "0" + "1"), "1" + 40 * "0" + "1"),
    ],
)
def test_equal_numbers_share_a_text(numbers: tuple[str, ...], text: str) -> None:
    assert {number_text(Decimal(number)) for number in numbers} == {text}
