"""What every section of the configuration is built from: strict, frozen, and closed to unknown keys."""

from __future__ import annotations

import datetime
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field
from pydantic_core import PydanticCustomError


class Section(BaseModel):
    """A frozen block of typed options; the docstring below a field is its description.

    Types are not coerced (`"3"` is no integer, `true` is no number); only an integer stands for a float, as
    YAML writes `1` for `1.0`. NaN and infinities are refused.
    """

    model_config = ConfigDict(
        strict=True, extra="forbid", frozen=True, allow_inf_nan=False, use_attribute_docstrings=True
    )


def _as_tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _as_strings(value: Any) -> Any:
    if not isinstance(value, str | list | tuple):
        raise PydanticCustomError("strings", "wanted a string or a list of strings")
    return (value,) if isinstance(value, str) else _as_tuple(value)


def _has_no_nul(value: str) -> str:
    if "\0" in value:
        raise PydanticCustomError("nul", "wanted text without NUL characters")
    return value


def _is_folder_name(value: str) -> str:
    if value in ("", ".", "..") or "/" in value:
        raise PydanticCustomError("folder_name", "wanted the name of a folder, without a slash")
    return value


def _is_date(value: str) -> str:
    try:
        if datetime.date.fromisoformat(value).isoformat() == value:
            return value
    except ValueError:
        pass
    raise PydanticCustomError("date", "wanted a date as 2026-12-31")


def _at_most(limit: int) -> AfterValidator:
    """Bounds that only guard the arithmetic: in the descriptions of options they would be noise."""

    def check(value: float) -> float:
        if value > limit:
            raise PydanticCustomError("too_large", f"wanted at most {limit}")
        return value

    return AfterValidator(check)


AsTuple = BeforeValidator(_as_tuple)
"""YAML has lists, frozen sections have tuples."""

AsStrings = BeforeValidator(_as_strings)
"""The same, where a single string stands for a list of one."""

Plain = Annotated[str, AfterValidator(_has_no_nul)]
"""Text that the system takes, as a path or in an environment."""

Text = Annotated[str, Field(min_length=1), AfterValidator(_has_no_nul)]

Strings = Annotated[tuple[Text, ...], BeforeValidator(_as_strings, json_schema_input_type=str | list[str])]
"""One string, or a list of them."""

Name = Annotated[str, Field(pattern=r"^[A-Za-z][A-Za-z0-9_-]*$", max_length=64)]
"""A name that can stand in a path, an environment variable or a mesh name."""

Date = Annotated[str, AfterValidator(_is_date)]
"""A day, as 2026-12-31."""

FolderName = Annotated[Plain, AfterValidator(_is_folder_name)]
"""One level of a path."""

EnvName = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]

AtMostMax = _at_most(2**31 - 1)
Count = Annotated[int, Field(gt=0), AtMostMax]
Size = Annotated[int, Field(ge=0), AtMostMax]
Seed = Annotated[int, Field(ge=0), _at_most(2**63 - 1)]
"""Of torch's generators."""
Positive = Annotated[float, Field(gt=0)]
NonNegative = Annotated[float, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Share = Annotated[float, Field(gt=0, le=1)]
Seconds = Annotated[float, Field(gt=0), _at_most(10**9)]
"""Thirty years at most; clocks and locks count no further than some hundreds."""
NonNegativeSeconds = Annotated[float, Field(ge=0), _at_most(10**9)]
