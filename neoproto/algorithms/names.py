"""Names of what the tensor functions here can do, for a configuration that is read without torch.

Each is the value of an option, and a case of the function that is named beside it. Advantage estimators and
policy losses are not here: each of them is a file, in `estimators` and `losses`.
"""

from __future__ import annotations

from typing import Literal, get_args

KLName = Literal["k1", "k2", "k3", "abs"]
"""Of `kl.kl_estimate`."""
KLLossName = Literal["k1", "k2", "k3"]
"""Those that the policy loss may have a term of."""
LossAggMode = Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
"""Of `aggregate.aggregate_loss`."""
LRSchedule = Literal["constant", "linear", "cosine"]
"""Of `schedule.lr_multiplier`."""
RolloutISLevel = Literal["token", "sequence"]
"""Of `rollout_correction.importance_weights`."""

KL_NAMES: tuple[str, ...] = get_args(KLName)
LOSS_AGG_MODES: tuple[str, ...] = get_args(LossAggMode)
LR_SCHEDULES: tuple[str, ...] = get_args(LRSchedule)
ROLLOUT_IS_LEVELS: tuple[str, ...] = get_args(RolloutISLevel)
