"""A resolved configuration as YAML, of which Hydra composes the same configuration again.

Two readers stand between the file and a run: YAML, which takes some texts for numbers, dates or nothing, and
OmegaConf, which replaces `${…}` in a text and takes `???` for a value that is missing.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import yaml

_MISSING = "???"
_MISSING_WRITTEN = "${oc.decode:\"'???'\"}"
"""OmegaConf has no escape for it."""


def to_yaml(mapping: Mapping[str, Any]) -> str:
    """Plain containers, texts and numbers as YAML.

    Raises:
        yaml.YAMLError: a value is none of these.
    """
    return yaml.dump(written(mapping), Dumper=_Dumper, allow_unicode=True, sort_keys=False, width=4096)


def written(value: Any) -> Any:
    """A copy in which every text is one that OmegaConf resolves to the text that was there."""
    if isinstance(value, str):
        if value == _MISSING:
            return _MISSING_WRITTEN
        # Backslashes count as escapes only directly before an interpolation: there each is doubled.
        return re.sub(r"(\\*)\$\{", r"\1\1\\${", value)
    if isinstance(value, Mapping):
        return {key: written(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [written(one) for one in value]
    return value


def read(value: Any) -> Any:
    """The inverse of `written`, for readers without OmegaConf; an interpolation of a person's own stays."""
    if isinstance(value, str):
        if value == _MISSING_WRITTEN:
            return _MISSING
        return re.sub(r"(\\*)\1\\\$\{", r"\1${", value)
    if isinstance(value, Mapping):
        return {key: read(one) for key, one in value.items()}
    if isinstance(value, list):
        return [read(one) for one in value]
    return value


class _Dumper(yaml.SafeDumper):
    """Quotes what YAML's readers do not agree on; never writes an alias."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    # `1e5` is a text to YAML 1.1 and a number to OmegaConf; U+0085 is folded away unless it is escaped.
    unclear = not text.isprintable() or re.match(r"[-+.]?[\d.]", text)
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style='"' if unclear else None)


_Dumper.add_representer(str, _text)
