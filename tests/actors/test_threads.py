"""Blocking work beside an event loop."""

from __future__ import annotations

import asyncio

import pytest

from actors.threads import in_thread


def test_a_thread_hands_its_error_on() -> None:
    def fail() -> None:
        raise OSError("disk")

    with pytest.raises(OSError, match="disk"):
        asyncio.run(in_thread(fail))
