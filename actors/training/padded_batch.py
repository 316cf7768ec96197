"""A rank's rows of a batch, and the pieces that go through a model.

Batches travel with fixed widths: prompts padded on the left to P, responses on the right to R. A piece is cut
to the longest prompt and the longest response in it, so that padding is transported but hardly computed.

    batch [B, P+R] ──mini-batches──> rows ──micro-batches, by length──> [b, p+r]

Shapes: B = rows of this rank, b = rows of a piece, p, r = its widths.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

SEQUENCE_COLUMNS = ("input_ids", "attention_mask", "position_ids")
MODEL_COLUMNS = (*SEQUENCE_COLUMNS, "responses", "response_mask")
"""What every forward pass needs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MicroBatch:
    """Rows that go through the model together.

    Attributes:
        rows: int64 [b], where they lie in the batch.
        input_ids, attention_mask, position_ids: int64 [b, p+r].
        columns: all other columns of these rows, [b, r] or [b].
        response_width: r, at least 1.
        response_lengths: int64 [b], attended tokens after the prompt.
    """

    rows: Tensor
    input_ids: Tensor
    attention_mask: Tensor
    position_ids: Tensor
    columns: Mapping[str, Tensor]
    response_width: int
    response_lengths: Tensor

    def __getitem__(self, name: str) -> Tensor:
        return self.columns[name]


class PaddedBatch:
    """Columns of this rank's rows, on its device.

    Args:
        columns: at least `MODEL_COLUMNS`; those that are not `SEQUENCE_COLUMNS` are [B, R] or [B].

    Raises:
        ValueError: a column is missing, or a shape does not fit.
    """

    def __init__(self, columns: Mapping[str, Tensor], device: torch.device | None = None) -> None:
        missing = [name for name in MODEL_COLUMNS if name not in columns]
        if missing:
            raise ValueError(f"the batch lacks {', '.join(missing)}; it has {', '.join(sorted(columns))}")
        rows, self.response_width = columns["responses"].shape
        self.prompt_width = columns["input_ids"].shape[1] - self.response_width
        full = (rows, self.prompt_width + self.response_width)
        for name, column in columns.items():
            fits = (full,) if name in SEQUENCE_COLUMNS else ((rows, self.response_width), (rows,))
            if tuple(column.shape) not in fits:
                raise ValueError(f"{name} has shape {tuple(column.shape)}, expected {fits[0]}")
        attended = columns["attention_mask"]
        self.prompt_lengths = attended[:, : self.prompt_width].sum(dim=1).cpu()
        self.response_lengths = attended[:, self.prompt_width :].sum(dim=1).cpu()
        self.columns = {name: column.to(device) for name, column in columns.items()}

    def __len__(self) -> int:
        return len(self.prompt_lengths)

    def __getitem__(self, name: str) -> Tensor:
        return self.columns[name]

    def micro_batches(self, rows: Tensor, size: int) -> Iterator[MicroBatch]:
        """The given rows in pieces of at most `size`, rows of like length together.

        The number of pieces depends on the number of rows only: under FSDP all ranks need the same.
        """
        lengths = self.prompt_lengths[rows] + self.response_lengths[rows]
        by_length = rows[torch.argsort(lengths, stable=True)]
        for start in range(0, len(by_length), size):
            yield self.cut(by_length[start : start + size])

    def cut(self, rows: Tensor) -> MicroBatch:
        """The given rows, int64 [b], b > 0, cut to their longest prompt and response (at least one token)."""
        prompt = max(1, int(self.prompt_lengths[rows].max()))
        response = max(1, int(self.response_lengths[rows].max()))
        window = slice(self.prompt_width - prompt, self.prompt_width + response)
        index = rows.to(self.columns["input_ids"].device)
        picked = {
            name: (column[:, window] if name in SEQUENCE_COLUMNS else column[:, :response])[index]
            if column.dim() == 2
            else column[index]
            for name, column in self.columns.items()
        }
        return MicroBatch(
            rows=rows,
            input_ids=picked.pop("input_ids"),
            attention_mask=picked.pop("attention_mask"),
            position_ids=picked.pop("position_ids"),
            columns=picked,
            response_width=response,
            response_lengths=self.response_lengths[rows].to(index.device),
        )


def mini_batch_rows(
    rows: int,
    mini_batch_samples: int,
    *,
    rank: int,
    world_size: int,
    seed: int | None,
    samples_per_prompt: int = 1,
) -> list[Tensor]:
    """Which of this rank's rows belong to each mini-batch of the whole batch.

    The whole batch (rank 0's rows, then rank 1's, …) is seen as blocks of k consecutive rows, k being the
    number of mini-batches; every mini-batch takes one row of each block. Hence all ranks have the same share,
    and a mini-batch consists of the same samples on any number of ranks. Without a seed the blocks are of k
    prompts' rows, and a mini-batch takes one prompt of each: the samples of a prompt stay together. Where the
    ranks outnumber a mini-batch's prompts or do not divide them, a prompt's rows lie on several ranks: then
    as many stay together as every rank can have, and mini-batches depend on the number of ranks.

    Args:
        rows: rows of this rank; all ranks have as many.
        mini_batch_samples: rows of one mini-batch on all ranks together.
        seed: of the random order inside each block (each row is equally likely in each mini-batch); None
            takes prompt j of every block for mini-batch j.
        samples_per_prompt: consecutive rows that are one prompt's.

    Returns:
        k int64 tensors of mini_batch_samples / world_size rows each.

    Raises:
        ValueError: the ranks cannot share mini-batches equally, or the batch is not a multiple of one.
    """
    share, rest = divmod(mini_batch_samples, world_size)
    if rest or share == 0:
        raise ValueError(
            f"{world_size} ranks cannot share mini-batches of {mini_batch_samples} samples equally"
        )
    if rows == 0 or rows % share:
        raise ValueError(
            f"{rows * world_size} samples do not divide into mini-batches of {mini_batch_samples}"
        )
    k = rows // share
    if seed is None:
        together = math.gcd(share, samples_per_prompt)
        blocks = torch.arange(rows).view(share // together, k, together)
        return list(blocks.transpose(0, 1).reshape(k, share).unbind(0))
    generator = torch.Generator().manual_seed(seed)
    order = torch.rand(mini_batch_samples, k, generator=generator, dtype=torch.float64).argsort(dim=1)
    order = order[rank * share : (rank + 1) * share]
    first = torch.arange(share).unsqueeze(1) * k
    return list((first + order).t().contiguous().unbind(0))
