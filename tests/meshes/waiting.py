"""Waiting for what other processes do."""

from __future__ import annotations

import time
from collections.abc import Callable

MOST_S = 30.0


def wait_until(condition: Callable[[], object]) -> None:
    """Look until it is so; fail if it takes too long."""
    until = time.monotonic() + MOST_S
    while not condition():
        assert time.monotonic() < until, "it did not come to that"
        time.sleep(0.01)
