"""Reading the files of a checkpoint back, by any number of ranks. Nothing in them is executed."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint import metadata as md
from torch.distributed.checkpoint import planner as planning
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from actors.checkpoint.files import DTYPES, FORMAT, PLACES, failures_of, shard_name, state_name
from actors.checkpoint.plans import LoadPlanner, planned
from actors.checkpoint.state import Part
from actors.training.ranks import Ranks
from neoproto.errors import ConfigError, WeightMismatch

_SHARD = re.compile(r"shard-\d{5}-of-(\d{5})\.safetensors")
_MOST = 5
"""Names that an error lists before it counts the rest."""


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
            WeightMismatch: names, shapes or dtypes differ; lists them.
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

    def only(self, prefix: str) -> Stored:
        """Only the tensors whose names begin with the prefix."""
        tensors = {name: one for name, one in self._tensors() if name.startswith(prefix)}
        return replace(self, metadata=md.Metadata(state_dict_metadata=dict(tensors)))

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


def read_checkpoint(
    stored: Stored, parts: Mapping[str, Part], ranks: Ranks, group: ProcessGroup | None
) -> None:
    """Fill this rank's parts, which `stored.check` has found to fit. Collective.

    Raises:
        OSError, SafetensorError: a file cannot be read any more; some parts may be filled already.
    """
    with failures_of(ranks):
        load(planned(parts), storage_reader=_Reader(stored), planner=LoadPlanner(), process_group=group)


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


_DAMAGE = (
    SafetensorError, OSError, KeyError, TypeError, AttributeError, RecursionError, json.JSONDecodeError,
)  # fmt: skip
"""What a header of another program, or one that was changed, makes of reading it."""


def _pieces(
    path: Path,
) -> Iterator[tuple[str, torch.dtype, tuple[int, ...], md.ChunkStorageMetadata]]:
    """Of each piece in a file: name, dtype, shape of the whole tensor, place in it."""
    dtypes = {text: dtype for dtype, text in DTYPES.items()}
    try:
        with safe_open(path, framework="pt") as file:
            about = file.metadata() or {}
            if about.get("neoproto") != FORMAT:
                raise ConfigError(f"{path} is not a file of a checkpoint ({FORMAT!r})")
            places = json.loads(about[PLACES])
            for name in file.keys():  # noqa: SIM118 - no mapping
                view, place = file.get_slice(name), places[name]
                chunk = md.ChunkStorageMetadata(
                    offsets=torch.Size(place["saved_offsets"]), sizes=torch.Size(view.get_shape())
                )
                yield name, dtypes[view.get_dtype()], tuple(place["shape"]), chunk
    except _DAMAGE as error:
        raise ConfigError(f"{path} is damaged, or no safetensors file of a checkpoint: {error}") from error


def _state(path: Path) -> dict[str, Any]:
    try:
        state = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
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
