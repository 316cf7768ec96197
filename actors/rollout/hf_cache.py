"""Keys and values of sequences of different lengths that are decoded together.

Row i of every tensor is sequence i; its tokens lie at positions 0, 1, … and the next one is written behind
them. What lies further right is stale and masked. `select` drops rows, `append` adds some.

Shapes: b = rows, h = key/value heads, c = capacity in tokens, d = head size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

_SPARE = 32


class RowLayer(CacheLayerMixin):  # type: ignore[misc]
    """One decoder layer's keys and values, [b, h, c, d]; transformers calls `update` in its attention."""

    is_sliding = False

    def __init__(self, rows: RowCache) -> None:
        super().__init__()
        self._rows = rows

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write one token a row, [b, h, 1, d], at its position; return what is attended to, [b, h, w, d]."""
        rows = self._rows
        self.keys[rows.index, :, rows.positions] = key_states[:, :, 0]
        self.values[rows.index, :, rows.positions] = value_states[:, :, 0]
        return self.keys[:, :, : rows.width], self.values[:, :, : rows.width]

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.is_initialized = True

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._rows.width, 0

    def get_seq_length(self) -> int:
        return self._rows.width - 1

    def get_max_length(self) -> int:
        return -1


class RowCache:
    """The cache of all rows and layers.

    Attributes:
        positions: int64 [b], where the next token of each row is written, set by `at`.
        index: int64 [b], 0 to b - 1.
        width: the most positions that any row attends to in this step.
        mask: bool [b, 1, 1, width], the positions that each row attends to.
    """

    def __init__(self, layers: int) -> None:
        self.layers = [RowLayer(self) for _ in range(layers)]
        self.cache = Cache(layers=self.layers)
        self.rows = self._capacity = 0
        self.at(torch.zeros(0, dtype=torch.int64))

    def at(self, positions: Tensor) -> None:
        """Prepare the next token of every row, at these positions, int64 [b]."""
        self.positions, self.index = positions, torch.arange(len(positions))
        self.width = 1 + int(positions.max()) if len(positions) else 1
        self.mask = (torch.arange(self.width) <= positions[:, None])[:, None, None]
        if self.rows and self.width > self._capacity:
            self._grow(self.width + max(_SPARE, self.width // 2))

    def append(self, made: Cache, which: Tensor) -> None:
        """Add a row for each of `which`, int64 [n]: the prompt in `made`, as transformers cached it."""
        for layer, other in zip(self.layers, made.layers, strict=True):
            keys, values = other.keys[which], other.values[which]
            if self.rows:
                wide = max(self._capacity, keys.shape[2])
                keys = torch.cat([_wide(layer.keys, wide), _wide(keys, wide)])
                values = torch.cat([_wide(layer.values, wide), _wide(values, wide)])
            layer.keys, layer.values, layer.is_initialized = keys, values, True
        self.rows += len(which)
        self._capacity = self.layers[0].keys.shape[2]

    def select(self, rows: Tensor) -> None:
        """Keep these rows, int64 [n], in this order."""
        for layer in self.layers:
            layer.keys, layer.values = layer.keys[rows], layer.values[rows]
        self.rows = len(rows)

    def _grow(self, capacity: int) -> None:
        for layer in self.layers:
            layer.keys, layer.values = _wide(layer.keys, capacity), _wide(layer.values, capacity)
        self._capacity = capacity


def _wide(tensor: Tensor, capacity: int) -> Tensor:
    """[b, h, c, d] with room for `capacity` positions; zeros behind, since masked NaN would still be NaN."""
    return torch.nn.functional.pad(tensor, (0, 0, 0, capacity - tensor.shape[2]))
