"""Paths that a person typed."""

from __future__ import annotations

from pathlib import Path

from neoproto.errors import ConfigError


def user_path(text: str | Path, *, field: str) -> Path:
    """The path, with `~` and `~name` at its beginning replaced by that person's home folder.

    Args:
        field: the configuration key it comes from, for messages.

    Raises:
        ConfigError: there is no such person, or no home folder is known.
    """
    try:
        return Path(text).expanduser()
    except RuntimeError:
        who = Path(text).parts[0]
        raise ConfigError(f"{field}: {text}: no home folder is known for {who}") from None
