"""An advantage estimator of your own: a sample against the median of its prompt's samples, not the mean.

python -m neoproto.run --config-name grpo_monarch algorithm.adv_estimator=custom \
    algorithm.custom_advantage_function.path=docs/examples/median_baseline.py
"""

from __future__ import annotations

import torch

from neoproto.algorithms.advantages import AdvantageInputs, AdvantageOptions, Estimate
from neoproto.algorithms.masking import masked_sum


def compute_advantages(inputs: AdvantageInputs, options: AdvantageOptions, floor: float = 0.1) -> Estimate:
    """A = (score - median) / mean absolute deviation from it, which counts as `floor` where it is less."""
    group_ids_b = inputs.required("median_baseline", "group_ids_b")
    score_b = masked_sum(inputs.rewards_bt, inputs.mask_bt, dim=-1)
    has_tokens_b = inputs.mask_bt.any(dim=1)  # a row without any was left out (algorithm.truncated=mask)
    advantage_b = torch.zeros_like(score_b)
    for group in torch.unique(group_ids_b):
        rows_b = (group_ids_b == group) & has_tokens_b
        if rows_b.any():
            centred = score_b[rows_b] - score_b[rows_b].quantile(0.5)
            advantage_b[rows_b] = centred / centred.abs().mean().clamp(min=floor)
    advantages_bt = advantage_b[:, None] * inputs.mask_bt
    return advantages_bt, advantages_bt
