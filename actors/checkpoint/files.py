"""The files of a checkpoint: torch.distributed.checkpoint plans, this writes and reads. No pickle is in them.

    shard-00000-of-00002.safetensors   what rank 0 of 2 wrote; its header has the place of each piece
    rank-00000-of-00002.json           rank 0's other state

torch's own HuggingFaceStorageWriter makes another copy of a rank's state in memory and has no checksums;
its reader does not notice that a piece in the middle is missing. The headers are in its form all the same
(`DCP_SHARDING_INFO`), so that its reader, and any reader of safetensors, opens these files.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint import metadata as md
from torch.distributed.checkpoint import planner as planning
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from actors.checkpoint.plans import SavePlanner, planned
from actors.checkpoint.state import Part
from actors.training.ranks import Ranks
from neoproto.files import named_errors, sync

FORMAT = "neoproto checkpoint 1"
PLACES = "DCP_SHARDING_INFO"
_CHUNK = 1 << 20
"""Bytes hashed and written at a time: they are still in the processor's cache when they are written."""
DTYPES: Mapping[torch.dtype, str] = {
    torch.float64: "F64",
    torch.int64: "I64",
    torch.float32: "F32",
    torch.int32: "I32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


def shard_name(rank: int, world_size: int) -> str:
    """The file with the tensors of one rank."""
    return f"shard-{rank:05d}-of-{world_size:05d}.safetensors"


def state_name(rank: int, world_size: int) -> str:
    """The file with the other state of one rank."""
    return f"rank-{rank:05d}-of-{world_size:05d}.json"


def write_checkpoint(
    folder: Path,
    parts: Mapping[str, Part],
    state: Mapping[str, Any],
    ranks: Ranks,
    group: ProcessGroup | None,
) -> dict[str, str]:
    """Write this rank's share of a checkpoint, to the disk itself. Collective; on any thread.

    Args:
        folder: made if it is not there; must not have files of a checkpoint in it.
        parts: what this rank holds, by name; names are the same on all ranks.
        state: this rank's other state, as JSON takes it.
        group: the ranks, in a group with no other use meanwhile; None alone.

    Returns:
        SHA-256 in hexadecimal of the files this rank wrote, by their names in `folder`.

    Raises:
        OSError: a file could not be written, on this rank or on another; names it. All ranks raise.
    """
    writer = _Writer(folder, state, ranks)
    with failures_of(ranks):
        save(planned(parts), storage_writer=writer, planner=SavePlanner(), process_group=group)
    return writer.digests


@contextlib.contextmanager
def failures_of(ranks: Ranks) -> Iterator[None]:
    """What failed on this rank, else on the first that failed, as it was raised there."""
    # A single rank has no process group; torch would warn at every save.
    warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
    try:
        yield
    except CheckpointException as error:
        failed = ranks.rank if ranks.rank in error.failures else min(error.failures)
        cause, stack = error.failures[failed]
        cause.add_note(f"on rank {failed}, at\n{''.join(stack.format())}")
        raise cause from None


class _Writer(StorageWriter):
    """Writes this rank's two files; `digests` has their names and SHA-256 afterwards."""

    def __init__(self, folder: Path, state: Mapping[str, Any], ranks: Ranks) -> None:
        self._folder, self._ranks = folder, ranks
        self._state = {
            "format": FORMAT,
            "rank": ranks.rank,
            "world_size": ranks.world_size,
            **state,
        }
        self.digests: dict[str, str] = {}

    def write_data(self, plan: planning.SavePlan, planner: planning.SavePlanner) -> Future[list[WriteResult]]:
        with named_errors(self._folder):
            self._folder.mkdir(parents=True, exist_ok=True)
        rank, world_size = self._ranks.rank, self._ranks.world_size
        self._write(state_name(rank, world_size), iter([json.dumps(self._state).encode()]))
        self._write(shard_name(rank, world_size), _safetensors(plan, planner))
        with named_errors(self._folder):
            sync(self._folder)  # the names in it
        written: Future[list[WriteResult]] = Future()
        written.set_result(
            [
                WriteResult(
                    index=item.index, size_in_bytes=item.tensor_storage_size() or 0, storage_data=None
                )
                for item in plan.items
            ]
        )
        return written

    def _write(self, name: str, data: Iterator[bytes | memoryview]) -> None:
        digest = hashlib.sha256()
        path = self._folder / name
        with named_errors(path), path.open("xb", buffering=0) as file:
            for piece in data:
                for begin in range(0, len(piece), _CHUNK):
                    chunk = memoryview(piece)[begin : begin + _CHUNK]
                    digest.update(chunk)
                    while chunk:
                        chunk = chunk[file.write(chunk) :]
            os.fsync(file.fileno())
        self.digests[name] = digest.hexdigest()

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Nothing: a writer writes once."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Nothing: folders and files are made when they are written."""

    def prepare_local_plan(self, plan: planning.SavePlan) -> planning.SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[planning.SavePlan]) -> list[planning.SavePlan]:
        return plans

    def finish(self, metadata: md.Metadata, results: list[list[WriteResult]]) -> None:
        """Write nothing: the headers have it all, and torch's own file of metadata is a pickle."""

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True


def _safetensors(plan: planning.SavePlan, planner: planning.SavePlanner) -> Iterator[bytes | memoryview]:
    """The bytes of a safetensors file, straight from where the tensors are."""
    header: dict[str, Any] = {}
    places: dict[str, Any] = {}
    blobs: list[Tensor] = []
    begin = 0
    # Wide dtypes first, so that every tensor is aligned.
    for item in sorted(
        plan.items, key=lambda item: (-_tensor_data(item).properties.dtype.itemsize, item.index.fqn)
    ):
        tensor, about, name = planner.resolve_data(item), _tensor_data(item), item.index.fqn
        assert isinstance(tensor, Tensor)
        assert name not in header, "a rank holds one rectangle of a tensor"
        dtype = DTYPES.get(tensor.dtype)
        if dtype is None:
            raise ValueError(f"{name} is {tensor.dtype}, which safetensors files cannot hold")
        end = begin + tensor.nbytes
        header[name] = {"dtype": dtype, "shape": list(tensor.shape), "data_offsets": [begin, end]}
        places[name] = {"saved_offsets": list(about.chunk.offsets), "shape": list(about.size)}
        blobs.append(tensor)
        begin = end
    header["__metadata__"] = {"format": "pt", "neoproto": FORMAT, PLACES: json.dumps(places)}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    for tensor in blobs:
        yield tensor.reshape(-1).view(torch.uint8).numpy().data


def _tensor_data(item: planning.WriteItem) -> planning.TensorWriteData:
    assert item.tensor_data is not None, "only tensors are planned"
    return item.tensor_data
