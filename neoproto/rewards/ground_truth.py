"""Ground truths that are texts or numbers, and numbers in texts."""

from __future__ import annotations

import numbers
import re
from decimal import Decimal
from typing import TYPE_CHECKING

from neoproto.rewards.score import RowError
from neoproto.text import shown

if TYPE_CHECKING:
    from neoproto.data.rows import PromptRow

_NUMBER = re.compile(r"[-+]?(?:\d{1,3}(?:,\d{3})+|\d+)?(?:\.\d+)?(?<=\d)")


def text_of(row: PromptRow) -> str:
    """The row's ground truth as a text.

    Raises:
        RowError: it is neither a text nor a number.
    """
    ground_truth = row.reward_model.get("ground_truth")
    if not isinstance(ground_truth, str | numbers.Number):
        raise RowError(f"reward_model.ground_truth: a text or a number is needed, got {shown(ground_truth)}")
    return str(ground_truth)


def find_last_number(text: str) -> Decimal | None:
    """The last number in a text, None if there is none. Thousands separators and a sign are understood."""
    found = [match for match in _NUMBER.findall(text) if match]
    return Decimal(found[-1].replace(",", "")) if found else None


def number_text(number: Decimal) -> str:
    """A text that equal numbers share, exact: "3" for 3, 3.0 and 3.00."""
    text = format(number, "f")  # not `normalize`, which rounds to 28 digits
    text = text.rstrip("0").rstrip(".") if "." in text else text
    return "0" if text in ("-0", "") else text
