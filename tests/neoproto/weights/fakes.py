"""An object store in memory that follows the contract: a put copies, a get hands out a private copy."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

from neoproto.errors import KeyMissing


class FakeStore:
    def __init__(self) -> None:
        self.objects: dict[str, Any] = {}

    def put_batch(self, items: Mapping[str, Any], *, blocking: bool = True) -> None:
        assert blocking
        self.objects.update(copy.deepcopy(dict(items)))

    def get_batch(self, keys: Sequence[str], *, blocking: bool = True) -> list[Any]:
        assert blocking
        missing = [key for key in keys if key not in self.objects]
        if missing:
            raise KeyMissing(missing[0])
        return [copy.deepcopy(self.objects[key]) for key in keys]

    def delete_batch(self, keys: Sequence[str], *, blocking: bool = True) -> None:
        assert blocking
        for key in keys:
            if self.objects.pop(key, None) is None:
                raise KeyMissing(key)
