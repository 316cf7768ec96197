"""What every section of the configuration is built from: strict, frozen, and closed to unknown keys."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field


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
    return (value,) if isinstance(value, str) else _as_tuple(value)


AsTuple = BeforeValidator(_as_tuple)
"""YAML has lists, frozen sections have tuples."""

AsStrings = BeforeValidator(_as_strings)
"""The same, where a single string stands for a list of one."""

Strings = Annotated[tuple[str, ...], BeforeValidator(_as_strings, json_schema_input_type=str | list[str])]
"""One string, or a list of them."""

Name = Annotated[str, Field(pattern=r"^[A-Za-z][A-Za-z0-9_-]*$", max_length=64)]
"""A name that can stand in a path, an environment variable or a mesh name."""

Count = Annotated[int, Field(gt=0)]
Size = Annotated[int, Field(ge=0)]
Positive = Annotated[float, Field(gt=0)]
NonNegative = Annotated[float, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Share = Annotated[float, Field(gt=0, le=1)]
Seconds = Annotated[float, Field(gt=0)]
