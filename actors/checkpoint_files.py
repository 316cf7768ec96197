"""The files of a checkpoint: torch.distributed.checkpoint plans, this writes and reads. No pickle is in them.

    shard-00000-of-00002.safetensors   what rank 0 of 2 wrote; its header says where each piece belongs
    rank-00000-of-00002.json           rank 0's other state

torch's own HuggingFaceStorageWriter makes another copy of a rank's state in memory and knows no checksums;
its reader takes a missing piece for none. The headers are in its form all the same (`DCP_SHARDING_INFO`), so
that its reader, and any reader of safetensors, opens these files.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import re
import warnings
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint import metadata as md
from torch.distributed.checkpoint import planner as planning
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from actors.checkpoint_plans import LoadPlanner, SavePlanner, planned
from actors.checkpoint_state import Part
from actors.ranks import Ranks
from neoproto.errors import ConfigError, WeightMismatch

FORMAT = "neoproto checkpoint 1"
_PLACES = "DCP_SHARDING_INFO"
_SHARD = re.compile(r"shard-\d{5}-of-(\d{5})\.safetensors")
_MOST = 5
"""Names that an error lists before it counts the rest."""
_CHUNK = 1 << 20
"""Bytes hashed and written at a time: they are still in the processor's cache when they are written."""
_DTYPES: Mapping[torch.dtype, str] = {
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
        group: the ranks, in a group that nothing else uses meanwhile; None alone.

    Returns:
        SHA-256 in hexadecimal of the files this rank wrote, by their names in `folder`.

    Raises:
        OSError: a file could not be written, on this rank or on another; names it. All ranks raise.
    """
    writer = _Writer(folder, state, ranks)
    with _failures_of(ranks):
        save(planned(parts), storage_writer=writer, planner=SavePlanner(), process_group=group)
    return writer.digests


def read_checkpoint(
    stored: Stored, parts: Mapping[str, Part], ranks: Ranks, group: ProcessGroup | None
) -> None:
    """Fill this rank's parts, which `stored.check` has found to fit. Collective.

    Raises:
        OSError, SafetensorError: a file cannot be read any more; some parts may be filled already.
    """
    with _failures_of(ranks):
        load(planned(parts), storage_reader=_Reader(stored), planner=LoadPlanner(), process_group=group)


@contextlib.contextmanager
def _failures_of(ranks: Ranks) -> Iterator[None]:
    """What failed on this rank, else on the first that failed, as it was raised there."""
    # A single rank has no process group; torch would say so at every save.
    warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
    try:
        yield
    except CheckpointException as error:
        failed = ranks.rank if ranks.rank in error.failures else min(error.failures)
        cause, stack = error.failures[failed]
        cause.add_note(f"on rank {failed}, at\n{''.join(stack.format())}")
        raise cause from None


@contextlib.contextmanager
def _named(path: Path) -> Iterator[None]:
    """Have OSErrors name the file; those of writing do not by themselves."""
    try:
        yield
    except OSError as error:
        if error.filename is not None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error


def _sync(folder: Path) -> None:
    """Put the folder's list of files on the disk."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# Writing


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
        with _named(self._folder):
            self._folder.mkdir(parents=True, exist_ok=True)
        rank, world_size = self._ranks.rank, self._ranks.world_size
        self._write(state_name(rank, world_size), iter([json.dumps(self._state).encode()]))
        self._write(shard_name(rank, world_size), _safetensors(plan, planner))
        with _named(self._folder):
            _sync(self._folder)
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
        with _named(path), path.open("xb", buffering=0) as file:
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
        """Nothing: the headers say it all, and torch's own file of metadata is a pickle."""

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
        dtype = _DTYPES.get(tensor.dtype)
        if dtype is None:
            raise ValueError(f"{name} is {tensor.dtype}, which safetensors files cannot hold")
        end = begin + tensor.nbytes
        header[name] = {"dtype": dtype, "shape": list(tensor.shape), "data_offsets": [begin, end]}
        places[name] = {"saved_offsets": list(about.chunk.offsets), "shape": list(about.size)}
        blobs.append(tensor)
        begin = end
    header["__metadata__"] = {"format": "pt", "neoproto": FORMAT, _PLACES: json.dumps(places)}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    for tensor in blobs:
        yield tensor.reshape(-1).view(torch.uint8).numpy().data


def _tensor_data(item: planning.WriteItem) -> planning.TensorWriteData:
    assert item.tensor_data is not None, "only tensors are planned"
    return item.tensor_data


# Reading


@dataclass(frozen=True, kw_only=True, slots=True)
class Stored:
    """What a checkpoint's folder holds, by its headers.

    Attributes:
        folder: the folder.
        world_size: of the ranks that wrote it.
        states: their other state, by rank.
        metadata: of every tensor its dtype, shape and pieces.
        files: (name, offsets) of a piece -> the file it is in.
    """

    folder: Path
    world_size: int
    states: tuple[dict[str, Any], ...]
    metadata: md.Metadata
    files: Mapping[tuple[str, tuple[int, ...]], Path]

    @property
    def updates(self) -> int:
        """`TrainLoop.updates`, the same on all ranks."""
        return int(self.states[0]["updates"])

    @property
    def names(self) -> frozenset[str]:
        """Names of its tensors."""
        return frozenset(self.metadata.state_dict_metadata)

    def check(self, parts: Mapping[str, Part]) -> None:
        """Compare with what is to be filled.

        Raises:
            WeightMismatch: names, shapes or dtypes differ; says which.
        """
        found = {name: (str(one.properties.dtype), tuple(one.size)) for name, one in self._tensors()}
        wanted = {name: (str(part.local.dtype), part.whole) for name, part in parts.items()}
        problems = [f"it lacks {_some(wanted.keys() - found.keys())}"] if wanted.keys() - found.keys() else []
        if found.keys() - wanted.keys():
            problems.append(f"the model lacks {_some(found.keys() - wanted.keys())}")
        differing = [
            f"{name} is {_described(found[name])} in it and {_described(wanted[name])} in the model"
            for name in sorted(found.keys() & wanted.keys())
            if found[name] != wanted[name]
        ]
        problems += differing[:_MOST] + (
            [f"and {len(differing) - _MOST} more differ"] if differing[_MOST:] else []
        )
        if problems:
            raise WeightMismatch(f"the checkpoint {self.folder} is of another model: {'; '.join(problems)}")

    def _tensors(self) -> Iterator[tuple[str, md.TensorStorageMetadata]]:
        for name, one in self.metadata.state_dict_metadata.items():
            assert isinstance(one, md.TensorStorageMetadata)
            yield name, one


def open_checkpoint(folder: Path) -> Stored:
    """Read the headers and the other state of a checkpoint; nothing in it is executed.

    Raises:
        ConfigError: a file is missing, damaged, or something else; names it. There may be several.
    """
    world_size = _world_size(folder)
    tensors: dict[str, md.TensorStorageMetadata] = {}
    files: dict[tuple[str, tuple[int, ...]], Path] = {}
    for rank in range(world_size):
        path = folder / shard_name(rank, world_size)
        for name, dtype, whole, chunk in _pieces(path):
            properties = md.TensorProperties(dtype=dtype)
            one = tensors.setdefault(
                name, md.TensorStorageMetadata(properties=properties, size=torch.Size(whole), chunks=[])
            )
            if (one.properties.dtype, tuple(one.size)) != (dtype, whole):
                raise ConfigError(f"{path}: {name} has another dtype or shape than in the other files")
            one.chunks.append(chunk)
            files[name, tuple(chunk.offsets)] = path
    for name, one in tensors.items():
        there = sum(math.prod(chunk.sizes) for chunk in one.chunks)
        if there != math.prod(one.size):
            raise ConfigError(f"{folder}: {there} of {math.prod(one.size)} elements of {name} are there")
    return Stored(
        folder=folder,
        world_size=world_size,
        states=tuple(_state(folder / state_name(rank, world_size)) for rank in range(world_size)),
        metadata=md.Metadata(state_dict_metadata=dict(tensors)),
        files=files,
    )


def _world_size(folder: Path) -> int:
    try:
        names = {path.name for path in folder.iterdir()}
    except OSError as error:
        raise ConfigError(f"{folder} cannot be read as a checkpoint: {error.strerror}") from error
    sizes = {int(match[1]) for name in names if (match := _SHARD.fullmatch(name))}
    if not sizes:
        raise ConfigError(
            f"{folder} holds no checkpoint of a worker: there are no shard-…-of-….safetensors in it"
        )
    if len(sizes) > 1:
        raise ConfigError(f"{folder} holds shards of several checkpoints: of {sorted(sizes)} ranks")
    world_size = sizes.pop()
    expected = {one(rank, world_size) for one in (shard_name, state_name) for rank in range(world_size)}
    if expected - names:
        raise ConfigError(f"{folder} is not complete: {_some(expected - names)} missing")
    return world_size


def _pieces(
    path: Path,
) -> Iterator[tuple[str, torch.dtype, tuple[int, ...], md.ChunkStorageMetadata]]:
    """Of each piece in a file: name, dtype, shape of the whole tensor, place in it."""
    dtypes = {text: dtype for dtype, text in _DTYPES.items()}
    try:
        with safe_open(path, framework="pt") as file:
            about = file.metadata() or {}
            if about.get("neoproto") != FORMAT:
                raise ConfigError(f"{path} is not a file of a checkpoint ({FORMAT!r})")
            places = json.loads(about[_PLACES])
            for name in file.keys():  # noqa: SIM118 - no mapping
                view, place = file.get_slice(name), places[name]
                chunk = md.ChunkStorageMetadata(
                    offsets=torch.Size(place["saved_offsets"]), sizes=torch.Size(view.get_shape())
                )
                yield name, dtypes[view.get_dtype()], tuple(place["shape"]), chunk
    except (SafetensorError, OSError, KeyError, TypeError, json.JSONDecodeError) as error:
        raise ConfigError(f"{path} is damaged, or no safetensors file of a checkpoint: {error}") from error


def _state(path: Path) -> dict[str, Any]:
    try:
        state = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} is damaged: {error}") from error
    if not isinstance(state, dict) or state.get("format") != FORMAT or not {"updates", "rng"} <= state.keys():
        raise ConfigError(f"{path} is not a file of a checkpoint ({FORMAT!r})")
    return state


