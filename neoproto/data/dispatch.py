"""Batches to ranks and back: what the runtime's dispatch modes are made of."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from neoproto.data.proto import DataProto


@dataclass(frozen=True, kw_only=True, slots=True)
class RankSplit:
    """A batch cut for n ranks.

    Attributes:
        chunks: one batch per rank, of equal length.
        padding: how many rows at the end of the last chunks repeat rows of the batch.
    """

    chunks: tuple[DataProto, ...]
    padding: int

    def collect(self, results: Sequence[Any]) -> Any:
        """Put the ranks' results together and take out what belongs to padding.

        A rank may return several rows for each of its own (samples of a prompt, row-major): as many are taken
        out for each row of padding.

        Args:
            results: one per rank, in order: all batches, all tensors, all arrays, or all lists.

        Raises:
            ValueError: results of different kinds; padding and a result whose length is no multiple of its
                rank's rows.
        """
        whole = collect(results)
        if not self.padding:
            return whole
        rows = sum(len(chunk) for chunk in self.chunks)
        if len(whole) % rows:
            raise ValueError(
                f"cannot remove {self.padding} rows of padding: {rows} rows went in, {len(whole)} came out"
            )
        kept = len(whole) - self.padding * (len(whole) // rows)
        return whole[:kept]


def split_for_ranks(batch: DataProto, n: int, *, pad: bool) -> RankSplit:
    """Cut a batch into n equal chunks, without reading or changing it.

    Inline columns go to the active store first, if there is one, so that each rank reads its own rows.

    Args:
        pad: repeat the first rows at the end if the length does not divide.

    Raises:
        ValueError: the length does not divide and `pad` is false, or there is no row to repeat.
    """
    if n < 1:
        raise ValueError(f"cannot split a batch for {n} ranks")
    batch, padding = batch.stored(), 0
    if pad:
        batch, padding = batch.pad_to_divisor(n)
    elif len(batch) % n:
        raise ValueError(f"{len(batch)} rows do not divide over {n} ranks; pad the batch or change its size")
    return RankSplit(chunks=tuple(batch.chunk(n)), padding=padding)


def share_rows(batch: DataProto, n: int) -> list[DataProto]:
    """Cut a batch into n contiguous shares whose sizes differ by one row at most; a share may be empty.

    For rows that are independent: no row is there twice, as `split_for_ranks` pads. Inline columns go to the
    active store first, if there is one, so that each receiver reads its own rows.
    """
    stored = batch.stored()
    bounds = [len(batch) * place // n for place in range(n + 1)]
    return [stored.slice(start, end) for start, end in itertools.pairwise(bounds)]


def join_rows(answers: Sequence[DataProto]) -> DataProto:
    """The answers to shares as one batch, in order; a row may have been answered with several."""
    return DataProto.concat([answer for answer in answers if len(answer)] or answers[:1])


def collect(results: Sequence[Any]) -> Any:
    """Put ranks' results together, in order: batches, tensors, arrays or lists.

    Raises:
        ValueError: no result, or results of different kinds.
    """
    kinds: list[tuple[type, Any]] = [
        (DataProto, DataProto.concat),
        (torch.Tensor, lambda values: torch.cat(list(values))),
        (np.ndarray, lambda values: np.concatenate(list(values))),
        (list, lambda values: [item for value in values for item in value]),
    ]
    for kind, join in kinds:
        if results and all(isinstance(result, kind) for result in results):
            return join(results)
    found = ", ".join(type(result).__name__ for result in results) or "nothing"
    raise ValueError(
        f"cannot collect results of ranks: batches, tensors, arrays or lists are needed, got {found}"
    )
