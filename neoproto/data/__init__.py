"""Batches, references and the rollout seam.

The names below are loaded when first used, so that code which only reads data files needs no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from neoproto.data.batch import DataProtoItem
    from neoproto.data.dispatch import RankSplit, collect, split_for_ranks
    from neoproto.data.proto import DataProto, pad_dataproto_to_divisor, unpad_dataproto

_HOMES = {
    "DataProto": "proto",
    "DataProtoItem": "batch",
    "RankSplit": "dispatch",
    "collect": "dispatch",
    "pad_dataproto_to_divisor": "proto",
    "split_for_ranks": "dispatch",
    "unpad_dataproto": "proto",
}

__all__ = [
    "DataProto",
    "DataProtoItem",
    "RankSplit",
    "collect",
    "pad_dataproto_to_divisor",
    "split_for_ranks",
    "unpad_dataproto",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