def _some(names: Collection[str]) -> str:
    shown = ", ".join(sorted(names)[:_MOST])
    return shown if len(names) <= _MOST else f"{shown} and {len(names) - _MOST} more"


def _described(one: tuple[str, tuple[int, ...]]) -> str:
    return f"{one[0].removeprefix('torch.')}{list(one[1])}"


class _Reader(StorageReader):
    """Reads pieces, or parts of them, into place."""

    def __init__(self, stored: Stored) -> None:
        self._stored = stored

    def read_metadata(self, *args: Any, **kwargs: Any) -> md.Metadata:
        return self._stored.metadata

    def read_data(self, plan: planning.LoadPlan, planner: planning.LoadPlanner) -> Future[None]:
        by_file: dict[Path, list[planning.ReadItem]] = {}
        for item in plan.items:
            offsets = item.storage_index.offset
            assert offsets is not None
            by_file.setdefault(self._stored.files[item.storage_index.fqn, tuple(offsets)], []).append(item)
        for path, items in by_file.items():
            with safe_open(path, framework="pt") as file:
                for item in items:
                    where = tuple(
                        slice(begin, begin + length)
                        for begin, length in zip(item.storage_offsets, item.lengths, strict=True)
                    )
                    target = planner.resolve_tensor(item)
                    with torch.no_grad():
                        target.copy_(file.get_slice(item.storage_index.fqn)[where])
                    planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Nothing: a reader reads once."""

    def set_up_storage_reader(
        self, metadata: md.Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Nothing: headers have been read."""

    def prepare_local_plan(self, plan: planning.LoadPlan) -> planning.LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[planning.LoadPlan]) -> list[planning.LoadPlan]:
        return plans

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True
