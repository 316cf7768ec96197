"""Scores of samples against those of their group: the samples of one prompt.

Shapes: b = rows, t = response tokens.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch

from neoproto.algorithms.advantages import Estimate
from neoproto.algorithms.masking import fill_masked, masked_sum, sequence_lengths


def group_ids_from_uids(uids: Sequence[Hashable]) -> torch.Tensor:
    """int64 [B]: the same number for the same uid, numbered in order of first appearance."""
    numbers: dict[Hashable, int] = {}
    return torch.tensor([numbers.setdefault(uid, len(numbers)) for uid in uids], dtype=torch.int64)


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupScores:
    """Row scores in float64 and, per row, its group; rows with an empty mask weigh nothing.

    They are float64: the rounding of the mean of equal scores, divided by a small epsilon, would pass for an
    advantage.

    Attributes:
        scores_b: float64 [B], 0 on rejected rows.
        counted_b: bool [B], the row has tokens.
        index_b: int64 [B], groups numbered from 0.
        size_b: float64 [B], counted rows in the row's group.
    """

    scores_b: torch.Tensor
    counted_b: torch.Tensor
    index_b: torch.Tensor
    size_b: torch.Tensor

    @classmethod
    def of(cls, rewards_bt: torch.Tensor, mask_bt: torch.Tensor, group_ids_b: torch.Tensor) -> GroupScores:
        """The sums of the rewards under the mask, by group.

        Args:
            rewards_bt: float [B, T].
            mask_bt: [B, T].
            group_ids_b: int64 [B], any values, equal within a group.
        """
        if group_ids_b.shape != mask_bt.shape[:1] or group_ids_b.dtype != torch.int64:
            raise ValueError(
                f"group_ids_b must be int64 [{mask_bt.shape[0]}], "
                f"got {group_ids_b.dtype} {list(group_ids_b.shape)}"
            )
        counted_b = sequence_lengths(mask_bt) > 0
        scores_b = masked_sum(rewards_bt.double(), mask_bt, dim=-1)
        _, index_b = torch.unique(group_ids_b, return_inverse=True)
        size_b = _group_sum(counted_b.double(), index_b)
        return cls(scores_b=scores_b, counted_b=counted_b, index_b=index_b, size_b=size_b)

    def sum(self, values_b: torch.Tensor) -> torch.Tensor:
        """[B]: for each row, the sum of `values_b` over the counted rows of its group."""
        return _group_sum(torch.where(self.counted_b, values_b, 0.0), self.index_b)

    def mean_b(self) -> torch.Tensor:
        """[B]: the mean score of the counted rows of each row's group."""
        return self.sum(self.scores_b) / self.size_b.clamp(min=1)

    def onto_tokens(
        self, advantages_b: torch.Tensor, rewards_bt: torch.Tensor, mask_bt: torch.Tensor
    ) -> Estimate:
        """One number per row onto its tokens, 0 for a row alone in its group: it is compared with nothing.

        Without a value function the returns are the advantages.
        """
        advantages_b = torch.where(self.size_b > 1, advantages_b, 0.0)
        advantages_bt = advantages_b.to(rewards_bt.dtype).unsqueeze(-1).expand_as(rewards_bt)
        advantages_bt = fill_masked(advantages_bt, mask_bt)
        return advantages_bt, advantages_bt.clone()


def _group_sum(values_b: torch.Tensor, index_b: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(values_b).index_add_(0, index_b, values_b)[index_b]
