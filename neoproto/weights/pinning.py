"""Registering slots with an accelerator, so that its copies into them run by themselves."""

from __future__ import annotations

import collections
import logging
from typing import Any

import torch
from torch import Tensor

logger = logging.getLogger(__name__)


class Pins:
    """Host memory that is registered with CUDA, every buffer once: slots come again and again.

    Only asked for memory that a device writes into; without an accelerator nothing is ever pinned.

    Args:
        most: buffers kept registered; the one unused for longest makes room.
    """

    def __init__(self, most: int = 4096) -> None:
        self._most = most
        self._pinned: collections.OrderedDict[tuple[int, int], Tensor] = collections.OrderedDict()
        self._refused = False

    def pin(self, buffer: Tensor) -> None:
        """Register a uint8 buffer; one that cannot be registered is used as it is, and that is logged."""
        if self._refused or not torch.cuda.is_available():
            return
        region = (buffer.data_ptr(), buffer.numel())
        if region in self._pinned:
            self._pinned.move_to_end(region)
            return
        error = int(_runtime().cudaHostRegister(*region, 0))
        if error:
            logger.warning("weight slots are not pinned: cudaHostRegister failed with code %d", error)
            self._refused = True
            return
        self._pinned[region] = buffer  # keeps it mapped
        while len(self._pinned) > self._most:
            self._unpin(next(iter(self._pinned)))

    def close(self) -> None:
        """Let go of everything."""
        for region in list(self._pinned):
            self._unpin(region)

    def _unpin(self, region: tuple[int, int]) -> None:
        _runtime().cudaHostUnregister(region[0])
        del self._pinned[region]


def _runtime() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]
