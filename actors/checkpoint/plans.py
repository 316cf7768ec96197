"""What torch.distributed.checkpoint plans a checkpoint with: who writes what, and what is read from where."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import metadata as md
from torch.distributed.checkpoint import planner as planning
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner

from actors.checkpoint.state import Part


class PlannedPart:
    """A `Part` in the form that planners ask for; where nothing of a tensor is, there is no chunk."""

    def __init__(self, part: Part) -> None:
        self.part = part
        self._chunks = [
            md.ChunkStorageMetadata(offsets=torch.Size(part.start), sizes=torch.Size(part.local.shape))
        ]
        if part.local.numel() == 0 and math.prod(part.whole) > 0:
            self._chunks = []

    def size(self) -> torch.Size:
        return torch.Size(self.part.whole)

    def __create_chunk_list__(self) -> list[md.ChunkStorageMetadata]:
        return self._chunks

    def __create_write_items__(self, fqn: str, _: Any) -> list[planning.WriteItem]:
        properties = md.TensorProperties(dtype=self.part.local.dtype)
        return [
            planning.WriteItem(
                index=md.MetadataIndex(fqn, chunk.offsets),
                type=planning.WriteItemType.SHARD,
                tensor_data=planning.TensorWriteData(chunk=chunk, properties=properties, size=self.size()),
            )
            for chunk in self._chunks
        ]


# Of what torch is given to save or load it logs every value. Everything is one value.
_ALL = "all"


def planned(parts: Mapping[str, Part]) -> dict[str, Any]:
    """What `SavePlanner` and `LoadPlanner` take, in the form in which torch hands it to them."""
    return {_ALL: {name: PlannedPart(part) for name, part in parts.items()}}


class SavePlanner(DefaultSavePlanner):
    """What several ranks hold alike is written by one of them, shared out by size."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        storage_meta: md.StorageMeta | None = None,
        is_coordinator: bool = False,
    ) -> None:
        super().set_up_planner(state_dict[_ALL], storage_meta, is_coordinator)

    def lookup_object(self, index: md.MetadataIndex) -> Tensor:
        found: PlannedPart = self.state_dict[index.fqn]
        return found.part.local


class LoadPlanner(DefaultLoadPlanner):
    """Reads what this rank holds out of whatever pieces there are."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        metadata: md.Metadata | None = None,
        is_coordinator: bool = False,
    ) -> None:
        self.state_dict = self.original_state_dict = state_dict[_ALL]
        self.metadata, self.is_coordinator = metadata, is_coordinator

    def lookup_tensor(self, index: md.MetadataIndex) -> Tensor:
        found: PlannedPart = self.state_dict[index.fqn]
        return found.part.local
